"""Frequencies of rotary positions for longer contexts, as YaRN scales them (Peng et al. 2023, arXiv 2309.00071)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchllm.config import Model


def share_unscaled(model: Model, device: torch.device) -> Tensor:
    """Return the share of the unscaled frequency in each of YaRN, (R / 2): section 3.2.

    It is 1 at pairs that turn beta_fast times within the original context, 0 at those that turn beta_slow times, and
    linear in the number of the pair between these; the two ends may be rounded outward (`rope_truncate`).
    """
    first = max(_pair_that_turns(model, model.rope_beta_fast, round_by=math.floor), 0.0)
    last = min(_pair_that_turns(model, model.rope_beta_slow, round_by=math.ceil), model.rotary_width - 1.0)
    if first == last:
        last += 0.001  # as in the authors' code: no division by 0
    pairs = torch.arange(model.rotary_width // 2, device=device, dtype=torch.float32)
    share_scaled = ((pairs - first) / (last - first)).clamp(0.0, 1.0)
    return 1.0 - share_scaled


def _pair_that_turns(model: Model, turns: float, round_by: Callable[[float], int]) -> float:
    """Return the index of the pair of features that makes `turns` turns within the original context.

    round_by: makes it a whole number if the model says so.
    """
    wavelength = model.rope_original_length / turns
    pair = model.rotary_width * math.log(wavelength / (2 * math.pi)) / (2 * math.log(model.rope_theta))
    return round_by(pair) if model.rope_truncate else pair
