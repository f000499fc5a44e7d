"""One step's forwards and backwards, plain and pipelined: their results, gradients and messages."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parallel.trace import Collective, traced
from tests.parity import FEW, Settings, Trainer, build, check, tiny, whole_gradients
from tests.workers import run
from torchllm.facts.parameters import canonical_name
from torchllm.runtime.heartbeat import heartbeat

SMALL: Settings = {"model.layers": 2, "parallel.dp_shard": 2}  # 4 micro batches on each of 2 ranks
SCALE = 0.25


PP2: Settings = {"parallel.pp": 2}
TIED: Settings = {"model.tied_embeddings": True}
HIDDEN = 32 * 64  # elements of one micro batch's hidden states


def parts_of_stages(settings: Settings) -> list[set[str]]:
    """Return what each stage of this rank has: blocks ("layers.0") and parameters of the ends."""
    _, stages = build(tiny(settings))
    parts_of_each = []
    for stage in stages:
        parts = set()
        for name, _ in stage.named_parameters():
            words = canonical_name(name).split(".")
            parts.add(".".join(words[:2]))  # "layers.0" or "norm.weight"
        parts_of_each.append(parts)
    return parts_of_each


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
    assert run(parts_of_stages, 2, {**PP2, **settings}) == [[set(stage) for stage in rank] for rank in expected]


def split_that_is_printed(settings: Settings) -> list[str]:
    with mock.patch("torchllm.parallel.pipeline.log") as log:
        build(tiny(settings))
    return [call.args[0] % call.args[1:] for call in log.info.call_args_list]


def test_a_large_vocabulary_counts_as_blocks_and_the_split_is_printed() -> None:
    heavy: Settings = {**PP2, "model.vocab": 1024}  # its head weighs 2.6 blocks
    assert run(split_that_is_printed, 2, heavy)[0] == ["pipeline 1F1B, 2 stages of 3+1 blocks"]


def test_split_backward_of_weights_that_are_freed_after_the_forward() -> None:
    """With which torch's own split loses gradients: see test_weight_gradients.py."""
    settings = {**PP2, "parallel.dp_shard": 2, "parallel.zero_stage": 3}
    check({**FEW, **settings, "parallel.schedule": "ZBVZeroBubble", "recompute.mode": "full"}, ragged=True)


@contextlib.contextmanager
def checks_of_torch() -> Iterator[None]:
    """Make torch compare all tensors between stages with the examples that the stages built in the context give it."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(level)


def check_two_steps(settings: Settings) -> tuple[float, float]:
    """Check that a second step without a reset doubles the gradients.

    Returns the loss of a step on this rank, and the sum of its micro batches' losses in forwards alone.
    """
    with checks_of_torch():
        trainer = Trainer(tiny(settings))
    step, batches = trainer.forward_backward, trainer.batches(1, ragged=True)
    with mock.patch.object(dist.ProcessGroup, "recv_anysource", None):  # NCCL has none
        loss = step(batches, torch.tensor(SCALE))
        once = whole_gradients(trainer.stages)
        loss_sums = [step.loss_sum(batch).item() for batch in batches]
    step(batches, torch.tensor(SCALE))
    for name, twice in whole_gradients(trainer.stages).items():
        np.testing.assert_allclose(twice, 2 * once[name], rtol=0, atol=1e-6 * abs(once[name]).max(), err_msg=name)
    return loss.item(), sum(loss_sums)


@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        {**SMALL, "parallel.zero_stage": 1},
        {**PP2, **TIED},
        {**PP2, "parallel.schedule": "Interleaved1F1B"},
        {**PP2, "parallel.schedule": "ZBVZeroBubble", **TIED},
    ],
    ids=["zero3", "zero1", "1f1b-tied", "interleaved", "v-shaped-tied"],
)
def test_a_step_adds_the_gradient_of_the_scaled_sum(settings: Settings) -> None:
    """The lattice has the gradients of one step."""
    losses, loss_sums = zip(*run(check_two_steps, 2, settings), strict=True)
    if "parallel.pp" in settings:
        assert losses.count(0.0) == 1  # one rank has the loss, the other returns 0
    assert sum(losses) == pytest.approx(SCALE * sum(loss_sums), rel=1e-6)


def check_other_sizes(settings: Settings) -> int:
    """Check, on this rank, steps of other sizes after one of [training]'s: as if [training] had these sizes."""
    trainer = Trainer(tiny(settings))
    trainer.forward_backward(trainer.batches(1), torch.tensor(SCALE))
    for sizes in ({"training.global_batch_size": 4}, {"training.sequence_length": 16}, {}):
        other = Trainer(tiny({**settings, **sizes}))
        gradients = []
        for run_here in (trainer, other):
            run_here.optimizer.zero_grad()
            loss = run_here.forward_backward(other.batches(2), torch.tensor(SCALE))
            gradients.append((float(loss), whole_gradients(run_here.stages)))
        (loss, found), (expected_loss, expected) = gradients
        assert loss == expected_loss
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=f"{sizes} {name}")
    return len(expected)


