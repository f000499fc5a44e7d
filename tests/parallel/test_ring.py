"""The ring: exact numbers against attention over the whole sequence, what is sent, in which order, and even work."""

import functools
import itertools
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import torchllm.parallel.ring
from tests.workers import run
from torchllm.models.attention import EagerAttention
from torchllm.parallel.attention_kernels import UNSEEN, BlockKernel, CpuKernel, EagerKernel, document_bias
from torchllm.parallel.ring import Exchange, RingAttention, merge

BATCH, LENGTH, HEADS, KV, WIDTH = 2, 48, 6, 2, 8
KERNELS: dict[str, BlockKernel] = {"eager": EagerKernel(), "sdpa": CpuKernel()}
EXACT = 1e-13  # of the largest element, in float64: the same sums in another order

# document of each token; 48 tokens divide into 2 n pieces for n = 2, 3, 4
DOCUMENTS: dict[str, Tensor | None] = {
    "none": None,
    "one": torch.zeros(BATCH, LENGTH, dtype=torch.int64),
    "some": (torch.arange(LENGTH).unsqueeze(0) >= torch.tensor([[7], [30]])).long(),
    "a token each": torch.arange(LENGTH).expand(BATCH, LENGTH).clone(),  # rows see nothing but themselves
    "six tokens each": (torch.arange(LENGTH) // 6).expand(BATCH, LENGTH).clone(),  # of 2, 3 or 4 ranks whole blocks
    "halves": (torch.arange(LENGTH) // 24).expand(BATCH, LENGTH).clone(),  # see nothing of another rank's piece
    "ends apart": ((torch.arange(LENGTH) >= 6) & (torch.arange(LENGTH) < 42)).long().expand(BATCH, LENGTH).clone(),
}


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, and a gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BATCH, LENGTH, heads, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (HEADS, KV, KV, HEADS)
    ]


def mine(x: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's two pieces, by index: not the library's own way."""
    size = LENGTH // (2 * ranks)
    rows = [*range(rank * size, (rank + 1) * size), *range(LENGTH - (rank + 1) * size, LENGTH - rank * size)]
    return x[:, rows]


def around(kernel: str, dtype: torch.dtype, documents: Tensor | None) -> list[Tensor]:
    """On every rank: out, dq, dk, dv of its part."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    ring = RingAttention(mesh, KERNELS[kernel])
    part = functools.partial(mine, rank=mesh.get_local_rank(), ranks=mesh.size())
    *inputs, gradient = map(part, tensors(dtype))
    inputs = [x.requires_grad_() for x in inputs]
    out = ring(*inputs, ring.mask(None if documents is None else part(documents)))
    out.backward(gradient)
    return [out.detach(), *(x.grad for x in inputs)]


class WholeEager(EagerAttention):
    """Attention over the whole sequence, in the inputs' own type: `EagerAttention` computes scores in float32."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if mask is None else ~mask
        k, v = (x.repeat_interleave(HEADS // KV, dim=2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * WIDTH**-0.5
        return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def whole(documents: Tensor | None) -> list[Tensor]:
    """The same of the whole sequence in one process, float64."""
    *inputs, gradient = tensors(torch.float64)
    inputs = [x.requires_grad_() for x in inputs]
    core = WholeEager()
    out = core(*inputs, core.mask(documents))
    out.backward(gradient)
    return [out.detach(), *(x.grad for x in inputs)]


def worst(found: list[list[Tensor]], documents: Tensor | None) -> float:
    """Largest error of any rank's out, dq, dk, dv, over the largest element of that tensor or 1."""
    errors = []
    for index, want in enumerate(whole(documents)):
        for rank, results in enumerate(found):
            assert results[index].shape == mine(want, rank, len(found)).shape
            error = (results[index].double() - mine(want, rank, len(found))).abs().max()
            errors.append(error / want.abs().max().clamp(min=1.0))  # a token that sees itself alone has no dq and dk
    return float(max(errors))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_ring_is_attention_over_the_whole_sequence(name: str, ranks: int) -> None:
    for kernel in KERNELS if ranks == 2 else ["sdpa"]:
        assert worst(run(around, ranks, kernel, torch.float64, DOCUMENTS[name]), DOCUMENTS[name]) <= EXACT


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_lower_precision(dtype: torch.dtype, error: float) -> None:
    """bfloat16 rounds q, k, v, the scores' products and each block's result once, 2**-8; merging adds nothing."""
    found = run(around, 4, "sdpa", dtype, DOCUMENTS["some"])
    assert {x.dtype for results in found for x in results} == {dtype}
    assert worst(found, DOCUMENTS["some"]) <= error


def seen(documents: Tensor, ranks: int) -> Tensor:
    """Pairs that each rank's queries see of each rank's keys, per query: (rank, rank, B, S / n)."""
    pairs = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril()
    return torch.stack(
        [torch.stack([mine(mine(pairs, q, ranks).mT, k, ranks).sum(1) for k in range(ranks)]) for q in range(ranks)]
    )


def test_there_are_rows_blocks_and_ranks_that_see_nothing() -> None:
    """In the documents above: rows of a block, a block of keys for all rows, all other ranks for a whole rank."""

    def others(count: Tensor) -> list[Tensor]:
        return [count[q, k] for q, k in itertools.permutations(range(len(count)), 2)]

    some, tokens, sixes, ends = (DOCUMENTS[name] for name in ("some", "a token each", "six tokens each", "ends apart"))
    assert some is not None and tokens is not None and sixes is not None and ends is not None  # noqa: PT018
    assert any(block.any() and not block.all() for block in others(seen(some, 2)))
    assert not any(block.any() for block in others(seen(tokens, 4)))
    blocks = others(seen(sixes, 3))  # pieces of 8 tokens, documents of 6
    assert any(block.any() for block in blocks)
    assert any(not block.any() for block in blocks)
    by_rank = seen(ends, 4)  # rank 0 has the document at both ends, and nothing else: of 12 tokens
    assert not by_rank[0, 1:].any() and not by_rank[1:, 0].any()  # noqa: PT018
    assert by_rank[2, 1].any()


def test_parts_of_the_keys_merge_to_the_whole() -> None:
    q, k, v, _ = (x.transpose(1, 2) for x in tensors(torch.float64))
    kernel, kv = EagerKernel(), torch.stack((k, v))
    ids, nothing = torch.zeros(BATCH, LENGTH), torch.ones(BATCH, 10)
    want = kernel.forward(q, kv, False, None)
    out, lse = (x.clone() for x in kernel.forward(q, kv[:, :, :, :10], False, None))
    merge(out, lse, *kernel.forward(q, kv[:, :, :, 10:12], False, None))
    before = out.clone(), lse.clone()
    bias = document_bias(ids, nothing, False, torch.float64)
    merge(out, lse, *kernel.forward(q, kv[:, :, :, :10], False, bias))  # a block that nobody sees
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])
    merge(out, lse, *kernel.forward(q, kv[:, :, :, 12:], False, None))
    torch.testing.assert_close(out, want[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, want[1], rtol=0, atol=1e-14)
    assert lse.min() > UNSEEN / 2


class Event(NamedTuple):
    """What a rank does: "send", "receive", "compute" or "wait"; bytes sent, or pairs of queries and keys computed."""

    kind: str
    size: int


class Events(TorchDispatchMode):
    """Of the ring, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "c10d::send":
            self.found.append(Event("send", sum(x.nbytes for x in args[0])))
        elif name == "c10d::recv_":
            self.found.append(Event("receive", sum(x.nbytes for x in args[0])))
        elif "flash_attention_for_cpu" in name:
            backward = "backward" in name
            q, k = args[1:3] if backward else args[:2]
            causal = (7 if backward else 4) < len(args) and args[7 if backward else 4]  # False is left out
            pairs = q.shape[2] * (q.shape[2] + 1) // 2 if causal else q.shape[2] * k.shape[2]
            self.found.append(Event("compute", pairs))
        return func(*args, **(kwargs or {}))


def events(dtype: torch.dtype) -> list[list[Event]]:
    """Of this rank's forward, and of its backward."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    ring = RingAttention(mesh, CpuKernel())
    part = functools.partial(mine, rank=mesh.get_local_rank(), ranks=mesh.size())
    *inputs, gradient = map(part, tensors(dtype))
    wait = Exchange.wait

    def noted(self: Exchange) -> Tensor:
        trace.found.append(Event("wait", self.received.nbytes))
        return wait(self)

    found = []
    with mock.patch.object(torchllm.parallel.ring.Exchange, "wait", noted):
        with Events() as trace:
            out = ring(*(x.requires_grad_() for x in inputs), None)
        found.append(trace.found)
        with Events() as trace:
            out.backward(gradient)
        found.append(trace.found)
    return found


@functools.cache
def events_of(ranks: int, dtype: torch.dtype = torch.float32) -> list[list[list[Event]]]:
    return run(events, ranks, dtype)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_next_exchange_is_under_way_while_a_block_computes(ranks: int) -> None:
    """And the gradients of keys and values travel beside the next block's; only their last hop is waited for."""
    for forward, backward in events_of(ranks):
        order = [event.kind for event in forward]
        assert order == ["send", "receive", "compute", "wait"] * (ranks - 1) + ["compute"]
        order = [event.kind for event in backward]
        first = ["send", "receive", "compute", "wait"]  # the own block: its gradient stays here
        second = ["send", "receive", "compute", "send", "receive", "wait"]
        later = ["send", "receive", "compute", "wait", "send", "receive", "wait"]
        last = ["compute", *(["wait"] if ranks > 2 else []), "send", "receive", "wait"]
        assert order == first + (second if ranks > 2 else []) + later * (ranks - 3) + last


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_sent(ranks: int, dtype: torch.dtype) -> None:
    """Of each rank: keys and values of the other ranks, forward and backward, and as many gradients in float32."""
    numbers = (ranks - 1) * 2 * BATCH * LENGTH // ranks * KV * WIDTH
    for forward, backward in events_of(ranks, dtype):
        assert sum(event.size for event in forward if event.kind == "send") == numbers * dtype.itemsize
        assert sum(event.size for event in backward if event.kind == "send") == numbers * (dtype.itemsize + 4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_computes_as_much_in_every_step(ranks: int) -> None:
    """Half a block of s x s; the causal one has its diagonal too."""
    part = LENGTH // ranks
    for forward, backward in events_of(ranks):
        for found in (forward, backward):
            pairs = [event.size for event in found if event.kind == "compute"]
            assert pairs == [part * (part + 1) // 2] + [part * part // 2] * (ranks - 1)
