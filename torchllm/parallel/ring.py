"""Ring attention: keys and values rotate around the ranks while each computes (Liu et al. 2023; zigzag as in Llama 3).

Sharded: the sequence, in 2 n equal pieces. Rank r of n has pieces r and 2 n - 1 - r ("zigzag"), so that each step of
the ring is the same work for every rank, half a block of scores:
  the rank's own keys          causal
  keys of an earlier rank      all queries over the first piece of keys
  keys of a later rank         the second piece of queries over all keys

Sent, per layer and rank, to the next rank of the ring, while it computes the current step: in the forward n - 1 times
the keys and values of one rank, 2 x B x S / n x K x Q numbers; in the backward again n - 1 times these, and n - 1 times
their gradients, in float32. Heads are not expanded. The document ids are gathered once per forward, in `mask`.

With documents, whose ids rise along the sequence, the rank's own step computes each of its documents alone. Of another
rank's keys one document at most reaches the queries: the last keys and the first queries of a sequence. So a step has
three `Entries` per sequence, the keys before that document, the document and the queries after it, and no mask.

Sinks join the softmax's denominator once all keys are merged, on each rank for its queries.

Results are merged in float32. Saved for the backward: this rank's q, k, v, out and lse. Selective recomputation keeps
out and lse as the results of one operation (`saved_results.py`), so that nothing is computed or sent again.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchllm.models.attention_kernels import (
    BlockKernel,
    Entries,
    KeyMask,
    PartialAttention,
    gradient_of_sinks,
    with_sinks,
)
from torchllm.models.varlen_attention import document_offsets
from torchllm.parallel.pieces import messages
from torchllm.parallel.saved_results import computed_once

Masks = tuple[KeyMask, ...]
"""the mask of each step of a ring"""


class RingAttention(nn.Module):
    """An attention core over sequences that are sharded over `mesh` (one dimension), two pieces per rank."""

    computes_once = True
    """its results are marked with `computed_once`"""

    def __init__(self, mesh: DeviceMesh, kernel: BlockKernel) -> None:
        super().__init__()
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.ranks = mesh.size()
        self.kernel = kernel
        self.merge: Callable[[PartialAttention, PartialAttention], None] = merge
        """`compile.py` compiles it"""

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Masks:
        """Return the mask of each step, from this rank's document ids (B, S / n), which rise along a sequence."""
        if document_ids is None:
            return KeyMask(causal=True), *[KeyMask()] * (self.ranks - 1)
        ids_of_ranks = gather_from_ranks(document_ids, self.group)
        own = document_offsets(document_ids, document_limit or document_ids.numel())
        masks = [KeyMask(causal=True, entries=Entries(own, own))]
        for number in range(1, self.ranks):
            step = RingStep(self, number, document_ids.shape[1])
            key_ids = ids_of_ranks[step.source][:, step.keys]
            masks.append(KeyMask(entries=shared_document(document_ids[:, step.queries], key_ids)))
        return tuple(masks)

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Masks, sinks: Tensor | None = None) -> Tensor:
        """Map q (B, S / n, H, Q), k and v (B, S / n, K, Q) -> (B, S / n, H, Q). sinks: (H), of `models/sinks.py`."""
        out = _Ring.apply(q.transpose(1, 2), torch.stack((k, v)), sinks, mask, self)
        return out.transpose(1, 2)


def shared_document(query_ids: Tensor, key_ids: Tensor) -> Entries:
    """Return three entries per sequence: the second is the document that both have, if any.

    query_ids (B, S), key_ids (B, T): document of each token, rising along a sequence; all keys are before all queries.
    """
    document = key_ids[:, -1:]
    queries = (query_ids == document).sum(1)  # the first ones
    keys = (key_ids == document).sum(1)  # the last ones
    none = torch.zeros_like(keys)
    sizes = torch.stack((none, queries, query_ids.shape[1] - queries, key_ids.shape[1] - keys, keys, none), dim=1)
    return Entries(*F.pad(sizes.unflatten(1, (2, 3)).transpose(0, 1).flatten(1).cumsum(1), (1, 0)).int())


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


