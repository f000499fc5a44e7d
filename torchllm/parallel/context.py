"""Context parallelism: the ranks of cp share each sequence. Two ways, both replacements of the attention core.

Sharded: tokens, labels, positions and document ids by the sequence, and with them every activation. Not the weights:
FSDP shards these over dp_shard x cp and sums their gradients there.

Sent: "ring" (`ring.py`) keys and values, (n - 1) / n of the sequence, while attention computes; "ulysses" (Jacobs et
al. 2023, DeepSpeed Ulysses) per layer one all-to-all of q, k and v before the core, that gives a rank all tokens of
H / n heads, and one of the output after it; their mirror images in the backward. An all-to-all moves (n - 1) / n of
what a rank has, B x S / n x (H + 2 K) x Q numbers and B x S / n x H x Q: less as n grows, but nothing computes
meanwhile, and n cannot be over the key-value heads. Both gather the document ids once a forward; under ulysses the
core's own mask follows, which for sdpa and eager is (S, S) large and not divided by n.

Positions and labels travel with their tokens, so nothing outside the core knows that it sees a part of the sequence.
The core stays outside compiled blocks, whose graphs break there; so torch compiles nothing of a block that recomputes
as one, and the config refuses that.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchllm.data.batch import Batch
from torchllm.models.attention import Attention
from torchllm.models.decoder import Decoder
from torchllm.parallel.attention_kernels import block_kernel, check_kernel
from torchllm.parallel.mesh import Mesh
from torchllm.parallel.ring import RingAttention, of_all_ranks
from torchllm.runtime.torch_compat import all_to_all


def apply_context_parallel(stage: Decoder, mesh: DeviceMesh, method: str) -> None:
    """Replace the attention cores of a stage, in place. `mesh` has one axis; method: ring or ulysses.

    UserError where the ring's kernel does not work on this device.
    """
    model = stage.model
    if method == "ring":
        kernel = block_kernel(model.attention, mesh.device_type)
        if mesh.device_type != "cpu":
            check_kernel(kernel, torch.device(mesh.device_type), model.heads // model.kv, model.head_width)
    for module in stage.modules():
        if isinstance(module, Attention):
            module.core = RingAttention(mesh, kernel) if method == "ring" else UlyssesAttention(mesh, module.core)


def shard_sequence(batch: Batch, mesh: Mesh) -> Batch:
    """This rank's part (B, S / n) of a batch of whole sequences (B, S), which are the same on all ranks of cp."""
    rank, ranks = mesh.cp.get_local_rank(), mesh.cp.size()
    if ranks == 1:
        return batch
    count, mine = (2 * ranks, (rank, 2 * ranks - 1 - rank)) if mesh.cp_method == "ring" else (ranks, (rank,))

    def part(x: Tensor) -> Tensor:
        pieces = x.chunk(count, dim=1)
        return torch.cat([pieces[index] for index in mine], dim=1)

    tokens, labels, positions, documents = batch
    return Batch(part(tokens), part(labels), part(positions), None if documents is None else part(documents))


class UlyssesAttention(nn.Module):
    """An attention core that exchanges its part of the sequence for a part of the heads, and back."""

    def __init__(self, mesh: DeviceMesh, core: Any) -> None:
        super().__init__()
        self.group, self.ranks, self.core = mesh.get_group(), mesh.size(), core

    def mask(self, document_ids: Tensor | None) -> Any:
        """The core's mask of the whole sequence, from this rank's ids (B, S / n)."""
        return self.core.mask(
            None if document_ids is None else torch.cat(of_all_ranks(document_ids, self.group), dim=1)
        )

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """q (B, S / n, H, Q), k and v (B, S / n, K, Q) -> (B, S / n, H, Q)"""
        heads = [x.shape[2] // self.ranks for x in (q, k, v)]
        by_rank = torch.cat([x.unflatten(2, (self.ranks, -1)) for x in (q, k, v)], dim=3)  # (B, S / n, n, heads, Q)
        mine = _AllToAll.apply(by_rank.permute(2, 0, 1, 3, 4).contiguous(), self.group)
        q, k, v = mine.transpose(0, 1).flatten(1, 2).split(heads, dim=2)  # (B, S, heads / n, Q)
        out = self.core(q, k, v, mask)
        back = out.unflatten(1, (self.ranks, -1)).transpose(0, 1).contiguous()  # (n, B, S / n, H / n, Q)
        return _AllToAll.apply(back, self.group).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """(n, ...) -> (n, ...): what was at [i] of rank j is at [j] of rank i. Its gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_to_all(gradient.contiguous(), ctx.group), None
