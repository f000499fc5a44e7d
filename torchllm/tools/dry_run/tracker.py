"""Counts memory and collectives of the operations that run under it, on fake tensors or real ones, as a dispatch mode.

Memory is counted in storages, each once, from the operation that makes it until it is freed. The purpose of a storage
is deduced later, from when it was made and how long it lived (`memory.py`). Workspaces of kernels, the allocator's
rounding and the buffers of the communication library are not counted.

Three things that a naive count gets wrong, by a factor of 20: tensors of other fake modes (DTensor propagates shapes of
*global* tensors through one), storages that FSDP frees and refills in place, and wait_tensor, which copies when fake.
"""

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchllm.models.document_attention import BODIES
from torchllm.parallel.local_tensor import local_tensor
from torchllm.runtime.torch_compat import FakeTensor, FakeTensorMode, TorchDispatchMode
from torchllm.tools.mesh_axes import MeshAxis
from torchllm.tools.torch_names import group_with_name

NO_DEVICE = torch.device("meta")
"""of tensors in the host's memory: the inputs of blocks"""
HOST = "host"
"""purpose of memory that is not of the device"""
NEVER = 1 << 62
"""time of an event that has not happened: it is after all other times"""
ACTION = "PP:"
"""prefix of the names that torch's pipeline schedules give their actions for the profiler"""
REDUCTION = re.compile(r"FSDP::post_backward_reduce \(layers\.(\d+)\)")
"""FSDP's name for the profiler of the reduction of a block's gradients"""


@dataclass(slots=True, eq=False)
class Held:
    """Memory of one storage, from when it is made until it is freed. Times count operations."""

    bytes: int
    born: int
    window: int
    """number of the forward pass that made it; -1: none"""
    kind: str
    """its purpose, if that is known; else empty"""
    like_gradient: bool
    """made without recording gradients, as in a backward pass, and with at most two dimensions, as parameters have"""
    died: int = NEVER
    holders: int = 1
    """storages that stand for this memory; it is freed with the last of them"""


class Sent(NamedTuple):
    """One collective of one rank."""

    time: int
    axis: str
    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or send"""
    bytes: float
    """bytes that this rank sends if the ranks form a ring"""


class BlockBegins(NamedTuple):
    """The forward, the backward or the reduction of a block begins."""

    time: int
    kind: str
    """F, B, or R: in a pipeline, the reduction of a block's gradients at the end of a step"""
    number: int
    """of the block in the model"""


