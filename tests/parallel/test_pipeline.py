"""One step's forwards and backwards, plain and pipelined: what they return and add to the gradients, what is sent."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.parallel.trace import Collective, traced
from tests.parity import CPU, Settings, build, check, my_batches, of_all_stages, step_batch, tiny, whole
from tests.workers import run
from torchllm.config import SCHEDULES
from torchllm.models.decoder import build_model
from torchllm.optim.grad_norm import grad_norm
from torchllm.parallel.initialize import initialize
from torchllm.parallel.pipeline import OneStage, build_forward_backward
from torchllm.spec.parameters import canonical_name

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
    calls: dict[str, list[bool]] = {}
    names = ("is_last_backward", "requires_gradient_sync", "requires_all_reduce", "reshard_after_backward")
    patches = [
        mock.patch.object(
            FSDPModule, f"set_{name}", lambda module, value, name=name: calls.setdefault(name, []).append(value)
        )
        for name in names
    ]
    for patch in patches:
        patch.start()
    try:
        OneStage(stages, config.parallel)(my_batches(config, mesh, 1, ragged=False)[:3], torch.tensor(1.0))
    finally:
        mock.patch.stopall()
    return calls


@pytest.mark.parametrize("zero_stage", [3, 2, 1, 0])
def test_what_waits_for_the_last_micro_batch(zero_stage: int) -> None:
    calls = run(told_to_fsdp, 2, {**SMALL, "parallel.zero_stage": zero_stage})[0]
    last, always = [False, False, True], [True, True, True]
    assert calls == {
        "is_last_backward": last,
        "requires_gradient_sync": always if zero_stage >= 2 else last,
        "requires_all_reduce": last,
        "reshard_after_backward": always if zero_stage == 3 else last,
    }


def test_where_nothing_is_sharded_stage_3_is_stage_1() -> None:
    last = [False, False, True]
    calls = run(told_to_fsdp, 2, {"model.layers": 1, "parallel.dp_replicate": 2})[0]
    assert calls["requires_gradient_sync"] == calls["reshard_after_backward"] == last
    assert run(told_to_fsdp, 1, {"model.layers": 1})[0] == {}  # one rank in float32 has no FSDP


PP2: Settings = {"parallel.pp": 2}
TIED: Settings = {"model.tied_embeddings": True}
HIDDEN = 32 * 64  # elements of one micro batch's hidden states


def parts_of_stages(settings: Settings) -> list[tuple[str, ...]]:
    _, stages = build(tiny(settings))
    return [
        tuple(
            sorted(
                {
                    canonical_name(n).split(".self")[0].split(".mlp")[0].split(".input")[0].split(".post")[0]
                    for n, _ in stage.named_parameters()
                }
            )
        )
        for stage in stages
    ]


EMBED, NORM, HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"
LOOPED = [[(EMBED, "layers.0"), ("layers.2",)], [("layers.1",), ("layers.3", HEAD, NORM)]]
FOLDED = [[(EMBED, "layers.0"), ("layers.3", HEAD, NORM)], [("layers.1",), ("layers.2",)]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"parallel.split": (3, 1)}, [[(EMBED, "layers.0", "layers.1", "layers.2")], [("layers.3", HEAD, NORM)]]),
        ({"parallel.schedule": "Interleaved1F1B"}, LOOPED),
        ({"parallel.schedule": "ZBVZeroBubble"}, FOLDED),
        (
            {"parallel.split": (1, 3), **TIED, "model.family": "gpt", "model.kv_heads": 0},
            [
                [("embed_positions.weight", EMBED, "layers.0")],
                [(EMBED, "layers.1", "layers.2", "layers.3", "norm.bias", NORM)],
            ],
        ),
    ],
    ids=["explicit", "looped", "v-shaped", "tied gpt"],
)
def test_blocks_and_ends_go_to_their_stages(settings: Settings, expected: Any) -> None:
    assert run(parts_of_stages, 2, {**PP2, **settings}) == [[tuple(sorted(s)) for s in rank] for rank in expected]


def split_that_is_printed(settings: Settings) -> list[str]:
    with mock.patch("torchllm.parallel.pipeline.log") as log:
        build(tiny(settings))
    return [call.args[0] % call.args[1:] for call in log.info.call_args_list]


def test_a_large_vocabulary_counts_as_blocks_and_the_split_is_printed() -> None:
    assert run(split_that_is_printed, 2, PP2)[0] == ["pipeline 1F1B, 2 stages of 2+2 blocks"]
    heavy: Settings = {**PP2, "model.vocab": 1024}  # its head weighs 2.6 blocks
    assert run(split_that_is_printed, 2, heavy)[0] == ["pipeline 1F1B, 2 stages of 3+1 blocks"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_the_same_model(schedule: str) -> None:
    check({**PP2, "parallel.dp_shard": 2, "parallel.schedule": schedule}, ragged=True)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_split_backward_with_every_sharding(zero_stage: int) -> None:
    """torch's own split loses gradients where weights are freed after the forward: see test_weight_gradients.py."""
    settings = {**PP2, "parallel.dp_shard": 2, "parallel.zero_stage": zero_stage}
    check({**settings, "parallel.schedule": "ZBVZeroBubble", "recompute.mode": "full"}, ragged=True)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "DualPipeV"])
def test_tied_embeddings_on_two_stages(schedule: str) -> None:
    check({**PP2, **TIED, "parallel.schedule": schedule}, ragged=True)


def test_tied_embeddings_on_two_stages_sharded_both_ways() -> None:
    check({**PP2, **TIED, "parallel.dp_shard": 2, "parallel.tp": 2, "model.vocab": 97}, ragged=True)