@pytest.mark.parametrize(
    "settings",
    [
        {**PP2, "parallel.schedule": "ZBVZeroBubble", "model.layers": 4},
        pytest.param({**PP2, **TIED}, marks=pytest.mark.exhaustive),
        pytest.param({**PP2, "parallel.schedule": "Interleaved1F1B"}, marks=pytest.mark.exhaustive),
        pytest.param({"parallel.cp": 2, "model.window": 4}, marks=pytest.mark.exhaustive),
    ],
    ids=["v-shaped", "1f1b-tied", "interleaved", "ring"],
)
def test_a_stage_of_the_training_may_have_steps_of_other_sizes(settings: Settings) -> None:
    assert run(check_other_sizes, 2, settings)[0] > 30


def head_recomputes(settings: Settings) -> list[bool]:
    """Return whether this rank's head, if it has one, computes logits again in the backward pass."""
    stages = Trainer(tiny(settings)).stages
    return [stage.lm_head.recomputes_logits for stage in stages if stage.lm_head is not None]


@pytest.mark.parametrize(("schedule", "expected"), [("1F1B", False), ("ZBVZeroBubble", True)])
def test_chunks_of_a_split_backward_are_recomputed(schedule: str, expected: bool) -> None:
    settings = {**PP2, "parallel.schedule": schedule, "training.loss_chunk": 20}
    first, last = run(head_recomputes, 2, settings)
    assert first + last == [expected]


def beats(settings: Settings) -> tuple[int, int]:
    """Return how many beats a step has on this rank, and how many micro batches."""
    trainer = Trainer(tiny(settings))
    batches = trainer.batches(1)
    before = heartbeat().count
    trainer.forward_backward(batches, torch.tensor(SCALE))
    return heartbeat().count - before, len(batches)


@pytest.mark.parametrize("settings", [SMALL, PP2], ids=["plain", "pipeline"])
def test_a_step_shows_progress_with_each_micro_batch(settings: Settings) -> None:
    """A step may take an hour: its launcher must not take it for stuck."""
    for count, micro_batches in run(beats, 2, settings):
        assert count == micro_batches > 1


def sent_by_axis(settings: Settings) -> dict[str, list[tuple[str, int]]]:
    sent: dict[str, list[tuple[str, int]]] = {}
    for event in traced(settings):
        # A single element is torch's vote on its first step: does every stage know its shapes?
        if isinstance(event, Collective) and event.elements > 1:
            sent.setdefault(event.axis, []).append((event.kind, event.elements))
    return sent


@pytest.mark.parametrize(
    ("settings", "part", "gathers"),
    [
        # a stage that gets slices gathers them forward, the one that cut them gathers the gradient backward
        ({}, 2, 8),
        ({"parallel.scatter_gather": False}, 1, 0),
        # it has a part of the sequence already, and gathers it before q, k, v, before gate, up and before the head
        pytest.param({"parallel.sequence_parallel": True}, 2, 0, marks=pytest.mark.exhaustive),
    ],
    ids=["scatter-gather", "whole", "sequence parallel"],
)
def test_a_tp_rank_sends_its_part_of_the_hidden_states(settings: Settings, part: int, gathers: int) -> None:
    """8 micro batches: as many sends forward by the first stage and backward by the last."""
    layout = {**PP2, "parallel.tp": 2, "model.layers": 2, **settings}
    for of_rank in run(sent_by_axis, 4, layout):
        assert of_rank["pp"] == [("send", HIDDEN // part)] * 8
        if "parallel.sequence_parallel" not in settings:
            assert [event for event in of_rank["tp"] if event[0] == "gather"] == [("gather", HIDDEN)] * gathers


def count_fsdp(settings: Settings) -> tuple[int, int]:
    kinds = [kind for kind, _ in sent_by_axis(settings)["fsdp"]]
    return kinds.count("gather"), kinds.count("scatter")


@pytest.mark.parametrize(
    ("schedule", "zero_stage", "gathers", "units"),
    [
        ("1F1B", 3, (8 * (3 + 1), 8 * (3 + 1)), (3, 3)),  # each use; before the backward the blocks but a stage's last
        ("ZBVZeroBubble", 1, (4, 2), (4, 2)),
    ],
)
def test_weights_are_gathered_as_zero_stage_says_and_gradients_reduced_once(
    schedule: str, zero_stage: int, gathers: tuple[int, int], units: tuple[int, int]
) -> None:
    """Of two stages, whose ranks have two blocks and one end or both."""
    settings = {**PP2, "parallel.dp_shard": 2, "parallel.schedule": schedule, "parallel.zero_stage": zero_stage}
    settings["training.global_batch_size"] = 16  # 8 micro batches on each data-parallel rank
    first, last = zip(gathers, units, strict=True)
    assert run(count_fsdp, 4, settings) == [first] * 2 + [last] * 2
