"""The tensors of a run that a checkpoint holds: their keys, and the part of each on this rank.

Keys do not depend on the layout:

    model.<canonical name>                    parameters and persistent buffers; a tied one once; if there are low-rank
                                              updates, they alone: frozen weights are loaded from their source again
    optimizer.<canonical name>.<entry>        exp_avg, exp_avg_sq, step, momentum_buffer; of a moment in 8 bits codes,
                                              and <entry>_scale (..., n / 32)
    rng.<cpu or cuda>                         states of torch's random generators, a row per rank
    extra.ema.<canonical name>                moving average of a parameter, with optimizer.ema_decay over 0
    extra.<name>                              additional state of a forked recipe

Every parameter has its own `step`: AdamW counts only steps with a gradient, so they may differ.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torchllm.checkpoint.index import Region
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.facts.parameters import canonical_name, is_low_rank_factor
from torchllm.parallel.local_tensor import local_tensor
from torchllm.runtime.torch_compat import local_region

log = logging.getLogger(__name__)

WEIGHTS = "model."
"""prefix of the weights' keys, before their canonical name"""
OPTIMIZER = "optimizer."
"""prefix of the keys of the optimizer's state, before the parameter's canonical name"""
EXTRA = "extra."
"""prefix of the keys of optional state: the moving average, and state of a fork"""


class TensorSharding(NamedTuple):
    """The sharding of a tensor: equal on all ranks, unlike their parts."""

    shape: tuple[int, ...]
    mesh: DeviceMesh | None
    """None: every rank with the tensor has all of it, or its own row"""
    placements: tuple[Placement, ...]


class Part(NamedTuple):
    """The part of a tensor on this rank."""

    local: Tensor
    """shares the memory of the model or optimizer"""
    region: Region
    sharding: TensorSharding


@torch.no_grad()
def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """Return this rank's part of each tensor, by key."""
    regions: dict[TensorSharding, Region] = {}  # cached: computing one takes longer than all else here
    parts: dict[str, Part] = {}
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            parts[key] = Part(tensor.detach(), Region((0,) * len(shape), shape), TensorSharding(shape, None, ()))
            continue
        sharding = TensorSharding(shape, tensor.device_mesh, tensor.placements)
        if sharding not in regions:
            size, offset = local_region(tensor)
            regions[sharding] = Region(offset, size)
        parts[key] = Part(local_tensor(tensor).detach(), regions[sharding], sharding)
    return parts


