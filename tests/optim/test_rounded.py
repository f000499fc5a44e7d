"""Moments in bfloat16: without bias, equal in every layout, and bitwise the same after a resume."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.test_optimizer import MODEL, plain, take_steps
from tests.parity import build, whole
from tests.workers import run
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.state import optimizer_tensors
from torchllm.config import Checkpoint, Config, Model, Optimizer, Parallel, Run
from torchllm.config.applied_keys import new_training
from torchllm.facts.parameters import canonical_name
from torchllm.models.decoder import Decoder
from torchllm.optim.optimizer import apply_if_finite, build_optimizer
from torchllm.optim.rounded import RoundedAdamW, RoundedState, round_stochastically

ROUNDED = Optimizer(learning_rate=0.1, beta2=0.999, weight_decay=0.3, state_dtype="bfloat16")
FLOAT32_WEIGHTS = ("float32", "float32")
LAYOUTS = {
    "fsdp": Parallel(dp_shard=4),
    "tp": Parallel(dp_shard=2, tp=2),
    "pipeline": Parallel(pp=2, dp_shard=2, schedule="1F1B"),
    "replicated": Parallel(dp_replicate=2, dp_shard=2),
}


def rounded(exact: Tensor, step: int, key: int = 7) -> Tensor:
    target = torch.empty_like(exact, dtype=torch.bfloat16)
    round_stochastically(exact, exact, target, key, torch.tensor(float(step)))
    return target.float()


def test_the_mean_of_many_roundings_is_the_number() -> None:
    for number in (1.001, -0.3, 3e-20):
        roundings = rounded(torch.full((100, 100), number), step=1)
        exact = float(torch.tensor(number))
        low, high = float(roundings.min()), float(roundings.max())
        assert low < exact < high
        assert set(roundings.unique().tolist()) == {low, high}
        # a share p of 10,000 has a standard deviation of at most 0.005
        assert abs(float(roundings.double().mean()) - exact) < 4 * 0.005 * (high - low)


def test_bits_differ_by_step_and_key_and_a_bfloat16_stays() -> None:
    exact = torch.full((64,), 1.003)
    assert not torch.equal(rounded(exact, 1), rounded(exact, 2))
    assert not torch.equal(rounded(exact, 1), rounded(exact, 1, key=8))
    assert torch.equal(rounded(exact, 1), rounded(exact, 1))
    values = torch.randn(1000).bfloat16().float()
    assert torch.equal(rounded(values, 1), values)


def test_small_updates_are_not_lost() -> None:
    """1,000 additions of a thousandth of half a bfloat16's distance: the nearest stays at 1."""
    nearest, stochastic = torch.ones(1000).bfloat16(), torch.ones(1000)
    for step in range(1000):
        nearest = (nearest.float() + 1e-3).bfloat16()
        stochastic = rounded(stochastic + 1e-3, step)
    assert torch.equal(nearest.float(), torch.ones(1000))
    # each of the steps of 2^-7 is a coin: a deviation of at most sqrt(2^-7) = 0.09 per element, 0.003 of the mean
    assert float(stochastic.mean()) == pytest.approx(2.0, abs=0.012)


def named(stages: Sequence[Decoder]) -> dict[str, Tensor]:
    return {canonical_name(name): value for stage in stages for name, value in stage.named_parameters()}


