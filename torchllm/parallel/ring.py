"""Ring attention: keys and values rotate around the ranks while each computes (Liu et al. 2023; zigzag as in Llama 3).

Sharded: the sequence, in 2 n equal pieces. Rank r of n has pieces r and 2 n - 1 - r ("zigzag"), so that each step of
the ring is the same work for every rank, half a block of scores:
  the rank's own keys          causal
  keys of an earlier rank      all queries over the first piece of keys
  keys of a later rank         the second piece of queries over all keys

Sent, per layer and rank, to the next rank of the ring, while it computes the current step: in the forward n - 1 times
the keys and values of one rank, 2 x B x S / n x K x Q numbers; in the backward again n - 1 times these, and n - 1 times
their gradients, in float32. Heads are not expanded. The document ids are gathered once per forward, in `mask`.

With documents a step computes one block of queries at a time, with a mask (B, 1, block, keys), so that no mask of
S / n x S / n is ever in memory.

Results are merged in float32. Saved for the backward: this rank's q, k, v, out and lse. Selective recomputation keeps
out and lse as the results of one operation (`saved_results.py`), so that nothing is computed or sent again.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchllm.models.document_attention import query_blocks
from torchllm.parallel.attention_kernels import BlockKernel, KeyMask, PartialAttention, document_bias
from torchllm.parallel.saved_results import computed_once
from torchllm.runtime.phase import messages


class RingAttention(nn.Module):
    """An attention core over sequences that are sharded over `mesh` (one dimension), two pieces per rank."""

    def __init__(self, mesh: DeviceMesh, kernel: BlockKernel) -> None:
        super().__init__()
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.ranks = mesh.size()
        self.kernel = kernel
        self.merge: Callable[[PartialAttention, PartialAttention], None] = merge
        """`compile.py` compiles it"""

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Tensor | None:
        """Gather the document ids: this rank's (B, S / n) -> every rank's (n, B, S / n)."""
        if document_ids is None:
            return None
        return torch.stack(gather_from_ranks(document_ids, self.group))

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Map q (B, S / n, H, Q), k and v (B, S / n, K, Q), mask: document ids (n, B, S / n) -> (B, S / n, H, Q)."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = _Ring.apply(q, torch.stack((k, v)), mask, self)
        return out.transpose(1, 2)


def gather_from_ranks(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors `x` of all ranks of a group, in order of rank."""
    tensors = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, x.contiguous(), group=group)
    return tensors


class Exchange:
    """A transfer to the next rank of the ring, and one from the previous rank."""

    def __init__(self, tensor: Tensor, ring: RingAttention) -> None:
        self.sent = tensor  # must stay alive until it is sent
        self.received = torch.empty_like(tensor)
        next_rank = (ring.rank + 1) % ring.ranks
        previous_rank = (ring.rank - 1) % ring.ranks
        send = dist.P2POp(dist.isend, self.sent, group=ring.group, group_peer=next_rank)
        receive = dist.P2POp(dist.irecv, self.received, group=ring.group, group_peer=previous_rank)
        with messages(ring.group):
            self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Wait for both transfers; returns the previous rank's tensor."""
        for work in self.works:
            work.wait()
        return self.received


class RingBlock(NamedTuple):
    """Queries and keys of one call of the kernel."""

    queries: slice
    """range of this rank's tokens"""
    keys: slice
    """range of the source's tokens"""
    mask: KeyMask
    """hides later tokens and other documents"""


class RingStep:
    """One step of a ring: this rank's queries and the keys of rank `source`."""

    def __init__(self, ring: RingAttention, number: int, length: int) -> None:
        """number: 0 to n - 1, counted from the rank's own keys. length: tokens per rank, S / n."""
        self.rank = ring.rank
        self.source = (ring.rank - number) % ring.ranks
        half = length // 2
        self.queries = slice(0, length)
        self.keys = slice(0, length)
        if self.source < ring.rank:
            self.keys = slice(0, half)
        elif self.source > ring.rank:
            self.queries = slice(half, length)

    def blocks(self, documents: Tensor | None, dtype: torch.dtype) -> Iterator[RingBlock]:
        """Yield the blocks of this step: one, or, given the document ids (n, B, S / n), one per block of queries."""
        causal = self.source == self.rank
        if documents is None:
            yield RingBlock(self.queries, self.keys, KeyMask(causal=causal))
            return
        for queries in query_blocks(self.queries):
            keys = slice(0, queries.stop) if causal else self.keys
            query_ids = documents[self.rank, :, queries]
            key_ids = documents[self.source, :, keys]
            yield RingBlock(queries, keys, KeyMask(bias=document_bias(query_ids, key_ids, causal, dtype)))


