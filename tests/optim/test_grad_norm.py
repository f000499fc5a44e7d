"""The global gradient norm over every axis, against a float64 norm of the whole gradients."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.operations import Operations
from tests.parity import CPU, Settings, Trainer, build, tiny
from tests.workers import run
from torchllm.models.decoder import Decoder
from torchllm.optim.grad_norm import clip, grad_norm, gradients

SHARED: Settings = {
    "parallel.dp_replicate": 2,
    "parallel.tp": 2,
    "parallel.sequence_parallel": True,
    "model.tied_embeddings": True,
    "model.family": "gpt",
    "model.kv_heads": 0,
    "model.vocab": 97,
    "model.layers": 2,
}
"""some gradients are cut, some are held by two ranks, and some by all; the lattice compares the norm of every layout"""


def whole_norm(stages: list[Decoder]) -> float:
    squares = 0.0
    for gradient in gradients(stages):
        if isinstance(gradient, DTensor):
            whole = gradient.full_tensor()
            squares += float(whole.double().square().sum())
    return math.sqrt(squares)


def check_norms(settings: Settings) -> float:
    """Check the norm on this rank, and what clipping leaves of it, against a norm in float64; return it."""
    trainer = Trainer(tiny(settings))
    stages = trainer.stages
    trainer.forward_backward(trainer.batches(1, ragged=True), torch.tensor(1e-2))
    norm = grad_norm(stages, CPU).item()
    expected = whole_norm(stages)
    assert norm == pytest.approx(expected, rel=1e-12)  # both float64 over the same numbers
    for limit in (0.0, 2.0 * expected):  # 0: none
        clip(stages, grad_norm(stages, CPU), limit)
        assert whole_norm(stages) == expected > 0  # untouched to the bit
    clip(stages, grad_norm(stages, CPU), 0.25 * expected)
    assert whole_norm(stages) == pytest.approx(0.25 * expected, rel=1e-5)  # in float32 to the norm / (norm + 1e-6)
    for gradient in gradients(stages):
        gradient.mul_(1e30)
    assert grad_norm(stages, CPU).item() == pytest.approx(0.25e30 * expected, rel=1e-5)  # its squares overflow float32
    return norm


def test_norm_and_clipping_of_shards_and_copies() -> None:
    norms = run(check_norms, 4, SHARED)
    assert norms == norms[:1] * 4  # bitwise the same on all ranks


def three(*sizes: int) -> nn.Module:
    module = nn.Module()
    for index, size in enumerate(sizes):
        module.register_parameter(str(index), nn.Parameter(torch.zeros(size)))
    return module


def test_without_ranks_and_over_several_stages() -> None:
    stages = [three(1, 1), three(1)]
    parameters = [*stages[0].parameters(), *stages[1].parameters()]
    for value, parameter in zip((2.0, 3.0, 6.0), parameters, strict=True):
        parameter.grad = torch.tensor([value])
    assert grad_norm(stages, CPU).item() == 7.0
    clip(stages, grad_norm(stages, CPU), 3.5)
    clipped = [gradient.item() for gradient in gradients(stages)]
    assert clipped == pytest.approx([1.0, 1.5, 3.0], rel=1e-6)


def count_operations(settings: Settings) -> list[int]:
    """Return how many operations the norm of one block's gradients takes, and of those of four."""
    counts = []
    for layers in (1, 4):
        _, stages = build(tiny({**settings, "model.layers": layers}))
        for stage in stages:
            for parameter in stage.parameters():
                parameter.grad = torch.ones_like(parameter)
        with Operations() as operations:
            clip(stages, grad_norm(stages, CPU), 1.0)
        counts.append(len(operations.all))
    return counts


@pytest.mark.parametrize(("ranks", "settings"), [(1, {}), (4, {"parallel.dp_shard": 2, "parallel.tp": 2})])
def test_operations_do_not_grow_with_the_parameters(ranks: int, settings: Settings) -> None:
    for few, many in run(count_operations, ranks, settings):
        assert few == many <= 14
