"""What a training step does, in order: every collective with its axis and size, between marks of the computation."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.parity import Settings, Trainer, tiny
from torchllm.facts.parameters import canonical_name
from torchllm.models.decoder import Decoder
from torchllm.parallel.mesh import Mesh
from torchllm.tools.mesh_axes import axis_of_group

KINDS = {
    "allgather": "gather",
    "reducescatter": "scatter",
    "allreduce": "reduce",
    "alltoall": "exchange",
    "send": "send",
}


class Collective(NamedTuple):
    """One collective, or one message from rank to rank."""

    kind: str
    """gather, scatter (reduce-scatter), reduce (all-reduce), exchange (all-to-all) or send"""
    axis: str
    """one of `AXIS_NAMES`"""
    elements: int
    """of the whole tensor: gathered, reduced, about to be scattered, exchanged, or sent"""
    dtype: torch.dtype


class Trace(TorchDispatchMode):
    """Records in `events` while it is active; `mark` makes hooks that write a line among the collectives."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.axes = {group: axis.name for group, axis in axis_of_group(mesh).items()}
        self.events: list[Collective | str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.__name__.replace("_", "")  # some are all_gather_, others allgather_
        kind = next((kind for part, kind in KINDS.items() if part in name), None)
        if "c10d" in func.namespace and kind is not None:
            tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)]
            largest = max(tensors, key=Tensor.numel)
            axes = [self.axes[group] for group in map(_group_name, args) if group in self.axes]
            assert axes, f"{func}: its process group belongs to no axis of the mesh"
            self.events.append(Collective(kind, axes[0], largest.numel(), largest.dtype))
        return out

    def mark(self, text: str) -> Callable[..., None]:
        return lambda *ignored: self.events.append(text)

    def sent(self, axis: str, kind: str = "") -> list[Collective]:
        collectives = [event for event in self.events if isinstance(event, Collective)]
        return [event for event in collectives if event.axis == axis and kind in ("", event.kind)]


def _group_name(argument: Any) -> Any:
    """Functional collectives name their group, the others bring it boxed beside the reduction's kind."""
    if isinstance(argument, torch.ScriptObject):
        with contextlib.suppress(RuntimeError):
            return dist.ProcessGroup.unbox(argument).group_name
        return None
    return argument if isinstance(argument, str) else None


def traced(
    settings: Settings, prepare: Callable[[Trace, Decoder], None] = lambda trace, stage: None
) -> list[Collective | str]:
    """The events of one step's forwards and backwards under a layout, on this rank. `prepare` may add marks."""
    trainer = Trainer(tiny(settings))
    batches = trainer.batches(1)
    trace = Trace(trainer.mesh)
    prepare(trace, trainer.stages[0])
    with trace:
        trainer.forward_backward(batches, torch.tensor(1e-2))
    return trace.events


def module_named(stage: nn.Module, name: str) -> nn.Module:
    return {canonical_name(n + "."): m for n, m in stage.named_modules()}[name + "."]
