"""The effect of the optimizer on a prediction: its bytes per parameter, and those that rounding moves. No torch.

They are a mean over the whole model, also for a pipeline's ends, whose tables Muon leaves to AdamW.
"""

import math
from dataclasses import replace
from functools import lru_cache

from torchllm.config import Model, Optimizer, Training
from torchllm.facts.flops import parameter_count
from torchllm.facts.parameters import rule_of
from torchllm.facts.shapes import parameter_shapes
from torchllm.facts.state_blocks import BLOCK, has_blocks
from torchllm.tools.planner.software import Software

ENTRY = 4.0
"""bytes per parameter of one moment, or of the moving average"""
ROUNDED = {"float32": 0.0, "bfloat16": 350.0, "int8": 548.0}
"""bytes that the operations of a step read and write to load and to round a number that is stored in a dtype, most of
them for random bits. They are counted, not measured: pieces of them may stay in a GPU's cache."""


def with_optimizer_states(software: Software, model: Model, training: Training, optimizer: Optimizer) -> Software:
    """Return torchllm's sizes per parameter for an optimizer. software: has AdamW's sizes, with two moments."""
    moments = 0.0  # of the device
    if not optimizer.offloads:
        moments = bytes_of_moments(model, optimizer.name, optimizer.momentum > 0, optimizer.state_dtype)
    entries = 1.0 if optimizer.ema_decay and not optimizer.offloads_average else 0.0
    rounded = bytes_of_moments(model, optimizer.name, optimizer.momentum > 0, "float32") / ENTRY
    rounding = rounded * ROUNDED[optimizer.state_dtype] + ROUNDED[training.weights_dtype]
    states = software.states + moments - 2 * ENTRY + ENTRY * entries
    software = replace(software, states=states, rounding=rounding)
    if training.weights_dtype == "bfloat16":
        software = replace(software, states=software.states - 2.0, shards=software.shards - 2.0, kept=2.0)
    return software


@lru_cache
def bytes_of_moments(model: Model, optimizer: str, has_momentum: bool, state_dtype: str) -> float:
    """Return the bytes per parameter of an optimizer's moments. has_momentum: of SGD."""
    total = 0.0
    for name, shape in parameter_shapes(model).items():
        moments = 2
        if optimizer == "sgd":
            moments = int(has_momentum)
        elif optimizer == "muon" and rule_of(name).role == "matrix":
            moments = 1
        entry = {"float32": ENTRY, "bfloat16": 2.0}.get(state_dtype, ENTRY)
        if state_dtype == "int8" and has_blocks(shape):
            entry = 1.0 + ENTRY / BLOCK
        total += moments * entry * math.prod(shape)
    return total / parameter_count(model)
