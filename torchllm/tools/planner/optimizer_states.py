"""The effect of the optimizer on a prediction: its bytes per parameter. No torch.

They are a mean over the whole model, also for a pipeline's ends, whose tables Muon leaves to AdamW.
"""

import math
from dataclasses import replace

from torchllm.config import Model, Optimizer, Training
from torchllm.facts.flops import matrices, parameter_count
from torchllm.facts.shapes import parameter_shapes
from torchllm.facts.state_blocks import BLOCK, has_blocks
from torchllm.tools.planner.software import Software

ENTRY = 4.0
"""bytes per parameter of one moment, or of the moving average"""


def with_optimizer_states(software: Software, model: Model, training: Training, optimizer: Optimizer) -> Software:
    """Return torchllm's sizes per parameter for an optimizer. software: has AdamW's sizes, with two moments."""
    entries = 0.0
    if optimizer.name == "sgd":
        entries = -1.0 if optimizer.momentum else -2.0
    if optimizer.name == "muon":  # one moment of each matrix of the blocks
        in_matrices = 0.0
        for view in model.views:
            sizes = matrices(view, layer=0)
            in_matrices += sizes.attention + sizes.ffn
            if view.experts:  # all experts, and not the router
                elements_beyond = 3 * (view.experts - view.top_k) * view.expert_width - view.experts
                in_matrices += model.hidden * elements_beyond
        entries = -in_matrices / parameter_count(model)
    if optimizer.state_dtype == "bfloat16":  # two moments of half the size
        entries = -1.0
    if optimizer.state_dtype == "int8":
        entries = bytes_in_blocks(model) / ENTRY - 2.0
    if optimizer.ema_decay:
        entries += 1.0
    software = replace(software, states=software.states + ENTRY * entries)
    if training.weights_dtype == "bfloat16":
        software = replace(software, states=software.states - 2.0, shards=software.shards - 2.0, kept=2.0)
    return software


def bytes_in_blocks(model: Model) -> float:
    """Return the bytes per parameter of two moments in 8 bits; of parameters without blocks they are float32."""
    shapes = parameter_shapes(model).values()
    in_blocks = sum(math.prod(shape) for shape in shapes if has_blocks(shape)) / parameter_count(model)
    return 2 * (in_blocks * (1 + 4 / BLOCK) + (1 - in_blocks) * 4)
