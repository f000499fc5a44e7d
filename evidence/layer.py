"""Predict one block on its tensor-parallel ranks, as Korthikanti et al. 2022 timed it (arXiv 2205.05198, table 4).

No torch.
"""

from torchllm.tools.planner.case import Case
from torchllm.tools.planner.parameters import ONE_BLOCK
from torchllm.tools.planner.stage import stage_cost


def layer_seconds(case: Case) -> tuple[float, float]:
    """Return the seconds of one micro batch, forward and backward with recomputation, without embedding and head."""
    times = stage_cost(case, ONE_BLOCK).times
    backward = times.input_gradient + times.weight_gradient
    return times.forward, backward
