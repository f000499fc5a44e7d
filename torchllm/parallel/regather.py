"""Gathers the sequence before column-parallel products again in the backward (Korthikanti et al. 2022, section 4.2.2).

With sequence parallelism the products of q, k, v, gate and up, and whatever else reads a gathered sequence, keep their
input for the gradients of their weights: (B, S, D) on every rank. Here they keep this rank's part, (B, S / tp, D), and
the backward gathers it again: once for all products of the same input, which is freed after the last of them.

Nothing is sharded. Sent in addition, per block: an all-gather of each such input in the backward.

Recomputed modules gather their inputs again anyway, in the selective modes by `recompute.py`, and are left as they are.
In a compiled block torch's graph decides which tensors are kept: there the gather is marked as recomputed, and the
graph of the backward repeats it.
"""

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Placement
from torch.utils.checkpoint import checkpoint

from torchllm.models.decoder import Decoder, run_blocks
from torchllm.parallel.tensor import gathered
from torchllm.runtime.torch_compat import CheckpointWrapper


def apply_regather(stage: Decoder) -> None:
    """Let the blocks of a stage gather their inputs again, in place. Call it after tp and recomputation."""
    if stage.run_blocks is not run_blocks:
        return  # all is recomputed, in segments
    for block in stage.layers.values():
        gathering = [module for module in _kept(block) if hasattr(module, "gather")]
        of_block = GathersAgain(block)
        for module in gathering:
            module.gather = of_block.gather  # type: ignore[assignment]  # a seam
        if gathering:
            block.forward = of_block.forward  # a seam


def _kept(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those inside, without recomputed ones."""
    if not isinstance(module, CheckpointWrapper):
        yield module
        for child in module.children():
            yield from _kept(child)


class GatheredInput:
    """A gathered input: this rank's part of it, and all of it from its first use in the backward to its last.

    The objects that autograd keeps of it hold this one, and so the gathered input, until they are used.
    """

    def __init__(self, part: DTensor) -> None:
        self.part: Any = part.detach()  # a DTensor
        self.whole: Tensor | None = None

    def local(self) -> Tensor:
        """Return the input on this rank: (B, S, D)."""
        if self.whole is None:
            self.whole = gathered(self.part).to_local()
        return self.whole


class Kept(NamedTuple):
    """The object that autograd keeps instead of a gathered input, or of a view of it."""

    input: GatheredInput
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    like: tuple[torch.Size, tuple[int, ...], tuple[Placement, ...]] | None
    """shape, stride and placements of the whole DTensor; None: a plain tensor"""


class GathersAgain:
    """The forward of a block whose backward gathers again."""

    def __init__(self, block: nn.Module) -> None:
        self.plain_forward = block.forward
        self.inputs: list[tuple[weakref.ref[Any], GatheredInput]] = []
        """storage of each input that the forward under way has gathered"""

    def forward(self, *inputs: Any) -> Any:
        """Run the block."""
        if torch.compiler.is_compiling():
            return self.plain_forward(*inputs)
        with saved_tensors_hooks(self._keep, self._restore):
            out = self.plain_forward(*inputs)
        self.inputs.clear()
        return out

    def gather(self, part: DTensor) -> DTensor:
        """Return the whole of a sequence (B, S, D)."""
        if torch.compiler.is_compiling():
            whole: DTensor = checkpoint(gathered, part, use_reentrant=False, preserve_rng_state=False)
            return whole
        whole = gathered(part)
        with torch.no_grad():
            self.inputs.append((weakref.ref(whole.to_local().untyped_storage()), GatheredInput(part)))
        return whole

    @torch.no_grad()
    def _keep(self, tensor: Tensor) -> Tensor | Kept:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for storage, of in self.inputs:
            if local.untyped_storage() is storage():
                like = (tensor.shape, tensor.stride(), tensor.placements) if isinstance(tensor, DTensor) else None
                return Kept(of, local.shape, local.stride(), local.storage_offset(), like)
        return tensor

    @torch.no_grad()
    def _restore(self, kept: Tensor | Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        local = kept.input.local().as_strided(kept.size, kept.stride, kept.offset)
        if kept.like is None:
            return local
        shape, stride, placements = kept.like
        mesh = kept.input.part.device_mesh
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