class RingStep:
    """One step of a ring: this rank's queries and the keys of rank `source`."""

    def __init__(self, ring: RingAttention, number: int, length: int) -> None:
        """number: 0 to n - 1, counted from the rank's own keys. length: tokens per rank, S / n."""
        self.source = (ring.rank - number) % ring.ranks
        half = length // 2
        self.queries = slice(0, length)
        self.keys = slice(0, length)
        if self.source < ring.rank:
            self.keys = slice(0, half)
        elif self.source > ring.rank:
            self.queries = slice(half, length)

    def keys_of(self, kv: Tensor) -> Tensor:
        """Return a view of the step's keys and values: the source's (2, B, S / n, K, Q) -> (2, B, K, T, Q)."""
        return kv[:, :, self.keys].transpose(2, 3)


class _Ring(torch.autograd.Function):
    """Maps q (B, H, S / n, Q), kv (2, B, S / n, K, Q), sinks (H) or None -> out (B, H, S / n, Q)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, masks: Masks, ring: RingAttention) -> Tensor:
        out, lse = computed_once(lambda: with_sinks(ring_forward(q, kv, masks, ring), sinks))
        ctx.ring, ctx.masks = ring, masks
        ctx.save_for_backward(q, kv, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sinks, out, lse = ctx.saved_tensors
        attention = PartialAttention(out, lse)
        dq, dkv = ring_backward(d_out, q, kv, ctx.masks, attention, ctx.ring)
        return dq, dkv, gradient_of_sinks(d_out, attention, sinks), None, None


def ring_forward(q: Tensor, kv: Tensor, masks: Masks, ring: RingAttention) -> PartialAttention:
    """Return the attention of this rank's queries over the keys of all ranks."""
    attention = PartialAttention(torch.empty_like(q, dtype=_wide(q)), q.new_empty(q.shape[:3], dtype=_wide(q)))
    source_kv = kv  # of rank step.source
    for number in range(ring.ranks):
        incoming = Exchange(source_kv, ring) if number + 1 < ring.ranks else None
        step = RingStep(ring, number, length=q.shape[2])
        part = ring.kernel.forward(q[:, :, step.queries], step.keys_of(source_kv), masks[number])
        rows = attention.rows(step.queries)
        if number == 0:
            rows.out.copy_(part.out)
            rows.lse.copy_(part.lse)
        else:
            ring.merge(rows, part)
        if incoming is not None:
            source_kv = incoming.wait()
    return PartialAttention(attention.out.to(q.dtype), attention.lse)


def ring_backward(
    d_out: Tensor, q: Tensor, kv: Tensor, masks: Masks, attention: PartialAttention, ring: RingAttention
) -> tuple[Tensor, Tensor]:
    """Return dq and dkv of this rank, given the `attention` of its queries over the keys of all ranks."""
    dq, dkv = _summed_gradients(d_out, q, kv, masks, attention, ring)
    return dq.to(q.dtype), dkv.to(kv.dtype)


def _summed_gradients(
    d_out: Tensor, q: Tensor, kv: Tensor, masks: Masks, attention: PartialAttention, ring: RingAttention
) -> tuple[Tensor, Tensor]:
    """Return dq and dkv as they are summed, before they are rounded."""
    dq = torch.zeros_like(q, dtype=_wide(q))
    dkv = torch.zeros_like(kv, dtype=_wide(kv))
    source_kv = kv  # of rank step.source
    returning: Exchange | None = None  # gradients of keys and values, passed around the ring to their owner
    for number in range(ring.ranks):
        incoming = Exchange(source_kv, ring) if number + 1 < ring.ranks else None
        step = RingStep(ring, number, length=q.shape[2])
        inputs = d_out[:, :, step.queries], q[:, :, step.queries], step.keys_of(source_kv)
        gradients = ring.kernel.backward(*inputs, attention.rows(step.queries), masks[number])
        dq[:, :, step.queries] += gradients.dq
        if number == 0:
            d_source = dkv
        elif returning is None:
            d_source = torch.zeros_like(dkv)
        else:
            d_source = returning.wait()
        returning = None  # its buffers are free before the next exchange takes some
        dk, dv = step.keys_of(d_source)
        dk += gradients.dk
        dv += gradients.dv
        if number > 0:
            returning = Exchange(d_source, ring)
        if incoming is not None:
            source_kv = incoming.wait()
    if returning is not None:
        dkv += returning.wait()
    return dq, dkv


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