def two_pipelined_steps(settings: Settings) -> tuple[float, list[dict[str, Any]], float, list[float]]:
    """Loss of this rank, the gradients after a step and after another one, the norm, losses of forwards alone."""
    config = tiny(settings)
    mesh, stages = build(config)
    step = build_forward_backward(stages, mesh, config.parallel, config.training, torch.float32)
    batches = my_batches(config, mesh, 1, ragged=True)
    loss = step(batches, torch.tensor(SCALE))
    gradients = [of_all_stages(stages, lambda parameter: parameter.grad)]
    norm = grad_norm(stages, CPU).item()
    alone = [step.loss_sum(batch).item() for batch in batches]
    step(batches, torch.tensor(SCALE))
    gradients.append(of_all_stages(stages, lambda parameter: parameter.grad))
    return loss.item(), gradients, norm, alone


@pytest.mark.parametrize(
    "settings",
    [{}, TIED, {"parallel.schedule": "Interleaved1F1B"}, {"parallel.schedule": "ZBVZeroBubble", **TIED}],
    ids=["1f1b", "1f1b-tied", "interleaved", "v-shaped-tied"],
)
def test_the_pipeline_returns_what_the_plain_step_does(settings: Settings) -> None:
    """Its loss, the gradients of a sum (twice as much after two steps), their norm with a tied weight once."""
    results = run(two_pipelined_steps, 2, {**PP2, **settings})
    config = tiny(settings)
    model = build_model(config.model)
    initialize([model], config.model, CPU, config.run.seed)
    batch = step_batch(config, 1, ragged=True)
    loss = model(batch.tokens, batch.positions, batch.document_ids, batch.labels)
    (loss * SCALE).backward()
    assert sorted(bool(result[0]) for result in results) == [False, True]  # one rank has the loss, the other brings 0
    assert sum(result[0] for result in results) == pytest.approx(SCALE * loss.item(), rel=1e-6)
    assert sum(sum(result[3]) for result in results) == pytest.approx(loss.item(), rel=1e-6)
    _, (once, twice), norm, _ = results[0]
    squares = 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        squares += parameter.grad.double().square().sum().item()
        largest = parameter.grad.abs().max().item()
        np.testing.assert_allclose(once[name], parameter.grad.numpy(), rtol=0, atol=1e-5 * largest, err_msg=name)
        np.testing.assert_allclose(twice[name], 2 * once[name], rtol=0, atol=1e-6 * largest, err_msg=name)
    assert norm == pytest.approx(squares**0.5, rel=1e-6)


def sent(settings: Settings, axis: str, kind: str = "") -> list[tuple[str, int]]:
    # one number is torch's vote on its first step: does every stage know its shapes?
    events = [event for event in traced(settings) if isinstance(event, Collective) and event.elements > 1]
    return [(event.kind, event.elements) for event in events if event.axis == axis and kind in ("", event.kind)]


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({}, 2),
        ({"parallel.scatter_gather": False}, 1),
        ({"parallel.sequence_parallel": True}, 2),
        ({"parallel.sequence_parallel": True, "parallel.scatter_gather": False}, 2),
    ],
    ids=["scatter-gather", "whole", "sp", "sp, no scatter-gather"],
)
def test_a_tp_rank_sends_its_part_of_the_hidden_states(settings: Settings, part: int) -> None:
    """8 micro batches: as many sends forward by the first stage and backward by the last."""
    layout = {**PP2, "parallel.tp": 2, "model.layers": 2, **settings}
    assert run(sent, 4, layout, "pp") == [[("send", HIDDEN // part)] * 8] * 4


def test_what_scatter_gather_costs_inside_the_node() -> None:
    """A stage that gets slices gathers them forward, the one that cut them gathers the gradient backward."""
    layout = {**PP2, "parallel.tp": 2, "model.layers": 2}
    gathers = [[event for event in rank if event[0] == "gather"] for rank in run(sent, 4, layout, "tp")]
    assert gathers == [[("gather", HIDDEN)] * 8] * 4
    whole = run(sent, 4, {**layout, "parallel.scatter_gather": False}, "tp")
    assert not [event for rank in whole for event in rank if event[0] == "gather"]


# gathers of a rank with two blocks and an end (three units), 8 micro batches; reductions: once a step a unit
GATHERS = {
    ("1F1B", 3): {0: 8 * (3 + 1), 1: 8 * (3 + 1)},  # each use; before the backward the blocks but the last of a stage
    ("1F1B", 2): {0: 3, 1: 3},
    ("1F1B", 1): {0: 3, 1: 3},
    ("ZBVZeroBubble", 1): {0: 4, 1: 2},
}


def count_fsdp(settings: Settings) -> tuple[int, int]:
    kinds = [kind for kind, _ in sent(settings, "fsdp")]
    return kinds.count("gather"), kinds.count("scatter")


@pytest.mark.parametrize(("schedule", "zero_stage"), GATHERS)
def test_weights_are_gathered_as_zero_stage_says_and_gradients_reduced_once(schedule: str, zero_stage: int) -> None:
    settings = {**PP2, "parallel.dp_shard": 2, "parallel.schedule": schedule, "parallel.zero_stage": zero_stage}
    settings["training.global_batch_size"] = 16  # 8 micro batches on each data-parallel rank
    counts = run(count_fsdp, 4, settings)
    units = {0: 4, 1: 2} if schedule == "ZBVZeroBubble" else {0: 3, 1: 3}
    assert counts == [(GATHERS[schedule, zero_stage][rank // 2], units[rank // 2]) for rank in range(4)]
