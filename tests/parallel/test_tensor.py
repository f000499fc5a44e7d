"""Tensor and sequence parallelism: what is sent in which order, and the loss over a vocabulary cut among ranks."""

import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.trace import Collective, Trace, module_named, traced
from tests.parity import Settings, Trainer, build, compare, reference_of, tiny, train_config, world_size
from tests.workers import run
from torchllm.config import Config
from torchllm.models.decoder import Decoder
from torchllm.models.layers import rms_norm
from torchllm.models.offset_norm import offset_rms_norm
from torchllm.parallel.tensor import vocab_parallel_cross_entropy_sum, width_parallel_rms_norm
from torchllm.tools.proof.layouts import with_settings

LAYERS, TOKENS, HIDDEN, VOCAB = 2, 48, 64, 192
ONE: Settings = {"model.layers": LAYERS, "model.vocab": VOCAB, "training.global_batch_size": 1, "parallel.tp": 2}
ONE["training.sequence_length"] = TOKENS  # 2 x 48 is not 64: no two kinds of collective have one size
SP = {**ONE, "parallel.sequence_parallel": True}
ATTENTION_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PRODUCTS = ("gate_proj", "up_proj", "down_proj")
PRODUCTS = ATTENTION_PRODUCTS + MLP_PRODUCTS


def mark_products(trace: Trace, stage: Decoder) -> None:
    for layer in range(LAYERS):
        for name in PRODUCTS:
            part = "self_attn" if name in ATTENTION_PRODUCTS else "mlp"
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
    result = []
    for event in events:
        if isinstance(event, str):
            result.append(event)
        elif event.elements == TOKENS * HIDDEN:
            result.append(event.kind)
        else:
            result.append(f"{event.kind} {event.elements}")
    return result


class Phases(NamedTuple):
    forward: list[str]
    backward: list[str]


def phases(events: list[Collective | str]) -> Phases:
    texts = words(events)
    loss = texts.index("loss")
    return Phases(texts[:loss], texts[loss + 1 :])


def marks(layer: int, products: tuple[str, ...]) -> list[str]:
    """What `mark_products` records of some products of a layer."""
    return [f"{layer} {name}" for name in products]


def test_collectives_of_tensor_parallelism() -> None:
    """One all-reduce after o, one after down; in the backward one for gate and up, one for q, k and v."""
    forward, backward = phases(sent_under("tp"))
    expected = ["reduce"]  # the embedding
    for layer in range(LAYERS):
        expected += [*marks(layer, ATTENTION_PRODUCTS), "reduce"]
        expected += [*marks(layer, MLP_PRODUCTS), "reduce"]
    expected += [f"reduce {TOKENS}", f"reduce {2 * TOKENS}"]  # the loss: three numbers per token
    assert forward == expected
    assert backward == ["reduce"] * (2 * LAYERS + 1)  # q, k, v (gate, up) together, and the head


def test_collectives_of_sequence_parallelism() -> None:
    """A gather before q, k, v and before gate, up; a reduce-scatter after o and after down."""
    forward, backward = phases(sent_under("tp+sp"))
    expected = ["scatter"]  # the embedding
    for layer in range(LAYERS):
        expected += ["gather", *marks(layer, ATTENTION_PRODUCTS), "scatter"]
        expected += ["gather", *marks(layer, MLP_PRODUCTS), "scatter"]
    expected += ["gather"]  # the head
    expected += [f"reduce {TOKENS}", f"reduce {2 * TOKENS}"]  # the loss
    assert forward == expected
    # each rank's norms have seen a part of the tokens: their gradients, D numbers each, are summed
    norm = f"reduce {HIDDEN}"
    assert backward.count(norm) == 2 * LAYERS + 1
    hidden = [word for word in backward if word != norm]
    assert hidden == ["scatter", *["gather", "scatter"] * (2 * LAYERS), "gather"]  # head, down, ..., embedding


