"""The ring: exact numbers against attention over the whole sequence, what is sent, in which order, and even work."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import torchllm.parallel.ring
from tests.models.test_document_attention import Inputs, Results, forward_backward
from tests.workers import run
from torchllm.config import Model
from torchllm.models.attention_cores import EagerAttention
from torchllm.models.attention_kernels import (
    BlockKernel,
    CpuKernel,
    EagerKernel,
    Gradients,
    KeyMask,
    PartialAttention,
)
from torchllm.parallel.ring import Exchange, RingAttention, merge, ring_backward, ring_forward

PLAIN = Model()
BATCH, LENGTH, HEADS, KV, WIDTH = 2, 48, 6, 2, 8
KERNELS: dict[str, BlockKernel] = {
    "eager": EagerKernel(),
    "sdpa": CpuKernel(),
    "eager, scale and cap": EagerKernel(0.9, softcap=1.5),
    "sdpa, scale": CpuKernel(0.9),
}
EXACT = 1e-13  # of the largest element, in float64: the same sums in another order

TOKEN = torch.arange(LENGTH).expand(BATCH, LENGTH)
# Document of each token; 48 tokens divide into 2 n pieces for n = 2, 3, 4 ranks.
DOCUMENTS: dict[str, Tensor | None] = {
    "none": None,
    "two": (torch.tensor([[7], [30]]) <= TOKEN).long(),
    "a token each": TOKEN.clone(),  # a row sees nothing but itself
    "six tokens each": TOKEN // 6,  # the pieces of 4 ranks
    "halves": TOKEN // 24,
    "a long one": (TOKEN >= 6).long() + (TOKEN >= 42),  # from the second piece of 4 ranks to the last but one
    "one and many": torch.stack((TOKEN[0] // 48, TOKEN[0] // 3)),
}


def whole_inputs(dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(BATCH, LENGTH, heads, WIDTH, generator=generator, dtype=torch.float64).to(dtype)

    return Inputs(q=random(HEADS), k=random(KV), v=random(KV), d_out=random(HEADS))


def part_of(x: Tensor, rank: int, ranks: int) -> Tensor:
    """Return a rank's two pieces, by index: not in the library's way."""
    size = LENGTH // (2 * ranks)
    first_piece = range(rank * size, (rank + 1) * size)
    last_piece = range(LENGTH - (rank + 1) * size, LENGTH - rank * size)
    return x[:, [*first_piece, *last_piece]]


def inputs_of(rank: int, ranks: int, dtype: torch.dtype) -> Inputs:
    return Inputs(*(part_of(x, rank, ranks) for x in whole_inputs(dtype)))


def results_on_rank(kernel: str, dtype: torch.dtype, names: Sequence[str]) -> list[Results]:
    """Return this rank's results with each of these documents."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    ring = RingAttention(mesh, KERNELS[kernel])
    results = []
    for name in names:
        documents = DOCUMENTS[name]
        if documents is not None:
            documents = part_of(documents, rank, ranks)
        results.append(forward_backward(ring, inputs_of(rank, ranks, dtype), documents))
    return results


def on_the_ring(ranks: int, kernel: str, dtype: torch.dtype, *names: str) -> list[list[Results]]:
    """Return the results of all ranks with each of these documents."""
    return [list(of_ranks) for of_ranks in zip(*run(results_on_rank, ranks, kernel, dtype, names), strict=True)]


class Float64Attention(EagerAttention):
    """Attention over the whole sequence in the inputs' own type; `EagerAttention` computes scores in float32."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        k, v = (x.repeat_interleave(HEADS // KV, dim=2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (self.scale or WIDTH**-0.5)
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def worst_error(results_of_ranks: list[Results], documents: Tensor | None, model: Model = PLAIN) -> float:
    """Return the largest error of any rank's results, relative to the largest element of that tensor or 1."""
    expected = forward_backward(Float64Attention(model), whole_inputs(torch.float64), documents)
    errors = []
    for rank, results in enumerate(results_of_ranks):
        for result, whole in zip(results, expected, strict=True):
            part = part_of(whole, rank, len(results_of_ranks))
            assert result.shape == part.shape
            error = (result.double() - part).abs().max()
            errors.append(error / whole.abs().max().clamp(min=1.0))  # a token that sees itself alone: dq = dk = 0
    return float(max(errors))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_is_attention_over_the_whole_sequence(ranks: int) -> None:
    for kernel in ["eager", "sdpa"] if ranks == 2 else ["sdpa"]:
        of_documents = on_the_ring(ranks, kernel, torch.float64, *DOCUMENTS)
        for (name, documents), results in zip(DOCUMENTS.items(), of_documents, strict=True):
            assert worst_error(results, documents) <= EXACT, (name, kernel)