class Tracker(TorchDispatchMode):
    """Notes, while it is active, the memory that is held and the collectives that are run.

    fake: the mode whose tensors count; None: real tensors count. axes: `axis_of_group`. pipeline: name of the
    process group of the pipeline stages.
    """

    def __init__(self, fake: FakeTensorMode | None, axes: dict[str, MeshAxis], pipeline: str = "") -> None:
        super().__init__()
        self.fake, self.axes, self.pipeline = fake, axes, pipeline
        self.held: list[Held] = []
        self.sent: list[Sent] = []
        self.forward_ends: list[int] = []
        """end time of each forward pass of a stage"""
        self.marks: list[tuple[int, str]] = []
        """time and name of each action that began; schedules of several stages name their actions themselves"""
        self.blocks: list[BlockBegins] = []
        self.watches_reductions = False
        """whether to note when the reduction of each block begins, as F and B are"""
        self.now = 0
        self.window = -1
        self.columns = 0
        """width of the logits while the head runs, else 0"""
        self._live: dict[int, tuple[weakref.ref[Any], Held]] = {}
        self._filled: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (FakeTensor, Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # DTensors and tensors in flight: their inner operations are dispatched here too
        kwargs = kwargs or {}
        if func in BODIES:
            with self:
                out = BODIES[func](*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        self.now += 1
        name, namespace = func.__name__.partition(".")[0], func.namespace
        if namespace == "profiler":
            self._notice_emptied()  # FSDP names its steps to the profiler, the freeing of weights too
            if "enter" in name and args[0].startswith(ACTION):
                self.mark(args[0].removeprefix(ACTION))
            elif "enter" in name and self.watches_reductions and (block := REDUCTION.fullmatch(args[0])):
                self.begin_block("R", int(block[1]))
            return out
        if name == "wait_tensor":
            self._pass_on(args[0], out)
            return out
        kind = FSDP.get(name, "")
        for tensor in _tensors((out, kwargs.get("out"))):
            self._hold(tensor, kind)
            if name in ("split_with_sizes_copy", "copy_", "cat"):  # how FSDP fills gathered weights
                storage = tensor.untyped_storage()
                if id(storage) in self._live:
                    self._filled[id(storage)] = weakref.ref(storage)
        if name == "recv_" and find_group(args).group_name == self.pipeline:
            for tensor in _tensors(args):
                self._hold(tensor, "buffers")
        if "c10d" in namespace:
            self._note_sent(name, (*args, *kwargs.values()), out)
        return out

    def mark(self, name: str) -> None:
        """Note that the action `name` begins now."""
        self.now += 1
        self._notice_emptied()
        self.marks.append((self.now, name))

    def begin_block(self, kind: str, number: int) -> None:
        """Note that a part of a step begins that belongs to a block. kind: see `BlockBegins`."""
        self.now += 1
        self.blocks.append(BlockBegins(self.now, kind, number))

    def restart(self) -> None:
        """Forget collectives, marks, blocks, and memory that has been freed."""
        self.now += 1
        self._notice_emptied()
        self.held = [held for held in self.held if held.died == NEVER]
        self.sent, self.marks, self.blocks = [], [], []

    # -- memory

    def claim(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the purpose of the storages of tensors (of DTensors: of their local parts)."""
        for tensor in tensors:
            local = local_tensor(tensor)
            self._hold(local, kind)
            self._live[id(local.untyped_storage())][1].kind = kind

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of these tensors no longer: they are in the host's memory."""
        self.claim(tensors, HOST)
        self.held = [held for held in self.held if held.kind != HOST]

    def begin_forward(self) -> None:
        """Note that a forward pass of a stage begins: memory that outlives it is stored for the backward pass."""
        self.window = len(self.forward_ends)
        self.forward_ends.append(NEVER)

    def end_forward(self) -> None:
        """Note that the forward pass ends."""
        self.forward_ends[self.window] = self.now
        self.window = -1

    def _hold(self, tensor: Tensor, kind: str) -> None:
        if self.fake is not None and getattr(tensor, "fake_mode", None) is not self.fake:
            return
        if tensor.device == NO_DEVICE:
            kind = HOST
        storage = tensor.untyped_storage()
        reference, held = self._live.get(id(storage), (None, None))
        if reference is not None and held is not None and reference() is storage:
            held.kind = held.kind or kind
            if held.bytes != storage.nbytes():  # filled again
                held.died = self.now - 1
                self._keep(storage, Held(storage.nbytes(), self.now, -1, held.kind, False))
            return
        if self.columns and tensor.dim() and tensor.shape[-1] == self.columns:
            kind = kind or "logits"
        like_gradient = not torch.is_grad_enabled() and tensor.dim() <= 2
        self._keep(storage, Held(storage.nbytes(), self.now, self.window, kind, like_gradient))

    def _keep(self, storage: Any, held: Held) -> None:
        self._follow(storage, held)
        self.held.append(held)

    def _follow(self, storage: Any, held: Held) -> None:
        """Note when a storage is freed that stands for memory."""
        key = id(storage)

        def free(reference: Any) -> None:
            live = self._live.get(key)
            if live is not None and live[0] is reference:
                del self._live[key]
                held.holders -= 1
                if not held.holders:
                    held.died = self.now

        self._live[key] = (weakref.ref(storage, free), held)

    def _notice_emptied(self) -> None:
        """Notice storages of gathered weights that FSDP has emptied, to fill them again later; no operation tells."""
        for key, reference in list(self._filled.items()):
            storage = reference()
            if storage is None or storage.nbytes() != self._live[key][1].bytes:
                del self._filled[key]
                if storage is not None:
                    held = self._live[key][1]
                    held.kind, held.died = "gathered", self.now - 1
                    self._keep(storage, Held(storage.nbytes(), self.now, -1, "gathered", False))

    def _pass_on(self, old: Tensor, new: Tensor) -> None:
        """Let `new` share the memory of `old`: waiting copies fake tensors only, not real ones.

        It is held until both are freed: selective recomputation saves the result of a collective before the wait.
        """
        old_storage, new_storage = old.untyped_storage(), new.untyped_storage()
        live = self._live.get(id(old_storage))
        if old_storage is not new_storage and live is not None:
            held = live[1]
            held.holders += 1
            self._follow(new_storage, held)

    # -- collectives

    def _note_sent(self, name: str, args: Any, out: Any) -> None:
        """Note a collective, with this rank's sent bytes. Operations that only receive or wait are not in `KINDS`.

        RuntimeError if it runs in a process group of several ranks that belongs to no axis.
        """
        kind = collective_kind(name)
        if kind is None:
            return
        group = find_group(args)
        if group.size() == 1:
            return
        axis = self.axes.get(group.group_name)
        if axis is None:
            raise RuntimeError(
                f"{kind} in a process group that belongs to no axis of the mesh: ranks "
                f"{dist.get_process_group_ranks(group)}. Add the group to `axis_of_group` "
                "(torchllm/tools/mesh_axes.py), so that the dry run can count its messages"
            )
        # An argument may be a list, with a tensor for each rank.
        whole = max(sum(tensor.nbytes for tensor in _tensors((argument,))) for argument in (*args, out))
        self.sent.append(Sent(self.now, axis.name, kind, whole * RING[kind](axis.size)))


FSDP = {
    "all_gather_copy_in": "gathered",
    "split_with_sizes_copy": "gathered",
    "chunk_cat": "temporary",
    "chunk_cat_mixed_dtype": "temporary",  # its name in torch 2.15
}
"""FSDP's own operations, and the purpose of their results"""

KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
}
"""words in the names of torch's collectives, without underscores, and their kinds"""


def _once(ranks: int) -> float:
    return (ranks - 1) / ranks


RING: dict[str, Callable[[int], float]] = {
    "all_gather": _once,
    "reduce_scatter": _once,
    "all_reduce": lambda ranks: 2 * _once(ranks),  # a reduce-scatter and an all-gather
    "all_to_all": _once,
    "broadcast": _once,
    "send": lambda ranks: 1.0,
}
"""share of the whole (gathered, reduced or scattered) tensor that a rank sends in a ring of that many ranks"""


def collective_kind(operation: str) -> str | None:
    """Return the kind of a collective by the name of torch's operation; None if it sends nothing."""
    bare = operation.replace("_", "")
    for word, kind in KINDS.items():
        if word in bare:
            return kind
    return None


def find_group(arguments: Iterable[Any]) -> dist.ProcessGroup:
    """Return the process group among the arguments of a collective. ValueError if there is none.

    Functional collectives bring the name of the group, as the last of their strings. The others bring the group boxed;
    the kind of a reduction is boxed as well.
    """
    name = ""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # not a process group
                return dist.ProcessGroup.unbox(argument)
        elif isinstance(argument, str):
            name = argument
    if not name:
        raise ValueError("a collective without a process group")
    return group_with_name(name)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
