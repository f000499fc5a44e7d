"""Moments of AdamW and Muon in 8 bits per element, and a float32 scale per block of 32 elements.

A block is divided by its largest magnitude, and each quotient becomes the index of a level: the dynamic map of Dettmers
et al. 2022, arXiv 2110.02861, with seven decades of levels, most of them in the one below 1. Unlike there,

- the index is one of the two nearest levels', drawn at random without bias by the hash of `rounded.py`;
- the second moment has no level 0, which would make its element's update enormous (Li et al. 2023, arXiv 2309.01507);
- blocks lie within the rows of the whole parameter, so that every layout has the same ones: FSDP cuts between rows, and
  a layout that cuts a block is refused. Vectors, which FSDP cuts anywhere, and parameters whose rows are no multiple of
  32 have moments in float32.

torchao's AdamW8bit has other states in each layout: its blocks of 256 run along a rank's shard, over the ends of rows,
and a shard whose size is no multiple of 256 stays float32. It also waits for the device before it skips a step.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchllm.config.errors import UserError
from torchllm.facts.state_blocks import BLOCK, SCALE, has_blocks
from torchllm.optim.rounded import ALL_ROWS, RoundedState, Rows
from torchllm.parallel.initialize import hashed, with_indices
from torchllm.parallel.local_tensor import local_tensor

DTYPES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8, "momentum_buffer": torch.int8}
"""of the codes: indices of levels, less 127 where a moment has a sign"""
DECADES = 7


class Blocks(NamedTuple):
    """This rank's part of a moment."""

    codes: Tensor
    """int8 or uint8 (..., n)"""
    scales: Tensor
    """float32 (..., n / 32)"""
    levels: Tensor
    """float32 (255): quotients of an element and its block's scale, increasing to 1"""

    @property
    def first(self) -> int:
        """The code of the lowest level."""
        return -127 if self.codes.dtype == torch.int8 else 0