@pytest.mark.parametrize("kernel", ["eager, scale and cap", "sdpa, scale"])
def test_a_scale_and_a_soft_cap_of_the_scores(kernel: str) -> None:
    model = Model(softmax_scale=0.9, score_softcap=1.5 if "cap" in kernel else 0.0)
    (results,) = on_the_ring(2, kernel, torch.float64, "two")
    assert worst_error(results, DOCUMENTS["two"], model) <= EXACT


def test_no_pair_of_different_documents_is_computed() -> None:
    """Documents of 6 tokens, 4 ranks with two pieces of 6: every rank computes its own documents, and nothing else."""
    for events in run(record_events, 4, torch.float32, DOCUMENTS["six tokens each"]):
        assert sizes(events.forward, "compute") == sizes(events.backward, "compute") == [21] * 2 * BATCH


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_lower_precision(dtype: torch.dtype, error: float) -> None:
    """bfloat16 rounds q, k, v, the scores' products and each block's result once, 2**-8; merging adds nothing."""
    (results_of_ranks,) = on_the_ring(4, "sdpa", dtype, "two")
    for results in results_of_ranks:
        assert {x.dtype for x in results} == {dtype}
    assert worst_error(results_of_ranks, DOCUMENTS["two"]) <= error


class RandomParts(BlockKernel):
    """Stands in for attention: each block's results are random numbers, which it stores."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.parts: list[PartialAttention] = []
        self.gradients: list[Gradients] = []

    def forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        lse = torch.randn(q.shape[:3], generator=self.generator)
        self.parts.append(PartialAttention(self._random(q), lse))
        return self.parts[-1]

    def backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask) -> Gradients:
        k, v = kv
        self.gradients.append(Gradients(self._random(q), self._random(k), self._random(v)))
        return self.gradients[-1]

    def _random(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator).to(like.dtype)


class Echo:
    """Stands in for `Exchange`: each rank receives what it sends."""

    def __init__(self, tensor: Tensor, ring: RingAttention) -> None:
        self.tensor = tensor

    def wait(self) -> Tensor:
        return self.tensor


def rounded_once(result: Tensor, exact: Tensor) -> bool:
    """Whether a bfloat16 result is off by at most half a unit of its last place, 2^-8, and what float32 sums cost."""
    assert result.dtype == torch.bfloat16
    return bool(((result.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all())


def test_the_parts_of_a_bfloat16_ring_are_merged_in_float32() -> None:
    kernel = RandomParts()
    ring: Any = mock.Mock(rank=3, ranks=4, kernel=kernel, merge=merge)  # the last rank: every block has all queries
    q = torch.zeros(BATCH, HEADS, 12, WIDTH, dtype=torch.bfloat16)
    kv = torch.zeros(2, BATCH, 12, KV, WIDTH, dtype=torch.bfloat16)
    with mock.patch.object(torchllm.parallel.ring, "Exchange", Echo):
        attention = ring_forward(q, kv, RingAttention.mask(ring, None), ring)
        dq, _ = ring_backward(q, q, kv, RingAttention.mask(ring, None), attention, ring)
    lse = torch.stack([part.lse.double() for part in kernel.parts])
    outs = torch.stack([part.out.double() for part in kernel.parts])
    assert rounded_once(attention.out, (lse.softmax(0).unsqueeze(-1) * outs).sum(0))
    assert rounded_once(dq, torch.stack([gradients.dq.double() for gradients in kernel.gradients]).sum(0))


def test_a_compiled_merge_is_one_graph_for_all_sizes() -> None:
    """It updates views of some rows, of as many as a step or a block of queries has."""
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(merge, backend="aot_eager_decomp_partition", fullgraph=True)
    generator = torch.Generator().manual_seed(0)

    def random_part(length: int, dtype: torch.dtype) -> PartialAttention:
        out = torch.randn(BATCH, length, HEADS, WIDTH, generator=generator).to(dtype).transpose(1, 2)
        return PartialAttention(out, torch.randn(BATCH, HEADS, length, generator=generator))

    merged = random_part(LENGTH, torch.float32)
    expected = PartialAttention(*(x.clone() for x in merged))
    for queries in (slice(0, 48), slice(24, 48), slice(0, 16), slice(16, 32), slice(40, 48)):
        part = random_part(queries.stop - queries.start, torch.bfloat16)
        compiled(merged.rows(queries), part)
        merge(expected.rows(queries), part)
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-6)
    graphs = counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    assert graphs == 3  # the first size, others, others with no row before them


class Event(NamedTuple):
    """One thing that a rank does in a ring."""

    kind: str
    """send, receive, compute or wait"""
    size: int
    """bytes sent, received or waited for; pairs of queries and keys computed"""


class Events(TorchDispatchMode):
    """Records what the ring sends, receives and computes while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "c10d::send":
            self.events.append(Event("send", sum(x.nbytes for x in args[0])))
        elif name == "c10d::recv_":
            self.events.append(Event("receive", sum(x.nbytes for x in args[0])))
        elif name.endswith("flash_attention_for_cpu"):
            self.events.append(_computes(*args[:2], causal=args[4:5]))
        elif name.endswith("flash_attention_for_cpu_backward"):
            self.events.append(_computes(*args[1:3], causal=args[7:8]))
        return func(*args, **(kwargs or {}))


