"""Recomputation: the same gradients to the bit, the memory that was promised, nothing computed or sent in vain."""

import functools
import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.operations import Operations
from tests.parallel.trace import Collective, traced
from tests.parity import CPU, Settings, Trainer, tiny
from tests.workers import run
from torchllm.config import Model, Recompute
from torchllm.facts.flops import recompute_interval, recomputed_flops
from torchllm.facts.parameters import canonical_name
from torchllm.models.decoder import Block, Decoder, build_model
from torchllm.models.experts import Router
from torchllm.parallel.initialize import initialize
from torchllm.parallel.recompute import apply_recompute, save_products
from torchllm.parallel.unkept_sums import without_sums

MODES = [
    Recompute(),
    Recompute("full"),
    Recompute("segment"),
    Recompute("segment", 4),
    Recompute("every_k"),
    Recompute("every_k", 3),
    Recompute("ffn"),
    Recompute("selective"),
    Recompute("selective_half"),
]
SMALL = Model(layers=5, hidden=16, heads=2, kv_heads=1, ffn=32, vocab=16)
BATCH, LENGTH = 4, 64  # many tokens for few weights: activations outweigh the gradients
HIDDEN_BYTES = BATCH * LENGTH * 16 * 4  # of one (B, S, D)


def built(model: Model, recompute: Recompute, compiles_blocks: bool = False) -> Decoder:
    with torch.device("meta"):
        decoder = build_model(model)
    apply_recompute(decoder, recompute, model.layers, compiles_blocks)
    initialize([decoder], model, CPU, seed=0)
    return decoder


def inputs(model: Model) -> tuple[Tensor, Tensor, None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab, (BATCH, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    return tokens, positions, None, tokens


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gpt", "eager")])
def test_gradients_are_the_same_bits(family: str, attention: str) -> None:
    model = replace(SMALL, family=family, attention=attention)
    results = []
    for recompute in MODES:
        decoder = built(model, recompute)
        loss = decoder(*inputs(model))
        loss.backward()
        results.append((loss, {canonical_name(name): p.grad for name, p in decoder.named_parameters()}))
    (expected_loss, expected), *recomputed = results
    assert all(gradient is not None for gradient in expected.values())
    for recompute, (loss, gradients) in zip(MODES[1:], recomputed, strict=True):
        assert torch.equal(loss, expected_loss), recompute
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], expected[name]) for name in expected), recompute


class Live(TorchDispatchMode):
    """Bytes of the storages that were made while it is active and still exist, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs_of_op = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key in self.known or key in inputs_of_op:  # known, or of a parameter or input
                    continue
                self.known.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


class Memory(NamedTuple):
    """Bytes of the tensors that a step makes."""

    saved: int
    """between forward and backward"""
    peak: int


@functools.cache
def memory(layers: int, recompute: Recompute) -> Memory:
    model = replace(SMALL, layers=layers)
    decoder = built(model, recompute)
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)  # of every mode alike, so not to be counted
    batch = inputs(model)
    with Live() as live:
        loss = decoder(*batch)
        saved = live.now
        loss.backward()
    return Memory(saved, live.most)


def test_kept_bytes_of_full_and_segment() -> None:
    """The blocks' inputs, (B, S, D) each, and nothing else of them."""
    for recompute in (Recompute("full"), Recompute("segment", 1), Recompute("segment", 2), Recompute("segment", 4)):
        growth = memory(8, recompute).saved - memory(4, recompute).saved
        inputs_of_segments = 4 // (recompute.k or 1)
        assert growth == inputs_of_segments * HIDDEN_BYTES, recompute


def test_segments_take_memory_that_grows_with_the_root_of_the_layers() -> None:
    """L = 4, 16, 36: the inputs of 2, 4, 6 segments are kept, and 2, 4, 6 blocks live while one is recomputed."""
    segment = Recompute("segment")
    assert [recompute_interval(segment, layers) for layers in (4, 16, 36)] == [2, 4, 6]
    four = memory(4, segment)
    sixteen = memory(16, segment)
    thirty_six = memory(36, segment)
    assert sixteen.saved - four.saved == 2 * HIDDEN_BYTES
    assert thirty_six.saved - sixteen.saved == 2 * HIDDEN_BYTES
    # linear in sqrt(L), to the byte: each step is two inputs and two blocks, which may share a tensor at their border
    four_blocks = memory(8, Recompute()).saved - memory(4, Recompute()).saved
    growth = sixteen.peak - four.peak
    assert thirty_six.peak - sixteen.peak == growth
    assert 2 * four_blocks // 4 <= growth <= 2 * (four_blocks // 4 + HIDDEN_BYTES)


@pytest.mark.parametrize(
    ("masks_documents", "mode", "forwards"), [(False, "full", 10), (False, "selective", 5), (True, "selective_half", 5)]
)
def test_selective_saves_attention(masks_documents: bool, mode: str, forwards: int) -> None:
    decoder = built(SMALL, Recompute(mode))
    tokens, positions, _, labels = inputs(SMALL)
    operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    documents = None
    if masks_documents:
        operation = torch.ops.torchllm.document_attention.default
        documents = positions // 10
    with Operations() as operations:
        decoder(tokens, positions, documents, labels).backward()
    assert operations.all.count(operation) == forwards


