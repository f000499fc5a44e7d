"""One step's forwards and backwards: what they return, what they add to the gradients, what FSDP is told."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.parity import CPU, Settings, build, my_batches, step_batch, tiny, whole
from tests.workers import run
from torchllm.initialize import initialize
from torchllm.layout import canonical_name
from torchllm.models.decoder import build_model
from torchllm.parallel.pipeline import OneStage

SMALL: Settings = {"model.layers": 2, "parallel.dp_shard": 2}  # 4 micro batches on each of 2 ranks
SCALE = 0.25


def two_steps(settings: Settings) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """The loss of a step on this rank, the gradients after it, and after one more without a reset."""
    config = tiny(settings)
    mesh, stages = build(config)
    step = OneStage(stages, config.parallel)
    gradients = []
    for _ in range(2):
        loss = step(my_batches(config, mesh, 1, ragged=True), torch.tensor(SCALE))
        gradients.append({canonical_name(n): whole(p.grad) for n, p in stages[0].named_parameters()})  # type: ignore[arg-type]
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert not loss.requires_grad
    return loss.item(), gradients[0], gradients[1]


@pytest.mark.parametrize("zero_stage", [3, 2, 1, 0])
def test_adds_the_scaled_gradient_of_the_sum(zero_stage: int) -> None:
    results = run(two_steps, 2, {**SMALL, "parallel.zero_stage": zero_stage})
    config = tiny(SMALL)
    model = build_model(config.model)
    initialize([model], config.model, CPU, config.run.seed)
    batch = step_batch(config, 1, ragged=True)
    loss = model(batch.tokens, batch.positions, batch.document_ids, batch.labels) * SCALE
    loss.backward()
    assert sum(result[0] for result in results) == pytest.approx(loss.item(), rel=1e-6)
    _, once, twice = results[0]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        largest = parameter.grad.abs().max().item()
        np.testing.assert_allclose(once[name], parameter.grad.numpy(), rtol=0, atol=1e-5 * largest, err_msg=name)
        np.testing.assert_allclose(twice[name], 2 * once[name], rtol=0, atol=1e-6 * largest, err_msg=name)


def told_to_fsdp(settings: Settings) -> dict[str, list[bool]]:
    config = tiny(settings)
    mesh, stages = build(config)
    told: dict[str, list[bool]] = {}
    names = ("is_last_backward", "requires_gradient_sync", "requires_all_reduce", "reshard_after_backward")
    patches = [
        mock.patch.object(
            FSDPModule, f"set_{name}", lambda module, value, name=name: told.setdefault(name, []).append(value)
        )
        for name in names
    ]
    for patch in patches:
        patch.start()
    try:
        OneStage(stages, config.parallel)(my_batches(config, mesh, 1, ragged=False)[:3], torch.tensor(1.0))
    finally:
        mock.patch.stopall()
    return told


@pytest.mark.parametrize("zero_stage", [3, 2, 1, 0])
def test_what_waits_for_the_last_micro_batch(zero_stage: int) -> None:
    told = run(told_to_fsdp, 2, {**SMALL, "parallel.zero_stage": zero_stage})[0]
    last, always = [False, False, True], [True, True, True]
    assert told == {
        "is_last_backward": last,
        "requires_gradient_sync": always if zero_stage >= 2 else last,
        "requires_all_reduce": last,
        "reshard_after_backward": always if zero_stage == 3 else last,
    }


def test_where_nothing_is_sharded_stage_3_is_stage_1() -> None:
    last = [False, False, True]
    told = run(told_to_fsdp, 2, {"model.layers": 1, "parallel.dp_replicate": 2})[0]
    assert told["requires_gradient_sync"] == told["reshard_after_backward"] == last
    assert run(told_to_fsdp, 1, {"model.layers": 1})[0] == {}  # one rank in float32 has no FSDP