def _computes(q: Tensor, k: Tensor, causal: tuple[bool, ...]) -> Event:
    """causal: the kernel's argument, which torch drops where it is False, its default."""
    queries, keys = q.shape[2], k.shape[2]
    if any(causal):
        return Event("compute", queries * (queries + 1) // 2)
    return Event("compute", queries * keys)


class RankEvents(NamedTuple):
    forward: list[Event]
    backward: list[Event]


def record_events(dtype: torch.dtype, documents: Tensor | None = None) -> RankEvents:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    ring = RingAttention(mesh, CpuKernel())
    inputs = inputs_of(mesh.get_local_rank(), mesh.size(), dtype)
    mask = ring.mask(None if documents is None else part_of(documents, mesh.get_local_rank(), mesh.size()))
    wait = Exchange.wait

    def recorded_wait(exchange: Exchange) -> Tensor:
        recorder.events.append(Event("wait", exchange.received.nbytes))
        return wait(exchange)

    with mock.patch.object(torchllm.parallel.ring.Exchange, "wait", recorded_wait):
        with Events() as recorder:
            out = ring(*(x.requires_grad_() for x in inputs[:3]), mask)
        forward = recorder.events
        with Events() as recorder:
            out.backward(inputs.d_out)
    return RankEvents(forward, recorder.events)


@functools.cache
def events_of(ranks: int, dtype: torch.dtype = torch.float32) -> list[RankEvents]:
    return run(record_events, ranks, dtype)


def sizes(events: list[Event], kind: str) -> list[int]:
    return [event.size for event in events if event.kind == kind]


FORWARD_KINDS = {
    2: ["send", "receive", "compute", "wait", "compute"],
    4: ["send", "receive", "compute", "wait"] * 3 + ["compute"],
}
BACKWARD_KINDS = {
    2: [
        *["send", "receive", "compute", "wait"],  # the own block: its gradient stays here
        *["compute", "send", "receive", "wait"],  # the last block, and the only gradient's way home
    ],
    4: [
        *["send", "receive", "compute", "wait"],  # the own block: its gradient stays here
        *["send", "receive", "compute", "send", "receive", "wait"],  # the first gradient leaves
        *["send", "receive", "compute", "wait", "send", "receive", "wait"],
        *["compute", "wait", "send", "receive", "wait"],  # only the last hop is waited for at once
    ],
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_next_exchange_is_under_way_while_a_block_computes(ranks: int) -> None:
    """The gradients of keys and values travel beside the next block's; only their last hop is waited for."""
    for events in events_of(ranks):
        assert [event.kind for event in events.forward] == FORWARD_KINDS[ranks]
        assert [event.kind for event in events.backward] == BACKWARD_KINDS[ranks]


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_bytes_sent(ranks: int, dtype: torch.dtype) -> None:
    """Each rank sends n - 1 times keys and values, forward and backward, and as many gradients in float32."""
    numbers = (ranks - 1) * 2 * BATCH * LENGTH // ranks * KV * WIDTH
    for events in events_of(ranks, dtype):
        assert sum(sizes(events.forward, "send")) == numbers * dtype.itemsize
        assert sum(sizes(events.backward, "send")) == numbers * (dtype.itemsize + 4)


def test_every_rank_computes_as_much_in_every_step() -> None:
    """Every step is half a block of s x s pairs; the causal one has its diagonal too."""
    ranks = 4
    part = LENGTH // ranks
    causal, half = part * (part + 1) // 2, part * part // 2
    for events in events_of(ranks):
        assert sizes(events.forward, "compute") == [causal] + [half] * (ranks - 1)
        assert sizes(events.backward, "compute") == [causal] + [half] * (ranks - 1)
