"""Context parallelism: the ranks of cp share each sequence. Both methods replace the attention core.

Sharded: tokens, labels, positions and document ids by the sequence, and with them every activation. Not the weights:
FSDP shards these over dp_shard x cp and sums their gradients there.

Sent, per layer, over n ranks (both methods also gather the document ids once per forward):
  ring      (`ring.py`; Liu et al. 2023) keys and values, n - 1 times, while attention computes
  ulysses   (DeepSpeed Ulysses, Jacobs et al. 2023) one all-to-all of q, k and v before the core, which gives a rank all
            tokens of H / n heads, and one of the output after it; the same for the gradients in the backward
An all-to-all moves (n - 1) / n of a rank's tensors: first B x S / n x (H + 2 K) x Q elements, then B x S / n x H x Q.
That shrinks as n grows, but it does not overlap with computation, and n must divide the key-value heads. Under ulysses
the core masks the whole sequence: the mask of eager attention is (S, S), not divided by n.

Positions and labels are sharded with the tokens, so no code outside the core depends on cp. The core stays outside
compiled blocks, whose graphs break there. torch then compiles nothing of a block that is recomputed as a whole, and the
config refuses that combination.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchllm.config import Model
from torchllm.config.applied_keys import config_in_use
from torchllm.config.errors import UserError
from torchllm.facts.parts.part import found
from torchllm.facts.parts.registry import mixer
from torchllm.models.attention import core_class
from torchllm.models.attention_kernels import BlockKernel, block_kernel
from torchllm.models.decoder import Decoder
from torchllm.models.kernel_check import check_kernel
from torchllm.models.mixer import Mixer
from torchllm.parallel.heads import to_heads, to_sequence
from torchllm.parallel.ring import RingAttention, gather_from_ranks
from torchllm.parallel.shared_sequence import sum_over_sequence
from torchllm.parallel.windows import WindowAttention


class SharedSequences(NamedTuple):
    """How the ranks of cp share sequences."""

    mesh: DeviceMesh
    """one dimension, the cp ranks"""
    method: str
    """ring or ulysses"""
    dtype: torch.dtype
    """of the computation"""
    sequence_length: int
    """of whole sequences, the shortest; either all or none are longer than a window"""


def apply_context_parallel(
    stage: Decoder, mesh: DeviceMesh, method: str, dtype: torch.dtype, sequence_length: int
) -> None:
    """Replace the cores of a stage's mixers, and let its routers count whole sequences, in place.

    mesh: one dimension, the cp ranks. method: "ring" or "ulysses". dtype: of the computation. Raises UserError if the
    ring's kernel does not work on this device, or the ring would drop a fork's attention core.
    """
    sum_over_sequence(stage, mesh.get_group())
    shortest = min(config_in_use().data.lengths(sequence_length))  # a piece of it may be too short for a core
    shared = SharedSequences(mesh, method, dtype, shortest)
    for index, block in stage.layers.items():
        view = stage.model.of_block(int(index))
        for module in block.modules():
            if isinstance(module, Mixer):
                found(mixer(view).context)(module, view, shared)


def share_attention(attention: Mixer, view: Model, shared: SharedSequences) -> None:
    """Replace the core of an attention. In a ring, blocks whose window is shorter than the sequence exchange its reach.

    Raises UserError as `apply_context_parallel` says.
    """
    if shared.method == "ulysses":
        attention.core = UlyssesAttention(shared.mesh, attention.core)
        return
    kernel = ring_kernel(view, shared.mesh.device_type, shared.dtype)
    plain, core = core_class(view)(view), attention.core
    read = ("window", "scale", "softcap")  # values that a ring takes from the core
    if type(core) is not type(plain) or any(getattr(core, name) != getattr(plain, name) for name in read):
        giver = f"model.block = {view.block!r}" if view.block else f"model.mixer = {view.mixer!r}"
        raise UserError(
            f'parallel.cp_method: a ring would replace the attention core that {giver} gives its blocks: use "ulysses"'
        )
    if view.window_within(shared.sequence_length) < shared.sequence_length:
        attention.core = WindowAttention(shared.mesh, attention.core)
    else:
        attention.core = RingAttention(shared.mesh, kernel)


@cache
def ring_kernel(view: Model, device: str, dtype: torch.dtype) -> BlockKernel:
    """Return a view's kernel of a ring, once it has computed right. UserError if it does not work on this device."""
    kernel = block_kernel(view, device)
    if device != "cpu":  # on a CPU the tests compare it
        check_kernel(kernel, torch.device(device), view.heads // view.kv, view.head_width, dtype)
    return kernel


class UlyssesAttention(nn.Module):
    """An attention core with all-to-alls around it: from a part of the sequence to a part of the heads, and back."""

    def __init__(self, mesh: DeviceMesh, core: Any) -> None:
        super().__init__()
        self.group = mesh.get_group()
        self.ranks = mesh.size()
        self.rank = mesh.get_local_rank()
        self.core = core

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Any:
        """Return the core's mask of whole sequences, from this rank's document ids (B, S / n) and the whole's limit."""
        if document_ids is None:
            return self.core.mask(None)
        return self.core.mask(torch.cat(gather_from_ranks(document_ids, self.group), dim=1), document_limit)

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *of_heads: Tensor) -> Tensor:
        """Map q (B, S / n, H, Q), k and v (B, S / n, K, Q) -> (B, S / n, H, Q).

        of_heads: further inputs of the core, (H) each; it gets the values of its heads.
        """
        q, k, v = to_heads((q, k, v), self.group)
        of_own_heads = [x.unflatten(0, (self.ranks, -1))[self.rank] for x in of_heads]
        return to_sequence(self.core(q, k, v, mask, *of_own_heads), self.group)