class _Ring(torch.autograd.Function):
    """Maps q (B, H, S / n, Q), kv (2, B, K, S / n, Q), document ids (n, B, S / n) or None -> out (B, H, S / n, Q)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, documents: Tensor | None, ring: RingAttention) -> Tensor:
        out, lse = computed_once(lambda: ring_forward(q, kv, documents, ring))
        ctx.ring = ring
        ctx.save_for_backward(q, kv, documents, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, documents, out, lse = ctx.saved_tensors
        dq, dkv = ring_backward(d_out, q, kv, documents, PartialAttention(out, lse), ctx.ring)
        return dq, dkv, None, None


def ring_forward(q: Tensor, kv: Tensor, documents: Tensor | None, ring: RingAttention) -> PartialAttention:
    """Return the attention of this rank's queries over the keys of all ranks."""
    attention = PartialAttention(torch.empty_like(q, dtype=_wide(q)), q.new_empty(q.shape[:3], dtype=_wide(q)))
    source_kv = kv  # of rank step.source
    for number in range(ring.ranks):
        incoming = Exchange(source_kv, ring) if number + 1 < ring.ranks else None
        step = RingStep(ring, number, length=q.shape[2])
        for block in step.blocks(documents, q.dtype):
            part = ring.kernel.forward(q[:, :, block.queries], source_kv[:, :, :, block.keys], block.mask)
            rows = attention.rows(block.queries)
            if number == 0:
                rows.out.copy_(part.out)
                rows.lse.copy_(part.lse)
            else:
                ring.merge(rows, part)
        if incoming is not None:
            source_kv = incoming.wait()
    return PartialAttention(attention.out.to(q.dtype), attention.lse)


def ring_backward(
    d_out: Tensor,
    q: Tensor,
    kv: Tensor,
    documents: Tensor | None,
    attention: PartialAttention,
    ring: RingAttention,
) -> tuple[Tensor, Tensor]:
    """Return dq and dkv of this rank, given the `attention` of its queries over the keys of all ranks."""
    dq = torch.zeros_like(q, dtype=_wide(q))
    dkv = torch.zeros_like(kv, dtype=_wide(kv))
    source_kv = kv  # of rank step.source
    returning: Exchange | None = None  # gradients of keys and values, passed around the ring to their owner
    for number in range(ring.ranks):
        incoming = Exchange(source_kv, ring) if number + 1 < ring.ranks else None
        step = RingStep(ring, number, length=q.shape[2])
        d_source = dkv if number == 0 else torch.zeros_like(dkv)
        for block in step.blocks(documents, q.dtype):
            gradients = ring.kernel.backward(
                d_out[:, :, block.queries],
                q[:, :, block.queries],
                source_kv[:, :, :, block.keys],
                attention.rows(block.queries),
                block.mask,
            )
            dq[:, :, block.queries] += gradients.dq
            d_source[0, :, :, block.keys] += gradients.dk
            d_source[1, :, :, block.keys] += gradients.dv
        if returning is not None:
            d_source += returning.wait()
        if number > 0:
            returning = Exchange(d_source, ring)
        if incoming is not None:
            source_kv = incoming.wait()
    if returning is not None:
        dkv += returning.wait()
    return dq.to(q.dtype), dkv.to(kv.dtype)


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype for merging results: float32, or x's dtype if it is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def merge(into: PartialAttention, part: PartialAttention) -> None:
    """Merge `part` into `into`, in place: the attention over both sets of keys.

    Each out is weighted by its share of the sum of exp(scores). The share of `part` is
    exp(lse of part - logaddexp(both lse)) = sigmoid(lse of part - lse of into). Compiled it takes two kernels, for out
    and for lse, which have different shapes, and six otherwise.
    """
    share = torch.sub(part.lse, into.lse).sigmoid_().unsqueeze(-1)
    lse = torch.logaddexp(into.lse, part.lse)
    into.out.lerp_(part.out.to(into.out.dtype), share)
    into.lse.copy_(lse)  # not out=into.lse: writing to a view would break the graph
