"""Put together the whole tensors of a model from the parts that its ranks hold, and check that the ranks agree.

It does not ask DTensor for the whole tensor: a rank whose copy has drifted from the others would go unnoticed.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchllm.facts.parameters import canonical_name
from torchllm.parallel.local_tensor import local_tensor
from torchllm.runtime.torch_compat import local_region

FloatArray = npt.NDArray[Any]


class HeldPart(NamedTuple):
    """The part of one tensor that one rank holds."""

    name: str
    shape: tuple[int, ...]
    """of the whole tensor"""
    offset: tuple[int, ...]
    """where the part begins"""
    values: FloatArray

    @property
    def region(self) -> tuple[slice, ...]:
        """Where the part is in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.values.shape, strict=True))


class ParameterFinding(NamedTuple):
    """Something wrong with one parameter."""

    parameter: str
    message: str


class WholeTensors(NamedTuple):
    """Tensors by canonical parameter name, and the errors in them."""

    tensors: dict[str, FloatArray]
    findings: list[ParameterFinding]


def gather_whole(stages: Sequence[nn.Module], get: Callable[[Tensor], Any]) -> WholeTensors | None:
    """Return, on rank 0, a tensor of every parameter and buffer of the whole model. get: a parameter's tensor, or None.

    Call it on all ranks. It is a finding if an element is on no rank, or if ranks that hold the same element differ, as
    it is with the two copies of a tied embedding. A parameter without a tensor on any rank is not there.
    """
    parts: list[HeldPart] = []
    missing: list[str] = []
    for stage in stages:
        for name, parameter in itertools.chain(stage.named_parameters(), stage.named_buffers()):
            tensor = get(parameter)
            if tensor is None:
                missing.append(canonical_name(name))
            else:
                parts.append(held_part(canonical_name(name), tensor.detach()))
    return _put_together_on_first(parts, missing)


def gather_state(tensors: Mapping[str, Tensor]) -> WholeTensors | None:
    """Return, on rank 0, whole tensors by name from the tensors of each rank, as `gather_whole` does."""
    return _put_together_on_first([held_part(name, tensor.detach()) for name, tensor in tensors.items()], [])


def _put_together_on_first(parts: list[HeldPart], missing: list[str]) -> WholeTensors | None:
    """Return, on rank 0, the whole tensors of all ranks' parts. missing: tensors that this rank lacks and should have.

    One exchange of every rank's parts: a gather of each tensor by torch costs as much as a step.
    """
    of_ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((parts, missing), of_ranks)
    if of_ranks is None:
        return None
    whole = put_together(itertools.chain.from_iterable(held for held, _ in of_ranks))
    for rank, (_, missing_names) in enumerate(of_ranks):
        for name in missing_names:
            if name in whole.tensors:
                whole.findings.append(ParameterFinding(name, f"nothing there on rank {rank}"))
    return whole


def held_part(name: str, tensor: Tensor) -> HeldPart:
    """Return this rank's part of a tensor."""
    _, offset = local_region(tensor)
    local = local_tensor(tensor)
    wide = local.to(torch.promote_types(local.dtype, torch.float32))
    # A copy: the tensor may change before the part is sent.
    return HeldPart(name, tuple(tensor.shape), offset, wide.numpy().copy())


@torch.no_grad()
def set_part(tensor: Tensor, whole: FloatArray) -> None:
    """Write this rank's part of a whole tensor into the tensor that it holds."""
    shape, offset = local_region(tensor)
    region = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    local_tensor(tensor).copy_(torch.from_numpy(np.ascontiguousarray(whole[region])))


def put_together(parts: Iterable[HeldPart]) -> WholeTensors:
    """Return the whole tensors of all parts."""
    whole: dict[str, FloatArray] = {}
    filled: dict[str, npt.NDArray[np.bool_]] = {}
    different: dict[str, float] = {}
    findings = []
    for part in parts:
        if part.name not in filled:
            whole[part.name] = np.empty(part.shape, dtype=part.values.dtype)
            filled[part.name] = np.zeros(part.shape, dtype=bool)
        if part.shape != whole[part.name].shape:
            shapes = f"{whole[part.name].shape} and {part.shape}"
            findings.append(ParameterFinding(part.name, f"ranks have other shapes of it: {shapes}"))
            continue
        values = whole[part.name][part.region]
        is_filled = filled[part.name][part.region]
        first, second = values[is_filled], part.values[is_filled]
        if not np.array_equal(first, second, equal_nan=True):
            largest = np.maximum(np.abs(first - second).max(), different.get(part.name, 0.0))
            different[part.name] = float(largest)
        values[...] = part.values
        is_filled[...] = True
    for name, is_filled in filled.items():
        if name in different:
            findings.append(ParameterFinding(name, f"ranks differ by {different[name]:.1e}"))
        if not is_filled.all():
            findings.append(ParameterFinding(name, f"{(~is_filled).sum()} elements are nowhere"))
    return WholeTensors(whole, findings)