def trained(parallel: Parallel) -> dict[str, Any]:
    """Return the whole weights and moments after three steps."""
    _, stages = build(Config(model=replace(MODEL, layers=2), parallel=parallel))
    optimizer = build_optimizer(stages, ROUNDED)
    take_steps(stages, optimizer, range(3))
    tensors = named(stages) | optimizer_tensors(stages, optimizer)
    return {name: whole(tensor.float()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_rounds_equally(name: str) -> None:
    model = plain(replace(MODEL, layers=2))
    optimizer = build_optimizer([model], ROUNDED)
    take_steps([model], optimizer, range(3))
    expected = named([model]) | optimizer_tensors([model], optimizer)
    of_ranks = run(trained, 4, LAYOUTS[name])
    got = {key: value for of_rank in of_ranks for key, value in of_rank.items()}
    assert got.keys() == expected.keys()
    for key, value in got.items():
        # torch's fused kernel rounds the last elements of a shard otherwise: 6e-8 of a value, in which a rounding
        # differs once in 10,000; another stream would change half of the moments by 4e-3 of their value
        torch.testing.assert_close(
            torch.from_numpy(value), expected[key].detach().float(), rtol=1e-6, atol=1e-6, msg=key
        )


def resumed_as(
    before: Optimizer, after: Optimizer, folder: Path, model: Model = MODEL, dtypes: Sequence[Any] = FLOAT32_WEIGHTS
) -> list[tuple[Decoder, torch.optim.Optimizer]]:
    """Save after two steps with the first settings, and resume with the others; return both models with their
    optimizers. dtypes: of the weights."""
    results: list[tuple[Decoder, torch.optim.Optimizer]] = []
    for settings, dtype in zip((before, after), dtypes, strict=True):
        decoder = plain(model, dtype)
        optimizer = build_optimizer([decoder], settings)
        checkpoints = Checkpointer(Checkpoint(), folder, [decoder], optimizer)
        if not results:
            take_steps([decoder], optimizer, range(2))
            checkpoints.save(2, {})
        else:
            assert checkpoints.resume() is not None
        checkpoints.close()
        results.append((decoder, optimizer))
    return results


def test_a_run_may_change_the_dtype_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    pair = (ROUNDED, replace(ROUNDED, state_dtype="float32"))
    for before, after in (pair, pair[::-1]):
        resumed = resumed_as(before, after, tmp_path / after.state_dtype)
        assert f"torch.{before.state_dtype} to torch.{after.state_dtype}" in caplog.text
        states = [optimizer_tensors([model], optimizer) for model, optimizer in resumed]
        for key, value in states[0].items():
            assert torch.equal(value.to(states[1][key].dtype), states[1][key]), key


def test_small_updates_of_weights_are_not_lost() -> None:
    """A rate of a tenth of half a bfloat16's distance, 400 times: the nearest would stay where it starts."""
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(1000, 1, bias=False, dtype=dtype)
        torch.nn.init.ones_(layer.weight)
        group = {"params": [layer.weight], "learning_rate_factor": 1.0, "weight_decay": 0.0}
        storage = RoundedState([layer], torch.float32)
        optimizer = RoundedAdamW([group], replace(ROUNDED, state_dtype="float32"), storage)
        for _ in range(400):
            layer.weight.grad = torch.full_like(layer.weight, 0.5)
            apply_if_finite(optimizer, 2e-4, torch.tensor(True))
        ends.append(float(layer.weight.detach().double().mean()))
    assert ends[0] == pytest.approx(1 - 400 * 2e-4, abs=1e-4)
    # a step of 2^-8 is a coin: after 20 of them a deviation of sqrt(20) 2^-8 = 0.017 per weight, 0.0006 of the mean
    assert ends[1] == pytest.approx(ends[0], abs=0.0024)


def test_a_run_may_change_the_dtype_of_its_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    dtypes, exact = ("float32", "bfloat16"), replace(ROUNDED, state_dtype="float32")
    for before, after in (dtypes, dtypes[::-1]):
        resumed = resumed_as(exact, exact, tmp_path / after, dtypes=(before, after))
        assert f"torch.{before} to torch.{after}" in caplog.text
        models = [named([model]) for model, _ in resumed]
        for name, weight in models[0].items():
            assert torch.equal(weight.to(models[1][name].dtype), models[1][name]), name


def test_bits_depend_on_the_seed_of_the_run() -> None:
    moments = []
    for seed in (0, 0, 1):
        model = plain()
        with new_training(Config(run=Run(seed=seed))):
            optimizer = build_optimizer([model], ROUNDED)
        take_steps([model], optimizer, range(2))
        moments.append(optimizer_tensors([model], optimizer)["optimizer.embed_tokens.weight.exp_avg"])
    assert torch.equal(moments[0], moments[1])
    assert not torch.equal(moments[0], moments[2])
