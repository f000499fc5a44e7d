"""The global gradient norm over every axis, against a float64 norm of the whole gradients."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.operations import Operations
from tests.parity import Settings, build, rows_of, step_batch, tiny
from tests.workers import run
from torchllm.models.decoder import Decoder
from torchllm.optim.grad_norm import clip, grad_norm, gradients
from torchllm.parallel.forward_backward import OneStage

CPU = torch.device("cpu")
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


class Norms(NamedTuple):
    norm: float
    """by the library, before any clipping"""
    expected: float
    """of the whole gradients in float64, as are the next three"""
    not_clipped: float
    """max_grad_norm = 0"""
    within_the_limit: float
    """max_grad_norm twice the norm"""
    clipped: float
    """max_grad_norm a quarter of the norm"""
    huge: float
    """by the library, of the clipped gradients times 1e30"""


def whole_norm(stages: list[Decoder]) -> float:
    squares = 0.0
    for gradient in gradients(stages):
        if isinstance(gradient, DTensor):
            whole = gradient.full_tensor()
            squares += float(whole.double().square().sum())
    return math.sqrt(squares)


def norms(settings: Settings) -> Norms:
    config = tiny(settings)
    mesh, stages = build(config)
    batch = step_batch(config, 1, ragged=True)
    of_this_rank = rows_of(batch, slice(mesh.data_rank, None, mesh.data_size))
    OneStage(stages, config.parallel)([of_this_rank], torch.tensor(1e-2))
    norm = grad_norm(stages, CPU).item()
    expected = whole_norm(stages)
    clip(stages, grad_norm(stages, CPU), 0.0)
    not_clipped = whole_norm(stages)
    clip(stages, grad_norm(stages, CPU), 2.0 * expected)
    within_the_limit = whole_norm(stages)
    clip(stages, grad_norm(stages, CPU), 0.25 * expected)
    clipped = whole_norm(stages)
    for gradient in gradients(stages):
        gradient.mul_(1e30)
    return Norms(norm, expected, not_clipped, within_the_limit, clipped, grad_norm(stages, CPU).item())


def test_norm_and_clipping_of_shards_and_copies() -> None:
    results, *other_ranks = run(norms, 4, SHARED)
    assert other_ranks == [results] * 3  # bitwise the same on all ranks
    assert results.norm > 0
    assert results.norm == pytest.approx(results.expected, rel=1e-12)  # both float64 over the same numbers
    assert results.not_clipped == results.expected  # untouched to the bit
    assert results.within_the_limit == results.expected
    assert results.clipped == pytest.approx(0.25 * results.expected, rel=1e-5)  # in float32 to the norm / (norm + 1e-6)
    assert results.huge == pytest.approx(0.25e30 * results.expected, rel=1e-5)  # its squares overflow float32


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


def test_tied_parameters_count_once_and_missing_gradients_not_at_all() -> None:
    module: Any = three(1, 4)
    module.again = getattr(module, "0")
    getattr(module, "0").grad = torch.tensor([3.0])
    assert grad_norm([module], CPU).item() == 3.0
    assert grad_norm([three(2)], CPU).item() == 0.0


def test_what_is_not_finite_shows() -> None:
    for bad in (float("nan"), float("inf")):
        module = three(2, 2)
        for parameter in module.parameters():
            parameter.grad = torch.ones(2)
        next(gradients([module]))[1] = bad
        assert not torch.isfinite(grad_norm([module], CPU))


def test_a_zero_gradient_stays_zero() -> None:
    module = three(3)
    next(module.parameters()).grad = torch.zeros(3)
    clip([module], grad_norm([module], CPU), 1.0)
    assert torch.equal(next(gradients([module])), torch.zeros(3))


def operations_of(parameters: int) -> list[Any]:
    module = three(*[3] * parameters)
    for parameter in module.parameters():
        parameter.grad = torch.ones(3)
    with Operations() as operations:
        clip([module], grad_norm([module], CPU), 1.0)
    return operations.all


def test_operations_do_not_grow_with_the_parameters() -> None:
    """64 parameters and 256: an operation per parameter would be 192 more."""
    few, many = operations_of(64), operations_of(256)
    assert few == many
    assert len(many) <= 12, many


def operations_of_sharded_gradients() -> list[int]:
    counts = []
    for layers in (1, 4):
        _, stages = build(tiny({"parallel.dp_shard": 2, "parallel.tp": 2, "model.layers": layers}))
        for stage in stages:
            for parameter in stage.parameters():
                parameter.grad = torch.ones_like(parameter)
        with Operations() as operations:
            clip(stages, grad_norm(stages, CPU), 1.0)
        counts.append(len(operations.all))
    return counts


def test_operations_do_not_grow_with_sharded_parameters() -> None:
    for few, many in run(operations_of_sharded_gradients, 4):
        assert few == many <= 14
