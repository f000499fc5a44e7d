"""The optimistic dispatch trains what the exact one does, bit by bit, whatever the routers choose."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.parallel.test_expert import EXPERTS as OF_EXPERTS
from tests.parity import CPU, HELD_OUT, Settings, Trainer, tiny, train, whole
from tests.workers import run
from torchllm.data.batch import Batch
from torchllm.facts.parameters import canonical_name
from torchllm.models.experts import Router, Routing
from torchllm.optim.average import WeightAverage
from torchllm.parallel import optimistic
from torchllm.parallel.expert import routed_experts
from torchllm.parallel.optimistic import LEVELS, MARGIN, Padding, capacities, next_level
from torchllm.tools.proof.record import Trained
from torchllm.train.evaluate import evaluate

exhaustive = pytest.mark.exhaustive
EXPERTS: Settings = {**OF_EXPERTS, "model.layers": 3, "training.micro_batch_size": 2}
EP: Settings = {"parallel.dp_shard": 2, "parallel.ep": 2}
OPTIMISTIC: Settings = {"parallel.expert_dispatch": "optimistic"}
SP: Settings = {"parallel.tp": 2, "parallel.sequence_parallel": True}
BALANCED: Settings = {
    **{"model.router_bias": True, "model.router_bias_rate": 0.03, "model.router_score": "sigmoid"},
    **{"model.balance_loss": "global", "model.balance_weight": 1.0, "model.router_z_loss": 0.3},
}
PIPELINE: Settings = {"parallel.pp": 2, "parallel.schedule": "Interleaved1F1B", "model.layers": 4}


def assert_same_bits(found: Any, expected: Any) -> None:
    """Compare arrays and numbers in dicts and lists."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same_bits(found[name], value)
    elif isinstance(expected, Sequence):
        for value, expected_value in zip(found, expected, strict=True):
            assert_same_bits(value, expected_value)
    elif hasattr(expected, "tobytes"):
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


def train_with_nan(settings: Settings) -> Trained | None:
    """Train, with NaN in padded rows: they spread if a product, a result or a gradient has one of these rows."""
    forward = optimistic._Pad.forward

    def with_nan(ctx: Any, rows: Tensor, fill: Tensor, places: Tensor) -> Tensor:
        padded = forward(ctx, rows, fill, places)
        is_padding = torch.ones(len(padded), dtype=torch.bool).index_fill(0, places, False)
        return padded.masked_fill(is_padding.unsqueeze(1), torch.nan)

    with mock.patch.object(optimistic._Pad, "forward", with_nan):
        return train(settings, ragged=True)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {**BALANCED, "recompute.mode": "full", "training.micro_batch_size": 1}),  # four micro batches
        pytest.param(2, {"recompute.mode": "selective", "model.shared_experts": 0}, marks=exhaustive),
        pytest.param(2, {"recompute.mode": "ffn", "model.expert_biases": True}, marks=exhaustive),
        pytest.param(2, {"parallel.zero_stage": 1, "model.mtp_depth": 1}, marks=exhaustive),
        pytest.param(2, {"training.dtype": "bfloat16"}, marks=exhaustive),
        pytest.param(2, {"parallel.expert_chunks": 3, "recompute.mode": "full"}, marks=exhaustive),
        pytest.param(2, {**SP, "parallel.dp_shard": 1}, marks=exhaustive),
        pytest.param(2, {"parallel.dp_shard": 1, "parallel.cp": 2, **BALANCED}, marks=exhaustive),
        pytest.param(4, {**SP, "parallel.ep": 4}, marks=exhaustive),
        pytest.param(4, {"parallel.tp": 2, "parallel.ep": 2}, marks=exhaustive),
        pytest.param(4, {**PIPELINE, **BALANCED}, marks=exhaustive),
        pytest.param(4, {**PIPELINE, "parallel.schedule": "ZBVZeroBubble"}, marks=exhaustive),
        pytest.param(4, {"parallel.dp_replicate": 2, "compile.block": True}, marks=exhaustive),
    ],
)
def test_it_trains_the_same_bits(ranks: int, layout: Settings) -> None:
    """Of experts whose width is a multiple of 8: torch's CPU kernels round the last elements of a tensor, fewer than a
    vector, in another way, and where the buffer is longer other elements are the last."""
    settings = {**EXPERTS, **EP, "training.steps": 3, **layout}
    expected: Trained = run(train, ranks, settings, ragged=True)[0]
    found: Trained = run(train_with_nan, ranks, {**settings, **OPTIMISTIC})[0]
    for what in ("losses", "norms", "gradients", "weights", "tokens_per_expert", "validation_losses"):
        assert_same_bits(getattr(found, what), getattr(expected, what))


def route(step: list[int], router: Router, inputs: object, routing: Routing) -> Routing:
    """Forward hook: in even steps all tokens use the first two experts, then the last two, one rank's in turn."""
    if step[0] % 2:
        return routing
    first = 0 if step[0] % 4 else len(router.weight) - 2
    chosen = torch.arange(first, first + 2).expand_as(routing.experts).contiguous()
    return routing._replace(experts=chosen)