def test_norms_over_the_width_send_one_number_per_token_each() -> None:
    """The sums of squares of queries and of keys, in the forward and, as their gradients, in the backward."""
    events = run(sent_of_a_step, 2, {**ONE, "model.qk_norm": "width"})[0]
    without = sent_under("tp")

    def numbers_per_token(events: list[Collective | str]) -> int:
        return sum(isinstance(event, Collective) and event.elements == TOKENS for event in events)

    assert numbers_per_token(events) - numbers_per_token(without) == 4 * LAYERS


def norm_of_this_rank(x: Tensor, weight: Tensor, has_offset: bool) -> Tensor:
    """Return the norm of this rank's part of x (T, width)."""
    mesh = init_device_mesh("cpu", (2,))
    part = x.chunk(2, dim=-1)[mesh.get_local_rank()]
    return width_parallel_rms_norm(part, distribute_tensor(weight, mesh, [Shard(0)]), 1e-5, mesh, has_offset)


def test_a_norm_over_the_width_is_that_of_one_process_in_its_inputs_type() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(TOKENS, HIDDEN, generator=generator), torch.rand(HIDDEN, generator=generator)
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):  # a bfloat16 has a last place of 2**-7
        for has_offset, plain in ((False, rms_norm), (True, offset_rms_norm)):
            norm = torch.cat(run(norm_of_this_rank, 2, x.to(dtype), weight.to(dtype), has_offset), dim=-1)
            torch.testing.assert_close(norm, plain(x.to(dtype), weight.to(dtype), 1e-5), rtol=error, atol=0)


def test_logits_are_never_sent() -> None:
    """The loss sends three numbers per token, and nothing is larger than the hidden states."""
    chunked = run(sent_of_a_step, 2, {**SP, "training.loss_chunk": 8})[0]
    for events in (sent_under("tp"), sent_under("tp+sp"), chunked):
        sizes = [event.elements for event in events if isinstance(event, Collective)]
        assert max(sizes) == TOKENS * HIDDEN < TOKENS * VOCAB // 2
        assert sum(size for size in sizes if size not in (TOKENS * HIDDEN, HIDDEN)) == 3 * TOKENS


def rows_of_the_embedding_gradient(settings: Settings) -> list[int]:
    """Return the rows of the tables that embeddings make gradients of."""
    trainer = Trainer(tiny(settings))
    rows: list[int] = []

    class TableGradients(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(t, DTensor) for t in types):
                return NotImplemented
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.embedding_dense_backward.default:
                rows.append(len(out))
            return out

    with TableGradients():
        trainer.forward_backward(trainer.batches(1), torch.tensor(1.0))
    return rows


def test_a_rank_makes_the_gradient_of_its_part_of_the_embedding() -> None:
    assert run(rows_of_the_embedding_gradient, 2, {**SP, "model.vocab": 97}) == [[49], [48]]


class Logits(NamedTuple):
    vocab: int
    dtype: torch.dtype
    size: float
    padding: int = 0
    """columns of no token, whose logits are the largest"""


LOGITS = {
    "even": Logits(96, torch.float32, 1.0),
    "uneven": Logits(97, torch.float32, 1.0),
    "as few as ranks": Logits(4, torch.float32, 1.0),
    "bfloat16": Logits(97, torch.bfloat16, 1.0),
    "padded": Logits(97, torch.float32, 1.0, padding=3),
    "a rank with nothing but padding": Logits(5, torch.float32, 1.0, padding=3),
    "logits far over what exp can take": Logits(96, torch.float32, 1e4),
}


def keep(kept: list[Tensor], saved: Tensor) -> Tensor:
    kept.append(saved)
    return saved


def check_all_losses(with_squares: bool) -> None:
    for logits in LOGITS.values():
        check_losses(*logits, with_squares)