@pytest.mark.parametrize(
    ("compiles_blocks", "mode", "attention", "products"),
    [(False, "full", 2, 9), (False, "selective", 1, 6), (False, "selective_half", 1, 7), (True, "selective", 1, 6)],
)
def test_selective_saves_the_products_of_experts(
    compiles_blocks: bool, mode: str, attention: int, products: int
) -> None:
    """Of gate, up and down: three in the forward, three in the backward, and those that are computed again.

    Of router, gate, up and down, as the 5th to 8th product of a block, selective_half saves gate and down.
    """
    model = replace(SMALL, layers=1, experts=4, top_k=2)
    decoder = built(model, Recompute(mode), compiles_blocks)
    next(router for router in decoder.modules() if isinstance(router, Router)).tokens_per_step = BATCH * LENGTH
    with Operations() as operations:
        decoder(*inputs(model)).backward()
    assert operations.all.count(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default) == attention
    assert operations.all.count(torch.ops.torchllm.grouped_linear.default) == products
    assert operations.all.count(torch.ops.aten.rsqrt.default) == 5  # the block's two again


CUDA_ATTENTION: dict[str, Any] = {
    "flash": lambda q: torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, is_causal=True),
    "efficient": lambda q: torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, is_causal=True),
    "cudnn": lambda q: torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, is_causal=True),
}


@pytest.mark.parametrize("kernel", CUDA_ATTENTION)
def test_selective_saves_the_attention_of_a_gpu(kernel: str) -> None:
    """On tensors without memory, for which torch knows what its CUDA kernels return."""
    attention = CUDA_ATTENTION[kernel]
    operation = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
    q = torch.empty(1, 2, 16, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Operations() as operations:
        out = checkpoint(lambda q: attention(q.sin())[0].cos(), q, use_reentrant=False, context_fn=save_products)
        out.sum().backward()
    assert operations.all.count(operation) == 1
    assert q.grad is not None


def test_every_k_counts_the_blocks_of_the_whole_model() -> None:
    """A pipeline stage without block 0 recomputes the blocks that the whole model would."""
    with torch.device("meta"):
        stage = build_model(SMALL)
    del stage.layers["0"]
    apply_recompute(stage, Recompute("every_k", 2), SMALL.layers)
    assert {name for name, block in stage.layers.items() if not isinstance(block, Block)} == {"2", "4"}


def test_a_function_is_compiled_within_a_selective_recomputation_under_tp() -> None:
    """A norm with compile.norm, or flex attention, in a block that is not compiled."""
    counter = CompileCounter()
    cosine = torch.compile(lambda x: x.cos(), backend=counter)
    x = torch.ones(4, requires_grad=True)
    saver = functools.partial(without_sums, save_products, ())
    checkpoint(lambda x: cosine(x).sin(), x, use_reentrant=False, context_fn=saver).sum().backward()
    assert counter.frame_count > 0


TP: Settings = {"model.layers": 2, "parallel.tp": 2, "training.global_batch_size": 1}


def sent_over_tp(layout: Settings) -> dict[str, int]:
    counts = {}
    for mode in ("none", "selective", "selective_half", "full", "segment", "ffn"):
        events = traced({**layout, "recompute.mode": mode})
        counts[mode] = sum(isinstance(event, Collective) and event.axis == "tp" for event in events)
    return counts


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_that_are_sent_again(sequence_parallel: bool) -> None:
    """selective keeps what was sent; the others send a recomputed block's again but the last, which ends it."""
    layout = {**TP, "parallel.sequence_parallel": sequence_parallel}
    sent = run(sent_over_tp, 2, layout)[0]
    a_block = 4 if sequence_parallel else 2
    assert sent["selective"] == sent["selective_half"] == sent["none"]
    assert sent["full"] == sent["none"] + 2 * (a_block - 1)
    assert sent["segment"] == sent["none"] + 2 * (a_block - 1)  # k = 1 of 2 blocks
    assert sent["ffn"] == sent["none"] + (2 if sequence_parallel else 0)  # the gather before gate and up


def products_again(settings: Settings) -> list[float]:
    """Return the FLOPs per token that selective_half adds to a step as it runs, and as `recomputed_flops` counts them.

    torch counts products of DTensors as those of all ranks.
    """
    configs = [tiny({**settings, "recompute.mode": mode}) for mode in ("none", "selective_half")]
    flops = []
    for config in configs:
        trainer = Trainer(config)
        (batch,) = trainer.batches(1)
        with FlopCounterMode(display=False) as counter:
            trainer.forward_backward([batch], torch.ones(()))
        flops.append(counter.get_total_flops() / batch.tokens.numel())
    return [flops[1] - flops[0], recomputed_flops(configs[1], configs[1].training.sequence_length)]


def test_products_whose_sums_are_kept_are_neither_computed_nor_counted_again() -> None:
    layout = {**TP, "model.attention_gate": "head", "model.mtp_depth": 1}
    executed, counted = run(products_again, 2, layout)[0]
    assert executed == counted > 0
