"""Initial values of recurrences, as Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), made as in `initialize.py`."""

import math

from torch import Tensor

from torchllm.parallel.initialize import uniform


def decay(index: Tensor, key: int) -> Tensor:
    """Return the index-th logarithms of uniform numbers from 0 to 16: int64 -> float64, of any shape."""
    return uniform(index, key).mul_(16.0).log_()


def time_step(index: Tensor, key: int) -> Tensor:
    """Return numbers whose softplus is from 0.001 to 0.1, the logarithm of that uniform: as `decay`."""
    softplus = uniform(index, key).mul_(math.log(100.0)).add_(math.log(0.001)).exp_()
    return softplus.expm1_().log_()