def model_tensors(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of this rank's stages by key; they share the stages' memory."""
    return {f"{WEIGHTS}{name}": tensor.detach() for name, tensor in tensors_by_name(stages).items()}


def saved_model_tensors(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the `model_tensors` that checkpoints hold: the low-rank updates if there are any, else all."""
    tensors = model_tensors(stages)
    return {key: tensor for key, tensor in tensors.items() if is_low_rank_factor(key)} or tensors


def holds_all_weights(stages: Sequence[nn.Module]) -> bool:
    """Return whether checkpoints hold all weights of the model: there are no low-rank updates."""
    return not any(map(is_low_rank_factor, model_tensors(stages)))


def optimizer_tensors(stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimizer over these stages' parameters by key; it shares the optimizer's memory.

    Raises CheckpointError for a parameter that no stage has, TypeError if an entry of the state is not a tensor.
    """
    names = {id(tensor): name for name, tensor in tensors_by_name(stages).items()}
    copies = {id(copy) for _, copy in tied_copies(stages)}
    tensors: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        if id(parameter) in copies:
            continue
        if id(parameter) not in names:
            shape, cure = tuple(parameter.shape), "make it a parameter of a block by `register_block`"
            raise CheckpointError(f"no checkpoint can have a parameter {shape} that is not the model's: {cure}")
        for entry, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{names[id(parameter)]}.{entry}"] = value
            elif value is not None:  # SGD without momentum has a None
                raise TypeError(f"optimizer state {entry!r} of {names[id(parameter)]} is not a tensor: {value!r}")
    return tensors


def changed_numbers(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers that steps have changed in all groups of an optimizer, such as a count of the steps.

    before: the groups before the first step. A number that groups differ in is a warning, not saved: another layout may
    have other groups.
    """
    changed: dict[str, Any] = {}
    for group, old in zip(optimizer.param_groups, before, strict=False):  # a fork may have added a group since then
        numbers = {key: value for key, value in group.items() if type(value) in (int, float) and key != "lr"}
        changed |= {key: value for key, value in numbers.items() if value != old.get(key)}
    differing = {key for key in changed for group in optimizer.param_groups if group.get(key) != changed[key]}
    for key in differing:
        _warn_of_unsaved(key)
    return {key: value for key, value in changed.items() if key not in differing}


@cache
def _warn_of_unsaved(key: str) -> None:
    """Log once that a number is not in the checkpoints."""
    log.warning(
        "%r differs between the optimizer's groups, so checkpoints lack it: unless each step sets it, keep it as a "
        "tensor in the optimizer's state",
        key,
    )


def tensors_by_name(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the tensors to save by canonical name, a tied one once."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_tensors(stages):
        tensors.setdefault(name, tensor)
    return tensors


def named_tensors(stages: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield canonical name and tensor of every parameter and persistent buffer, each tensor once.

    They come from `state_dict`, since FSDP's weights in `named_parameters` may still be gathered.
    """
    yielded: set[int] = set()
    for stage in stages:
        for name, tensor in stage.state_dict(keep_vars=True).items():
            if id(tensor) not in yielded:
                yielded.add(id(tensor))
                yield canonical_name(name), tensor


def tied_copies(stages: Sequence[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a saved tensor and its copy: a tied embedding on a rank with both ends of a pipeline."""
    saved = tensors_by_name(stages)
    return [(saved[name], tensor) for name, tensor in named_tensors(stages) if tensor is not saved[name]]


def model_parts(stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Part]:
    """Return this rank's part of the tensors of model and optimizer, by key."""
    return parts_of(saved_model_tensors(stages) | optimizer_tensors(stages, optimizer))


def random_state(rank: int, ranks: int) -> dict[str, Part]:
    """Return the states of this rank's torch generators by key, each as a row of a tensor (ranks, bytes)."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng.cuda"] = torch.cuda.get_rng_state()
    parts = {}
    for key, state in states.items():
        region = Region((rank, 0), (1, len(state)))
        parts[key] = Part(state.unsqueeze(0), region, TensorSharding((ranks, len(state)), None, ()))
    return parts


def size_in_bytes(parts: Mapping[str, Part]) -> int:
    """Return the size of the whole (not sharded) tensors; under pipeline parallelism, of this rank's stages only."""
    return sum(math.prod(part.sharding.shape) * part.local.element_size() for part in parts.values())


def nonfinite_keys(parts: Mapping[str, Part]) -> list[str]:
    """Return the keys of the parts that hold a NaN or an infinity.

    Each part is read once in place, without an allocation of its size; then this waits for the device.
    """
    keys: dict[torch.device, list[str]] = {}
    extremes: dict[torch.device, list[Tensor]] = {}
    for key, part in parts.items():
        local = part.local
        if local.is_floating_point() and local.numel():
            smallest, largest = torch.aminmax(local)  # minimum and maximum are NaN if one element is
            keys.setdefault(local.device, []).append(key)
            extremes.setdefault(local.device, []).append(torch.stack([smallest, largest]).double())
    nonfinite = []
    for device, keys_on_device in keys.items():
        found = torch.stack(extremes[device]).isfinite().logical_not().any(dim=1).tolist()
        nonfinite += [key for key, is_nonfinite in zip(keys_on_device, found, strict=True) if is_nonfinite]
    return nonfinite


class Snapshot:
    """A copy of this rank's parts on the host, written by a background save.

    Its memory is allocated once, since allocation is slow; it is pinned if there is a GPU.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """Allocate memory, by a first copy of `parts`."""
        self._copies: dict[str, Tensor] = {}
        self.take(parts)

    def take(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """Copy the current values of the same parts and return the copies, which are valid until the next call."""
        copies, pinned = {}, torch.cuda.is_available()
        for key, part in parts.items():
            if key not in self._copies:  # some optimizers make their state in the first step
                shape, dtype = part.local.shape, part.local.dtype
                self._copies[key] = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)
            self._copies[key].copy_(part.local, non_blocking=True)
            copies[key] = part._replace(local=self._copies[key])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies
