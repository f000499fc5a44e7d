"""Moments of a checkpoint that are in 8 bits where this run's are not, or the reverse: read as stored, and converted.

So a run may change `optimizer.state_dtype`. The moments are in the memory of the host until they are converted.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from torchllm.checkpoint.agreement import Group, first_problem, log_on_first
from torchllm.checkpoint.index import Region, TensorEntry
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.checkpoint.state import Part
from torchllm.facts.state_blocks import BLOCK, SCALE
from torchllm.optim.eightbit import Blocks, levels_of, numbers_of, write_nearest


@contextmanager
def read_as_stored(
    group: Group, parts: Mapping[str, Part], stored: Mapping[str, TensorEntry]
) -> Iterator[dict[str, Part]]:
    """Return a context with the parts to read; at its end moments that were read in another form are converted.

    Raises CheckpointError on all ranks if the layout cuts blocks of the checkpoint.
    """
    filled, problem = parts_as_stored(parts, stored)
    if problem := first_problem(group, problem):
        raise CheckpointError(problem)
    yield filled
    convert_moments(group, parts, filled)


def parts_as_stored(parts: Mapping[str, Part], stored: Mapping[str, TensorEntry]) -> tuple[dict[str, Part], str]:
    """Return `parts` with others, on the host, for the moments that the checkpoint has in another form, and a problem.

    The problem: "", or that this rank's part cuts a block of the checkpoint.
    """
    filled = dict(parts)
    problem = ""
    for key in moments_to_convert(parts, stored):
        part = parts[key]
        dtype = getattr(torch, stored[key].dtype)
        filled[key] = part._replace(local=torch.empty_like(part.local, dtype=dtype, device="cpu"))
        if key + SCALE in parts:
            del filled[key + SCALE]
            continue
        (*_, offset), (*_, size) = part.region
        if offset % BLOCK or size % BLOCK:
            problem = (
                f"{key} is in blocks of {BLOCK} elements, which this layout cuts: resume on another layout, "
                "as the one of the run that saved it"
            )
        shape, sharding = in_scales(part.region.size), part.sharding
        filled[key + SCALE] = Part(
            torch.empty(shape),
            Region(in_scales(part.region.offset), shape),
            sharding._replace(shape=in_scales(sharding.shape)),
        )
    return filled, problem


def convert_moments(group: Group, parts: Mapping[str, Part], filled: Mapping[str, Part]) -> None:
    """Fill the moments of `parts` that `parts_as_stored` replaced, from the replacements, which are filled."""
    converted = [key for key, part in filled.items() if key in parts and part is not parts[key]]
    for key in converted:
        target, source = parts[key].local, filled[key].local
        if key + SCALE in parts:
            blocks = _blocks(target, parts[key + SCALE].local)
            write_nearest(source.to(target.device, torch.float32, copy=True), blocks)
        else:
            target.copy_(numbers_of(_blocks(source, filled[key + SCALE].local)))
    if converted:
        to = "blocks of 8 bits" if converted[0] + SCALE in parts else "this run's dtype, from blocks of 8 bits"
        log_on_first(group, f"{len(converted)} moments are converted to {to}: {converted[0]}")


def moments_to_convert(parts: Mapping[str, Part], stored: Mapping[str, TensorEntry]) -> list[str]:
    """Return the keys of moments that are in blocks either here or in the checkpoint."""
    return [key for key in parts if key in stored and (key + SCALE in parts) != (key + SCALE in stored)]


def in_scales(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape or an offset of scales from one of elements."""
    return (*numbers[:-1], numbers[-1] // BLOCK)


def _blocks(codes: Tensor, scales: Tensor) -> Blocks:
    return Blocks(codes, scales, levels_of(codes.dtype, codes.device))
