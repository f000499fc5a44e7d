"""Ring attention: keys and values go round the ranks while each computes (Liu et al. 2023; zigzag as in Llama 3).

Sharded: the sequence. Of 2 n equal pieces rank r of n holds pieces r and 2 n - 1 - r, so that each step of the ring is
the same work for every rank, half a block of scores:
  the rank's own keys          causal
  keys of an earlier rank      all queries over the first piece of keys
  keys of a later rank         the second piece of queries over all keys

Sent, per layer and rank, to the next rank: forward n - 1 times the keys and values of one rank, 2 x B x S / n x K x Q
numbers; backward again n - 1 times these, and as often their gradients, in float32. Heads are not expanded. What the
next step needs is under way while this one computes. Document ids are gathered once a forward, in `mask`.

What is merged is merged in float32. Saved for the backward: this rank's q, k, v, out and lse; under selective
recomputation out and lse are kept as results of one operation, so that nothing is computed or sent again.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchllm.parallel.attention_kernels import BlockKernel, document_bias
from torchllm.parallel.saved_results import computed_once
from torchllm.runtime.phase import messages


class RingAttention(nn.Module):
    """An attention core over a sequence of which each rank of `mesh` (one axis) has two pieces."""

    def __init__(self, mesh: DeviceMesh, kernel: BlockKernel) -> None:
        super().__init__()
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.kernel = kernel

    def mask(self, document_ids: Tensor | None) -> Tensor | None:
        """This rank's ids (B, S / n) -> those of every rank (n, B, S / n)."""
        return None if document_ids is None else torch.stack(of_all_ranks(document_ids, self.group))

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q (B, S / n, H, Q), k and v (B, S / n, K, Q), mask: document ids (n, B, S / n) -> (B, S / n, H, Q)"""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _Ring.apply(q, torch.stack((k, v)), mask, self).transpose(1, 2)


def of_all_ranks(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """A tensor of each rank of a group, in their order."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, x.contiguous(), group=group)
    return found


class Exchange:
    """A tensor on its way to the next rank of the ring, and the previous rank's on its way here."""

    def __init__(self, tensor: Tensor, ring: RingAttention) -> None:
        self.sent, self.received = tensor, torch.empty_like(tensor)  # what is sent must stay until it has left
        after, before = (ring.rank + 1) % ring.ranks, (ring.rank - 1) % ring.ranks
        with messages(ring.group):
            self.works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self.sent, group=ring.group, group_peer=after),
                    dist.P2POp(dist.irecv, self.received, group=ring.group, group_peer=before),
                ]
            )

    def wait(self) -> Tensor:
        """What came from the previous rank."""
        for work in self.works:
            work.wait()
        return self.received


class _Step:
    """One step of a ring: which queries meet which keys, and how."""

    def __init__(self, ring: RingAttention, number: int, length: int) -> None:
        self.rank, self.source = ring.rank, (ring.rank - number) % ring.ranks
        self.causal = self.source == ring.rank
        half = length // 2
        self.queries = slice(half, length) if self.source > ring.rank else slice(0, length)
        self.keys = slice(0, half) if self.source < ring.rank else slice(0, length)

    def bias(self, documents: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """What hides other documents; with them it hides later tokens as well."""
        if documents is None:
            return None
        mine, theirs = documents[self.rank, :, self.queries], documents[self.source, :, self.keys]
        return document_bias(mine, theirs, self.causal, dtype)


class _Ring(torch.autograd.Function):
    """q (B, H, S, Q), kv (2, B, K, S, Q), documents (n, B, S) or None, of a rank -> out (B, H, S, Q); S is S / n."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, documents: Tensor | None, ring: RingAttention) -> Tensor:
        out, lse = computed_once(lambda: _forward(q, kv, documents, ring))
        ctx.ring = ring
        ctx.save_for_backward(q, kv, documents, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, documents, out, lse = ctx.saved_tensors
        dq, dkv = _backward(gradient, q, kv, documents, out, lse, ctx.ring)
        return dq, dkv, None, None


def _forward(q: Tensor, kv: Tensor, documents: Tensor | None, ring: RingAttention) -> tuple[Tensor, Tensor]:
    """out, lse"""
    block, out, lse = kv, q.new_empty(0), q.new_empty(0)
    for number in range(ring.ranks):
        coming = Exchange(block, ring) if number + 1 < ring.ranks else None
        step = _Step(ring, number, q.shape[2])
        bias = step.bias(documents, q.dtype)
        causal = step.causal and bias is None
        part = ring.kernel.forward(q[:, :, step.queries], block[:, :, :, step.keys], causal, bias)
        if number == 0:
            out, lse = part[0].to(_wide(q)), part[1]
        else:
            merge(out[:, :, step.queries], lse[:, :, step.queries], *part)
        block = coming.wait() if coming else block
    return out.to(q.dtype), lse


def _backward(
    gradient: Tensor, q: Tensor, kv: Tensor, documents: Tensor | None, out: Tensor, lse: Tensor, ring: RingAttention
) -> tuple[Tensor, Tensor]:
    """dq, dkv"""
    dq, own = (torch.zeros_like(x, dtype=_wide(x)) for x in (q, kv))
    block = kv
    returning: Exchange | None = None  # gradients of keys and values, on their way round to their owner
    for number in range(ring.ranks):
        coming = Exchange(block, ring) if number + 1 < ring.ranks else None
        step = _Step(ring, number, q.shape[2])
        bias = step.bias(documents, q.dtype)
        rows = (slice(None), slice(None), step.queries)
        causal = step.causal and bias is None
        dq_part, *dkv_part = ring.kernel.backward(
            gradient[rows], q[rows], block[:, :, :, step.keys], out[rows], lse[rows], causal, bias
        )
        dq[rows] += dq_part
        total = own if number == 0 else torch.zeros_like(own) if returning is None else returning.wait()
        for side, part in zip(total, dkv_part, strict=True):
            side[:, :, step.keys] += part
        if number > 0:
            returning = Exchange(total, ring)
        block = coming.wait() if coming else block
    if returning is not None:
        own += returning.wait()
    return dq.to(q.dtype), own.to(kv.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Attention over two sets of keys from attention over each, into `out` (B, H, S, Q) and `lse` (B, H, S)."""
    both = torch.logaddexp(lse, other_lse)
    out.mul_((lse - both).exp().unsqueeze(-1)).addcmul_(other_out.to(out.dtype), (other_lse - both).exp().unsqueeze(-1))
    lse.copy_(both)
