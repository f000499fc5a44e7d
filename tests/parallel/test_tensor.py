"""Tensor and sequence parallelism: what is sent in which order, and the loss over a vocabulary cut among ranks."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.trace import Collective, Trace, module_named, traced
from tests.parity import Settings, build, my_batches, tiny
from tests.workers import run
from torchllm.models.decoder import Decoder
from torchllm.parallel.pipeline import OneStage
from torchllm.parallel.tensor import vocab_parallel_cross_entropy_sum
from torchllm.spec.parameters import canonical_name, rule_of

LAYERS, TOKENS, HIDDEN, VOCAB = 2, 48, 64, 192
ONE: Settings = {"model.layers": LAYERS, "model.vocab": VOCAB, "training.global_batch_size": 1, "parallel.tp": 2}
ONE["training.sequence_length"] = TOKENS  # 2 x 48 is not 64: no two kinds of collective have one size
SP = {**ONE, "parallel.sequence_parallel": True}
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def mark_products(trace: Trace, stage: Decoder) -> None:
    for layer in range(LAYERS):
        for name in PRODUCTS:
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            module = module_named(stage, f"layers.{layer}.{part}.{name}")
            module.register_forward_pre_hook(trace.mark(f"{layer} {name}"))
    module_named(stage, "lm_head").register_forward_hook(trace.mark("loss"))


def sent_of_a_step(settings: Settings) -> list[Collective | str]:
    return [event for event in traced(settings, mark_products) if isinstance(event, str) or event.axis == "tp"]


@functools.cache
def sent_under(name: str) -> list[Collective | str]:
    return run(sent_of_a_step, 2, {"tp": ONE, "tp+sp": SP}[name])[0]


def words(events: list[Collective | str]) -> list[str]:
    """Collectives of the hidden states as words; the others with their number of elements."""
    size = TOKENS * HIDDEN
    return [
        event if isinstance(event, str) else event.kind + (f" {event.elements}" if event.elements != size else "")
        for event in events
    ]


def test_collectives_of_tensor_parallelism() -> None:
    """One all-reduce after o, one after down; in the backward one for gate and up, one for q, k and v."""
    events = words(sent_under("tp"))
    forward, backward = events[: events.index("loss")], events[events.index("loss") + 1 :]
    expected = ["reduce"]  # the embedding
    for n in range(LAYERS):
        expected += [*(f"{n} {name}" for name in PRODUCTS[:4]), "reduce"]
        expected += [*(f"{n} {name}" for name in PRODUCTS[4:]), "reduce"]
    assert forward == [*expected, f"reduce {TOKENS}", f"reduce {2 * TOKENS}"]  # the loss: three numbers per token
    assert backward == ["reduce"] * (2 * LAYERS + 1)  # q, k, v (gate, up) together, and the head


def test_collectives_of_sequence_parallelism() -> None:
    """A gather before q, k, v and before gate, up; a reduce-scatter after o and after down."""
    events = words(sent_under("tp+sp"))
    forward, backward = events[: events.index("loss")], events[events.index("loss") + 1 :]
    expected = ["scatter"]  # the embedding
    for n in range(LAYERS):
        expected += ["gather", *(f"{n} {name}" for name in PRODUCTS[:4]), "scatter"]
        expected += ["gather", *(f"{n} {name}" for name in PRODUCTS[4:]), "scatter"]
    assert forward == [*expected, "gather", f"reduce {TOKENS}", f"reduce {2 * TOKENS}"]  # head and loss
    # each rank's norms have seen a part of the tokens: their gradients, D numbers each, are summed
    assert backward.count(f"reduce {HIDDEN}") == 2 * LAYERS + 1
    hidden = [word for word in backward if word != f"reduce {HIDDEN}"]
    assert hidden == ["scatter", *["gather", "scatter"] * (2 * LAYERS), "gather"]  # head, down, ..., embedding


def test_sequence_parallelism_sends_the_same_bytes() -> None:
    tp, sp = (
        [e for e in sent_under(name) if isinstance(e, Collective) and e.elements != HIDDEN] for name in ("tp", "tp+sp")
    )
    assert sum(e.bytes(2) for e in tp) == sum(e.bytes(2) for e in sp)
    # two ranks send a float32 tensor's size in an all-reduce: per block two forward and two backward; the two ends; and
    # the loss (the maximum is counted with the two sums)
    assert sum(e.bytes(2) for e in tp) == 4 * ((4 * LAYERS + 2) * TOKENS * HIDDEN + 3 * TOKENS)


def test_logits_are_never_sent() -> None:
    chunked = run(sent_of_a_step, 2, {**SP, "training.loss_chunk": 8})[0]
    check_loss_collectives(sent_under("tp"), times_computed=1)
    check_loss_collectives(sent_under("tp+sp"), times_computed=1)
    check_loss_collectives(chunked, times_computed=2)


def check_loss_collectives(events: list[Collective | str], times_computed: int) -> None:
    """Assert that the loss sends three numbers per token, and nothing is larger than the hidden states."""
    sizes = [event.elements for event in events if isinstance(event, Collective)]
    assert max(sizes) == TOKENS * HIDDEN < TOKENS * VOCAB // 2
    loss_sizes = [size for size in sizes if size not in (TOKENS * HIDDEN, HIDDEN)]
    assert sum(loss_sizes) == 3 * TOKENS * times_computed


def local_shapes(settings: Settings) -> tuple[dict[str, set[Any]], dict[str, Any]]:
    """Shapes that the norms and the attention cores get, and of every parameter's shard."""
    config = tiny(settings)
    _, (stage,) = build(config)
    shapes: dict[str, set[Any]] = {"norm": set(), "attention": set(), "mlp": set(), "block": set()}
    kinds = {"input_layernorm": "norm", "post_attention_layernorm": "norm", "norm": "norm", "core": "attention"}
    kinds |= {"down_proj": "mlp"}
    for name, module in stage.named_modules():
        kind = kinds.get(name.rpartition(".")[2])
        if kind is not None:
            module.register_forward_pre_hook(
                lambda module, args, kind=kind: shapes[kind].add(tuple(_local(args[0]).shape))  # type: ignore[misc]
            )
    for block in stage.layers.values():
        block.register_forward_hook(lambda module, args, out: shapes["block"].add(tuple(_local(out).shape)))
    tokens = torch.arange(TOKENS).view(1, -1)
    stage(tokens, tokens, None, tokens)
    return shapes, {n: tuple(p.to_local().shape) for n, p in stage.named_parameters()}  # type: ignore[attr-defined]


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


