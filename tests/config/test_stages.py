"""Which steps a stage of the training has, and what no layout can share, named before a step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchllm.config import Config, Data, MixtureStage, Parallel, Training
from torchllm.config.stages import Progress, span_of, spans_of
from torchllm.tools.config.checks import problems
from torchllm.tools.config.degrees import layout_problems
from torchllm.tools.proof.layouts import with_settings

TRAINING = Training(steps=20, micro_batch_size=2, global_batch_size=8, sequence_length=32)
STAGES = (
    MixtureStage(until_tokens=1000, global_batch_size=4, sequence_length=16),  # 64 tokens a step: 16 steps
    MixtureStage(until=18),
    MixtureStage(sequence_length=64),
)
CONFIG = Config(data=Data(stage=STAGES), training=TRAINING, parallel=Parallel(dp_shard=1))


def test_a_stage_ends_with_the_first_step_that_reaches_its_tokens() -> None:
    spans = spans_of(CONFIG.data, CONFIG.training)
    assert [span.before for span in spans] == [Progress(), Progress(16, 64, 1024), Progress(18, 80, 1536)]
    assert [span.until for span in spans] == [16, 18, 0]
    sizes = [(span.training.global_batch_size, span.training.sequence_length) for span in spans]
    assert sizes == [(4, 16), (8, 32), (8, 64)]
    assert [span_of(spans, step).key[-1] for step in (0, 1, 16, 17, 18, 19)] == ["0", "0", "0", "1", "1", "2"]
    tokens = [span_of(spans, step).after(step).tokens for step in (0, 1, 16, 17, 18, 20)]
    assert tokens == [0, 64, 1024, 1280, 1536, 2560]
    exact = replace(CONFIG.data, stage=(MixtureStage(until_tokens=512), MixtureStage()))
    assert spans_of(exact, CONFIG.training)[0].until == 2
    (plain,) = spans_of(Data(), TRAINING)
    assert (plain.key, plain.training, plain.after(20).tokens) == ("training", TRAINING, 20 * 8 * 32)
    assert CONFIG.data.lengths(32) == {
        32: "training.sequence_length",
        16: "data.stage.0.sequence_length",
        64: "data.stage.2.sequence_length",
    }


def wrong(settings: dict[str, Any], world: int = 1) -> dict[str, str]:
    return {problem.key: problem.message for problem in problems(with_settings(CONFIG, settings), world)}


@pytest.mark.parametrize(
    ("stages", "key", "message"),
    [
        ([MixtureStage(until=3, until_tokens=9), MixtureStage()], "0.until", "both end the stage"),
        (
            [MixtureStage(until=4), MixtureStage(until_tokens=1024), MixtureStage()],
            "1.until_tokens",
            "= 1024 tokens are read by step 4, which is not after step 4",
        ),
        ([MixtureStage(until_tokens=4864)], "0.until_tokens", "by step 19, which is before the last step, 20"),
        ([MixtureStage(weights=(1.0, 1.0))], "0.weights", "give one for each of 1 sources"),
    ],
)
def test_an_end_that_no_stage_can_have_is_named(stages: list[MixtureStage], key: str, message: str) -> None:
    found = wrong({"data.stage": tuple(stages)})
    assert list(found) == [f"data.stage.{key}"]
    assert message in found[f"data.stage.{key}"]
    assert not wrong({})
    assert not wrong({"data.stage": (MixtureStage(until_tokens=4865),)})


def test_a_resumed_run_may_be_past_a_stage_that_ends_at_a_step(tmp_path: Path) -> None:
    """The steps of a past stage that ended by tokens had another batch; the loader knows them from the checkpoint."""
    stages = (MixtureStage(until_tokens=1024), MixtureStage(until=5, global_batch_size=4), MixtureStage())
    smaller: dict[str, Any] = {"data.stage": stages, "training.global_batch_size": 2, "run.folder": str(tmp_path)}
    refused = {"data.stage.1.until": "= 5 is not after step 16, where the stage begins"}
    assert wrong(smaller) == refused
    (tmp_path / "checkpoints" / "step-00000008").mkdir(parents=True)
    assert wrong(smaller) == {}
    assert wrong({**smaller, "checkpoint.resume": "none"}) == refused
    assert wrong({**smaller, "data.stage": (MixtureStage(until=6), *stages[1:])}) != {}


@pytest.mark.parametrize(
    ("settings", "world", "key", "message"),
    [
        ({"parallel.dp_shard": 4}, 4, "0.global_batch_size", "4 is no multiple of micro_batch_size 2 x 4"),
        ({"parallel.pp": 4, "model.layers": 4}, 4, "0.global_batch_size", "1F1B on 4 pipeline ranks needs at least 4"),
        (
            {"data.stage": (MixtureStage(until=9), MixtureStage(sequence_length=36)), "parallel.cp": 4},
            4,
            "1.sequence_length",
            "parallel.cp: training.sequence_length = 36 does not divide into 8",
        ),
        (
            {"data.stage": (MixtureStage(sequence_length=36, global_batch_size=4),)}
            | {"parallel.tp": 8, "parallel.sequence_parallel": True},
            8,
            "0.sequence_length",
            "parallel.tp: 8 does not divide training.sequence_length = 36",
        ),
        ({"parallel.cp": 2, "model.window": 20}, 2, "0.sequence_length", "only one kind is longer than model.window"),
        (
            {"data.stage": (MixtureStage(sequence_length=128),), "model.family": "gpt", "model.kv_heads": 0}
            | {"model.max_sequence_length": 64},
            1,
            "0.sequence_length",
            "128 is over model.max_sequence_length 64",
        ),
        ({"compile.graphs": True}, 1, "compile.graphs", "a stage has steps of another size"),
    ],
)
def test_a_stage_that_the_layout_cannot_share_is_named(
    settings: dict[str, Any], world: int, key: str, message: str
) -> None:
    key = key if key.startswith("compile") else f"data.stage.{key}"
    found = wrong(settings, world)
    assert message in found.get(key, ""), found
    assert message not in str(wrong({**settings, "data.stage": ()}, world))


def test_experts_with_buffers_of_one_size_are_refused_other_lengths() -> None:
    optimistic = {
        "model.experts": 4,
        "parallel.ep": 2,
        "parallel.dp_shard": 2,
        "parallel.expert_dispatch": "optimistic",
    }
    found = [problem.key for problem in layout_problems(with_settings(CONFIG, optimistic), 2)]
    assert found == ["data.stage.0.sequence_length", "data.stage.2.sequence_length"]
    one_length = (MixtureStage(until=5, global_batch_size=4), MixtureStage())
    assert not layout_problems(with_settings(CONFIG, {**optimistic, "data.stage": one_length}), 2)