class EightBitState(RoundedState):
    """Keeps the moments of an optimizer in 8 bits between its steps; also rounds weights that are bfloat16."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__(stages, torch.float32)
        self.levels: dict[torch.dtype, Tensor] = {}

    def start(self, parameter: Tensor, moments: Sequence[str]) -> dict[str, Tensor]:
        """Return the state of a parameter, as `RoundedState`. Raises UserError if the layout cuts a block."""
        if not has_blocks(parameter.shape):
            return super().start(parameter, moments)
        state = super().start(parameter, ())
        for name in moments:
            dtype = DTYPES[name]
            state[name] = torch.zeros_like(parameter, dtype=dtype)
            state[name + SCALE] = self._scales(parameter)
            if dtype not in self.levels:
                self.levels[dtype] = levels_of(dtype, parameter.device)
        return state

    def _scales(self, parameter: Tensor) -> Tensor:
        """Return scales of 0 for the blocks of a parameter, cut as it is."""
        *rows, length = local_tensor(parameter).shape
        if length % BLOCK:
            raise UserError(
                f'optimizer.state_dtype: "int8" has blocks of {BLOCK} elements, and this layout cuts the rows of '
                f"{self.names[parameter]} {tuple(parameter.shape)} into parts of {length}: set it to "
                '"bfloat16", or take another layout'
            )
        scales = torch.zeros(*rows, length // BLOCK, device=parameter.device)
        if not isinstance(parameter, DTensor):
            return scales
        shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // BLOCK))
        stride = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
        placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(scales, *placements, run_check=False, shape=shape, stride=stride)

    def _blocks(self, state: Mapping[str, Tensor], name: str, rows: Rows) -> Blocks | None:
        """Return the blocks of rows of a moment; None if it has none, or of the weight."""
        if name + SCALE not in state:
            return None
        codes = rows.of(state[name])
        return Blocks(codes, rows.of(state[name + SCALE]), self.levels[codes.dtype])

    def load(self, state: Mapping[str, Tensor], name: str, rows: Rows = ALL_ROWS) -> Tensor:
        """Return rows of a moment as float32."""
        blocks = self._blocks(state, name, rows)
        return super().load(state, name, rows) if blocks is None else numbers_of(blocks)

    def _store(
        self,
        parameter: Tensor,
        state: Mapping[str, Tensor],
        name: str,
        exact: Tensor,
        found_inf: Tensor,
        rows: Rows = ALL_ROWS,
    ) -> None:
        blocks = self._blocks(state, name, rows)
        if blocks is None:
            return super()._store(parameter, state, name, exact, found_inf, rows)
        key = hashed(state["step"].long(), self.key(parameter, name))
        return write_drawn(parameter, exact, blocks, key, found_inf > 0, rows.first)


def numbers_of(blocks: Blocks) -> Tensor:
    """Return the float32 numbers (..., n)."""
    indices = blocks.codes.flatten().int() - blocks.first
    numbers = blocks.levels.index_select(0, indices).view(blocks.codes.shape)
    in_blocks(numbers).mul_(blocks.scales.unsqueeze(-1))
    return numbers


def write_drawn(parameter: Tensor, exact: Tensor, blocks: Blocks, key: Tensor, is_kept: Tensor, first: int = 0) -> None:
    """Write float32 numbers, a part of a tensor that is cut like the parameter, into its blocks.

    key: int64 (), of the stream of random bits. is_kept: bool (); if true, nothing is written. first: as in
    `with_indices`.

    FOOTGUN: `exact` is overwritten.
    """
    scales = divide_by_scales(exact)
    blocks.scales.copy_(torch.where(is_kept, blocks.scales, scales))
    for index, quotients, codes in with_indices(parameter, exact, blocks.codes, first=first):
        chance = hashed(index, key).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)
        codes.copy_(torch.where(is_kept, codes, codes_of(quotients, blocks, chance)))


def write_nearest(exact: Tensor, blocks: Blocks) -> None:
    """Write float32 numbers into blocks, each as the nearest level. FOOTGUN: `exact` is overwritten."""
    blocks.scales.copy_(divide_by_scales(exact))
    blocks.codes.copy_(codes_of(exact, blocks, 0.5))


def divide_by_scales(exact: Tensor) -> Tensor:
    """Divide numbers (..., n) in place by the largest magnitudes of their blocks, and return these, (..., n / 32)."""
    divided = in_blocks(exact)
    largest = torch.maximum(divided.amax(-1), -divided.amin(-1))
    divided.div_(largest.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1))
    return largest


def codes_of(quotients: Tensor, blocks: Blocks, chance: Tensor | float) -> Tensor:
    """Return codes of the level above a quotient if `chance` is under its relative distance from the one below."""
    above = torch.bucketize(quotients, blocks.levels).clamp_(min=1)
    low, high = blocks.levels[above - 1], blocks.levels[above]
    distance = (quotients - low).div_(high - low)  # under 0 below the lowest level
    return above.sub_(1).add_(chance < distance).add_(blocks.first).to(blocks.codes.dtype)


def in_blocks(tensor: Tensor) -> Tensor:
    """Return a view (..., n / 32, 32) of a contiguous tensor (..., n)."""
    return tensor.view(*tensor.shape[:-1], tensor.shape[-1] // BLOCK, BLOCK)


def levels_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the levels of codes of a dtype: from -1 for int8, over 0 for uint8."""
    if dtype == torch.uint8:
        return torch.tensor([10.0**-DECADES, *_decades(2)], device=device)
    positive = _decades(1)
    return torch.tensor([*(-level for level in reversed(positive)), 0.0, *positive], device=device)


def _decades(in_lowest: int) -> list[float]:
    """Return the levels of seven decades up to 1, each with twice the number of the one below."""
    levels = []
    for decade in range(DECADES):
        number, end = in_lowest * 2**decade, 10.0 ** (decade + 1 - DECADES)
        levels += [end * (0.1 + 0.9 * (place + 1) / number) for place in range(number)]
    return levels