MATRICES = {
    "embed_tokens": (192, 64),
    "lm_head": (192, 64),
    "q_proj": (64, 64),
    "k_proj": (32, 64),
    "v_proj": (32, 64),
    "o_proj": (64, 64),
    "gate_proj": (96, 64),
    "up_proj": (96, 64),
    "down_proj": (64, 96),
}
"""shape of each matrix of the whole model"""


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_a_rank_holds(sequence_parallel: bool) -> None:
    """Without sequence parallelism every token of (B, S, D) between the matrices, with it S / tp of them."""
    part = TOKENS // 2 if sequence_parallel else TOKENS
    for shapes, parameters in run(local_shapes, 2, SP if sequence_parallel else ONE):
        assert shapes == {
            "norm": {(1, part, HIDDEN)},
            "block": {(1, part, HIDDEN)},
            "attention": {(1, TOKENS, 4, 8)},  # 4 of 8 heads
            "mlp": {(1, TOKENS, 48)},  # 48 of 96
        }
        for name, shape in parameters.items():
            module = name.split(".")[-2]
            full = MATRICES.get(module, (HIDDEN,))  # others are norms
            cut = rule_of(canonical_name(name)).cut
            axis = {"vocab": 0, "colwise": 0, "rowwise": 1, "whole": None}[cut]
            assert shape == tuple(size // 2 if index == axis else size for index, size in enumerate(full)), name


class TableGradients(TorchDispatchMode):
    """Rows of the tables that embeddings make gradients of."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding_dense_backward.default:
            self.rows.append(len(out))
        return out


def rows_of_the_embedding_gradient(settings: Settings) -> list[int]:
    config = tiny(settings)
    mesh, stages = build(config)
    with TableGradients() as gradients:
        OneStage(stages, config.parallel)(my_batches(config, mesh, 1, ragged=False), torch.tensor(1.0))
    return gradients.rows


@pytest.mark.parametrize("settings", [ONE, SP], ids=["tp", "tp+sp"])
def test_a_rank_makes_the_gradient_of_its_part_of_the_embedding(settings: Settings) -> None:
    assert run(rows_of_the_embedding_gradient, 2, {**settings, "model.vocab": 97}) == [[49], [48]]


LOSSES: dict[str, tuple[int, torch.dtype, float]] = {
    "even": (96, torch.float32, 1.0),
    "uneven": (97, torch.float32, 1.0),
    "as few as ranks": (4, torch.float32, 1.0),
    "bfloat16": (97, torch.bfloat16, 1.0),
    "logits far over what exp can take": (96, torch.float32, 1e4),
}


class Losses(NamedTuple):
    """The vocabulary-parallel loss of some targets and the plain one."""

    loss: float
    expected: float
    gradient: Any
    expected_gradient: Any


def both_losses(vocab: int, dtype: torch.dtype, size: float) -> list[Losses]:
    """Return the loss, the expected loss and both gradients: for labels all over the vocabulary, and for none."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, vocab, generator=generator) * size).to(dtype)
    labels = torch.randint(vocab, (64,), generator=generator)
    labels[:2] = torch.tensor([0, vocab - 1])
    labels[10:20] = -100
    losses = []
    for targets in (labels, torch.full((64,), -100)):
        plain = logits.clone().requires_grad_()
        expected = F.cross_entropy(plain.double(), targets, ignore_index=-100, reduction="sum")
        (3.0 * expected).backward()
        cut = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        rank = mesh.get_local_rank()
        first = min(vocab, -(-vocab // mesh.size()) * rank)
        loss = vocab_parallel_cross_entropy_sum(cut, targets, first, mesh.get_group())
        (3.0 * loss).backward()
        assert loss.dtype == torch.float32
        assert cut.grad.dtype == dtype
        gradient = cut.grad.full_tensor().double().numpy()
        losses.append(Losses(loss.item(), expected.item(), gradient, plain.grad.double().numpy()))
    return losses


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_vocab_parallel_cross_entropy_is_the_plain_one(name: str, ranks: int) -> None:
    vocab, dtype, size = LOSSES[name]
    results = run(both_losses, ranks, vocab, dtype, size)
    # a gradient is rounded to the logits' type once; the loss is a float32 sum of 54 numbers
    error = 2**-8 if dtype == torch.bfloat16 else 2e-6
    for targets, no_targets in results:
        assert targets.loss == pytest.approx(targets.expected, rel=1e-6)
        largest = abs(targets.expected_gradient).max()
        assert largest > 1
        assert abs(targets.gradient - targets.expected_gradient).max() <= error * largest
        assert no_targets.loss == 0.0
        assert not no_targets.gradient.any()
