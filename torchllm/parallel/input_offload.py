"""Inputs of blocks in the host's memory between forward and backward (`recompute.offload`).

A block that is recomputed keeps its input, (B, S, D): with `recompute.mode = "full"` a GPU holds nothing else of it.
Here the input goes to pinned memory of the host while the block computes, on a stream for copies, and returns for the
backward: the input of a block is on its way back while the block after it is recomputed. Nothing else that autograd
saves is moved, weights least of all.

Nothing is sharded or sent to other ranks. Values do not change.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

BlocksWithInputs = Sequence[tuple[nn.Module, Sequence[Any]]]


class InputOnHost:
    """The input of a block: a copy on the host, and for its backward on the device again."""

    def __init__(self, x: Tensor, before: "InputOnHost | None", host: torch.device) -> None:
        """x: the input. before: the input of the block before, whose backward comes next."""
        self.storage = weakref.ref(x.untyped_storage())
        self.layout = x.shape, x.stride(), x.storage_offset()
        self.device = x.device
        self.before, self.host = before, host
        self.copy: Tensor | None = None
        self.returned: Tensor | None = None
        self.uses = 0
        """times that autograd saves it"""

    def pack(self, saved: Tensor) -> object:
        """Return the object that autograd keeps in place of a tensor: this one, if it is the input."""
        is_input = saved.untyped_storage() is self.storage()
        if not is_input or (saved.shape, saved.stride(), saved.storage_offset()) != self.layout:
            return saved
        self.uses += 1
        if self.copy is None:
            self.copy = self._leave(saved)
        return self

    def unpack(self, kept: object) -> Tensor:
        """Return a saved tensor, and let the input of the block before return meanwhile."""
        if kept is not self:
            assert isinstance(kept, Tensor)
            return kept
        here = self.start_return()
        if here.is_cuda:
            torch.cuda.current_stream().wait_event(self.arrived)
        if self.before is not None and self.before.copy is not None:
            self.before.start_return()
        self.uses -= 1
        if self.uses == 0:
            self.returned = None  # autograd has it
        return here

    def _leave(self, x: Tensor) -> Tensor:
        copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.host, pin_memory=x.is_cuda)
        if not x.is_cuda:
            return copy.copy_(x)
        stream = _stream_for_copies(x.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copy.copy_(x, non_blocking=True)
        x.record_stream(stream)  # its memory is free when it is copied
        return copy

    def start_return(self) -> Tensor:
        """Return the input on the device; on a GPU it is there when `arrived` is over."""
        assert self.copy is not None, "nothing has saved the input"
        if self.returned is None:
            self.returned = torch.empty_strided(*self.layout[:2], dtype=self.copy.dtype, device=self.device)
            if not self.returned.is_cuda:
                return self.returned.copy_(self.copy)
            stream = _stream_for_copies(self.device)
            stream.wait_stream(torch.cuda.current_stream())  # it may still use the memory
            with torch.cuda.stream(stream):
                self.returned.copy_(self.copy, non_blocking=True)
                self.arrived = stream.record_event()
        return self.returned


@cache
def _stream_for_copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class OffloadedInputs:
    """Runs blocks, whose inputs are on the host until their backward. Replaces `models.decoder.run_blocks`."""

    host = torch.device("cpu")
    """replaceable: a dry run counts no memory of the host"""

    def __init__(self, run: Callable[[BlocksWithInputs, Tensor], Tensor], size: int) -> None:
        """run: runs blocks as without offload. size: blocks per input that is kept."""
        self.run, self.size = run, size

    def __call__(self, blocks: BlocksWithInputs, x: Tensor) -> Tensor:
        before: InputOnHost | None = None
        for first in range(0, len(blocks), self.size):
            kept = InputOnHost(x, before, self.host)
            with saved_tensors_hooks(kept.pack, kept.unpack):
                x = self.run(blocks[first : first + self.size], x)
            before = kept
        return x