class Adverse(NamedTuple):
    """What a training with an adversarial router did on a rank."""

    results: list[Any]
    """losses, norms, tokens of each expert, skipped steps, the held-out loss"""
    weights: dict[str, Any]
    """whole, and the averages, after all steps"""
    paddings: list[Padding | None]
    runs: list[int]
    """which batches each run of forward and backward had, by their first token, and which step"""


def train_adversely(settings: Settings, steps: int, **constants: int) -> Adverse:
    """Train with a router that sends all tokens elsewhere in every second step. constants: of `optimistic`."""
    with mock.patch.multiple(optimistic, **{"WINDOW": 32, **constants}):
        trainer = Trainer(tiny({**EXPERTS, **settings, "training.steps": steps}))
        average = WeightAverage(trainer.stages, 0.9)
        average.follow(trainer.optimizer)
        average.restart(())
        step, runs = [0], []
        forward_backward = trainer.forward_backward

        def noting(batches: Sequence[Batch], scale: Tensor) -> Tensor:
            runs.append(step[0])
            assert all(
                torch.equal(batch.tokens, mine.tokens)
                for batch, mine in zip(batches, trainer.batches(step[0]), strict=True)
            )
            return forward_backward(batches, scale)

        trainer.step.forward_backward = noting  # type: ignore[assignment]
        for stage in trainer.stages:
            for routed in routed_experts(stage):
                routed.router.register_forward_hook(partial(route, step))
        results, paddings = [], []
        for step[0] in range(1, steps + 1):
            result = trainer.step(step[0], trainer.batches(step[0]))
            assert result.routing is not None
            results.append((result.loss.item(), result.grad_norm.item(), result.routing.tokens_per_expert.tolist()))
            results.append((int(result.skipped), int(result.consecutive)))
            paddings.append(result.padding)
        step[0] = 2  # an evaluation runs once, whatever fits
        results.append(float(evaluate(forward_backward, trainer.batches(HELD_OUT), CPU, trainer.mesh)))
        weights = {canonical_name(name): whole(x) for stage in trainer.stages for name, x in stage.named_parameters()}
        weights |= {canonical_name(name): whole(x) for stage in trainer.stages for name, x in stage.named_buffers()}
        weights |= {name: whole(x) for name, x in (average.tensors | trainer.step.expert_balance.tensors).items()}
        return Adverse(results, weights, paddings, runs)


EACH, ONCE = [1, 2, 2, 3, 4, 4, 5], [1, 2, 2, 3, 4, 5]
"""steps that run if every other one has rows that do not fit, and if only the first of these does"""
TOO_FEW = {"LEVELS": 3}
"""capacities for what the router does"""


@pytest.mark.parametrize(
    ("ranks", "layout", "constants", "runs"),
    [
        (2, BALANCED, {"WINDOW": 1}, EACH),
        # then a capacity for all rows
        pytest.param(2, {"recompute.mode": "full", "training.micro_batch_size": 1}, {}, ONCE, marks=exhaustive),
        pytest.param(2, {}, TOO_FEW, ONCE, marks=exhaustive),  # then the exact dispatch
        pytest.param(4, {"parallel.dp_shard": 4, "parallel.ep": 4}, {"WINDOW": 1}, EACH, marks=exhaustive),
        pytest.param(4, PIPELINE, {"WINDOW": 1}, EACH, marks=exhaustive),
        pytest.param(4, {**SP, "parallel.ep": 2, **BALANCED}, {"WINDOW": 1}, EACH, marks=exhaustive),
    ],
)
def test_an_adversarial_router_loses_no_token(
    ranks: int, layout: Settings, constants: dict[str, int], runs: list[int]
) -> None:
    """A step in which rows do not fit is not applied, and runs again on the same batches: once."""
    settings = {**EP, **layout}
    expected = run(train_adversely, ranks, settings, runs[-1])
    found = run(train_adversely, ranks, {**settings, **OPTIMISTIC}, runs[-1], **constants)
    for mine, its in zip(found, expected, strict=True):
        assert_same_bits((mine.results, mine.weights), (its.results, its.weights))
        assert mine.runs == runs
        assert mine.paddings[-1] == found[0].paddings[-1]
        assert mine.paddings[-1] is not None
        assert mine.paddings[-1].repeated == len(runs) - runs[-1]
        assert (mine.paddings[-1].share > 0) == (constants != TOO_FEW)


def test_capacities_grow_from_the_mean_to_all_rows() -> None:
    sizes = capacities(rows=1024, ranks=4)
    assert (sizes[0], sizes[8], sizes[16], len(sizes)) == (256, 512, 1024, LEVELS)
    assert all(size % 16 == 0 for size in sizes)
    assert capacities(rows=60, ranks=2)[-1] == 60  # all that there are


def test_a_capacity_stays_while_it_fits() -> None:
    exact = LEVELS
    assert next_level(4, exact) == 4 + MARGIN
    assert next_level(4, 4) == 4
    assert next_level(4, 4 + 2 * MARGIN) == 4 + 2 * MARGIN
    assert next_level(4, 5 + 2 * MARGIN) == 4 + MARGIN
    assert next_level(5, 4) == 5 + MARGIN
    assert next_level(LEVELS - 1, exact) == LEVELS - 1
    assert next_level(exact, 4) == exact