def check_losses(vocab: int, dtype: torch.dtype, size: float, padding: int, with_squares: bool) -> None:
    """Compare the losses of labels all over the vocabulary, some of them missing, and of no labels with plain ones."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    tokens = (torch.randn(64, vocab, generator=generator) * size).to(dtype)
    logits = torch.cat([tokens, torch.full((64, padding), 100.0, dtype=dtype)], dim=1)
    columns = vocab + padding
    labels = torch.randint(vocab, (64,), generator=generator)
    labels[:2] = torch.tensor([0, vocab - 1])
    labels[10:20] = -100
    for targets in (labels, torch.full((64,), -100)):
        plain = logits.double().requires_grad_()  # its gradient is not rounded: the other one is, once
        loss = F.cross_entropy(plain[:, :vocab], targets, ignore_index=-100, reduction="sum")
        squares = plain[:, :vocab].logsumexp(-1)[targets != -100].square().sum()
        expected, weights = [loss, squares][: 1 + with_squares], torch.tensor([3.0, 0.3])[: 1 + with_squares]
        (weights.double() * torch.stack(expected)).sum().backward()
        cut = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        first = min(columns, math.ceil(columns / mesh.size()) * mesh.get_local_rank())
        tokens_alone = vocab if padding else None
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(keep, kept), lambda saved: saved):
            sums = vocab_parallel_cross_entropy_sum(cut, targets, first, mesh.get_group(), with_squares, tokens_alone)
        matrices = [saved.dtype for saved in kept if saved.dim() == 2 and saved.is_floating_point()]
        assert matrices == [dtype]  # the logits, and no softmax in float32
        sums.backward(weights if with_squares else torch.tensor(3.0))
        assert sums.dtype == torch.float32
        assert cut.grad.dtype == dtype
        assert sums.flatten().tolist() == pytest.approx([x.item() for x in expected], rel=1e-6)
        largest = plain.grad.abs().max()
        assert (largest > 1) == (targets is labels)
        # a gradient is rounded to the logits' type once; the loss is a float32 sum of 54 numbers
        error = 2**-8 if dtype == torch.bfloat16 else 2e-6
        assert (cut.grad.full_tensor() - plain.grad).abs().max() <= error * largest  # exactly zero without labels


@pytest.mark.parametrize("with_squares", [False, True], ids=["loss", "with squares"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_vocab_parallel_cross_entropy_is_the_plain_one(ranks: int, with_squares: bool) -> None:
    run(check_all_losses, ranks, with_squares)


PADDED: dict[str, Settings] = {
    "z-loss, tied": {"training.z_loss": 1e-2, "model.tied_embeddings": True, "parallel.dp_shard": 2},
    "lora, chunks": {"lora.rank": 3, "lora.alpha": 12.0, "training.loss_chunk": 20, "parallel.sequence_parallel": True},
}


@pytest.mark.parametrize("name", PADDED)
def test_rows_that_are_padded_for_tp_are_no_part_of_the_model(name: str) -> None:
    """The same parameters as those of one process without padding; what is added has no gradient."""
    config = tiny({"parallel.tp": 2, "model.layers": 2, "model.vocab": 97, **PADDED[name]})
    padded = with_settings(config, {"model.vocab_padding": 1})
    trained = run(train_config, world_size(padded), padded, ragged=True)[0]
    for are_gradients, tensors in [(True, t) for t in trained.gradients] + [(False, t) for t in trained.weights]:
        for key in tensors.keys() & {"embed_tokens.weight", "lm_head.weight"}:
            assert len(tensors[key]) == 98
            assert not are_gradients or not tensors[key][97:].any()
            tensors[key] = tensors[key][:97]
    compare(trained, reference_of(config, ragged=True))


def test_logits_of_a_layout_are_those_of_tokens_alone() -> None:
    assert run(shape_of_logits, 2, tiny({"parallel.tp": 2, "model.vocab": 97, "model.vocab_padding": 1})) == [97, 97]


def shape_of_logits(config: Config) -> int:
    _, (model,) = build(config)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with torch.no_grad():
        return int(model(tokens, torch.arange(8).unsqueeze(0)).shape[-1])
