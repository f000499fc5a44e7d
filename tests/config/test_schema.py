"""The checks between keys, the degrees, and the docstrings of the settings."""

from dataclasses import fields, replace
from typing import Any

import pytest

from torchllm.config import Config, MixtureStage, Parallel, Source, gradient_accumulation
from torchllm.tools.config.checks import problems, resolve_degrees
from torchllm.tools.config.help import field_docs
from torchllm.tools.config.read import config_error

pytestmark = pytest.mark.quick


def change(**keys: Any) -> Config:
    """A config of one rank with `section__key=value` changed."""
    config = replace(Config(), parallel=Parallel(dp_shard=1))
    for name, value in keys.items():
        section, key = name.split("__")
        changed: Any = {section: replace(getattr(config, section), **{key: value})}
        config = replace(config, **changed)
    return config


def test_the_defaults_are_right_on_any_number_of_ranks() -> None:
    for world in (1, 2, 4, 8):
        assert list(problems(Config(), world)) == []


ULYSSES = {"parallel__cp_method": "ulysses"}
ROWWISE = {"float8__recipe": "rowwise"}
FIVE = {"training__global_batch_size": 5, "training__micro_batch_size": 1}
HEADERLESS = (Source(kind="nanogpt", path="a"),)
PROBLEMS: list[tuple[dict[str, Any], int | None, list[str]]] = [
    ({"model__heads": 3}, None, ["model.heads"]),
    ({"model__heads": 3, "model__head_dim": 2}, None, []),
    ({"model__kv_heads": 3}, None, ["model.kv_heads"]),
    ({"model__head_dim": 3}, None, ["model.head_dim"]),
    ({"model__head_dim": 3, "model__family": "gpt"}, None, []),
    ({"training__sequence_length": 4096}, None, []),
    ({"training__sequence_length": 4096, "model__family": "gpt"}, None, ["training.sequence_length"]),
    (
        {"model__rope_scaling_factor": 8.0, "model__rope_high_frequency_factor": 1.0},
        None,
        ["model.rope_high_frequency_factor"],
    ),
    (
        {"model__rope_scaling": "yarn", "model__rope_scaling_factor": 8.0, "model__rope_beta_fast": 1.0},
        None,
        ["model.rope_beta_fast"],
    ),
    ({"parallel__cp": 4, "model__window": 2047}, None, ["parallel.cp_method"]),  # sequences of 2048 tokens
    ({"parallel__cp": 4, "model__window": 2048}, None, []),
    ({"parallel__cp": 4, "model__window": 2047, **ULYSSES}, None, []),
    ({"model__attention": "flash", "data__document_mask": True}, None, ["model.attention"]),
    ({"compile__norm": True, "model__family": "gpt"}, None, ["compile.norm"]),
    ({"compile__norm": True}, None, []),
    ({"schedule__warmup_steps": 1001}, None, ["schedule.warmup_steps"]),
    (
        {"schedule__name": "wsd", "schedule__warmup_steps": 1, "schedule__decay_steps": 1000},
        None,
        ["schedule.decay_steps"],
    ),
    ({"recompute__mode": "segment", "recompute__k": 5}, None, ["recompute.k"]),
    ({"recompute__mode": "full", "recompute__k": 2}, None, ["recompute.k"]),
    ({"evaluate__interval": 1, "data__validation_fraction": 0.0}, None, ["evaluate.interval"]),
    ({"parallel__sequence_parallel": True}, None, []),  # tests/config/test_inert.py
    ({"parallel__sequence_parallel": True, "parallel__tp": 8, "training__sequence_length": 12}, None, ["parallel.tp"]),
    ({"parallel__tp": 3}, None, ["parallel.tp"] * 3),  # heads, kv_heads, ffn
    ({"parallel__tp": 4, "model__kv_heads": 2}, None, ["parallel.tp"]),
    ({"parallel__tp": 2, "model__vocab": 1}, None, ["parallel.tp"]),
    ({"parallel__pp": 2}, None, []),
    ({"parallel__cp": 4}, None, []),
    ({"parallel__cp": 4, "training__sequence_length": 12}, None, ["parallel.cp"]),  # not into 8 pieces
    ({"parallel__cp": 4, "training__sequence_length": 12, **ULYSSES}, None, []),
    ({"parallel__cp": 4, "training__sequence_length": 6, **ULYSSES}, None, ["parallel.cp"]),
    ({"parallel__cp": 4, "model__kv_heads": 2}, None, []),
    ({"parallel__cp": 4, "model__kv_heads": 2, **ULYSSES}, None, ["parallel.cp"]),
    ({"parallel__cp": 4, "parallel__tp": 4, **ULYSSES}, None, ["parallel.cp"]),  # 8 heads / tp 4
    ({"parallel__cp": 2, "parallel__tp": 4, **ULYSSES}, None, []),
    ({"model__attention": "flash", "training__dtype": "float32"}, None, ["training.dtype"]),
    ({"model__attention": "flash", "training__dtype": "bfloat16"}, None, []),
    ({**ROWWISE, "parallel__tp": 2}, None, []),
    ({**ROWWISE, "training__dtype": "float32"}, None, ["training.dtype"]),
    ({**ROWWISE, "model__ffn": 1032}, None, ["float8.recipe"]),
    ({**ROWWISE, "model__hidden": 264, "model__head_dim": 32}, None, ["float8.recipe"]),
    ({**ROWWISE, "model__kv_heads": 4, "model__head_dim": 12, "parallel__tp": 4}, None, ["float8.recipe"] * 2),
    ({**ROWWISE, "model__kv_heads": 4, "parallel__tp": 4}, None, []),
    ({**ROWWISE, "training__sequence_length": 24}, None, ["training.micro_batch_size"]),
    ({**ROWWISE, "training__sequence_length": 24, "training__micro_batch_size": 2}, None, []),
    ({"float8__recipe": "rowwise_with_gw_hp", "training__sequence_length": 24}, None, []),
    ({**ROWWISE, "training__sequence_length": 32, "parallel__cp": 4}, None, ["training.micro_batch_size"]),
    ({**ROWWISE, "parallel__pp": 2, "parallel__schedule": "ZBVZeroBubble"}, None, ["parallel.schedule"]),
    ({**ROWWISE, "parallel__pp": 2, "parallel__schedule": "Interleaved1F1B"}, None, []),
    ({"parallel__cp": 2, "model__attention": "flash"}, None, ["model.attention"]),
    ({"parallel__cp": 2, "model__attention": "flex"}, None, ["model.attention"]),
    ({"parallel__cp": 2, "model__attention": "flex", **ULYSSES}, None, []),
    ({"parallel__cp": 2, "compile__block": True, "recompute__mode": "none"}, None, []),
    ({"parallel__cp": 2, "compile__block": True, "recompute__mode": "segment"}, None, []),
    ({"parallel__cp": 2, "compile__block": True, "recompute__mode": "ffn"}, None, []),
    ({"parallel__cp": 2, "compile__block": True, "recompute__mode": "full"}, None, ["compile.block"]),
    ({"parallel__cp": 2, "compile__block": True, "recompute__mode": "every_k"}, None, ["compile.block"]),
    ({"parallel__cp": 2, "compile__block": True, "recompute__mode": "selective"}, None, ["compile.block"]),
    *(
        ({"parallel__pp": 2, "parallel__schedule": schedule, "compile__block": True}, None, ["compile.block"])
        for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    ),
    ({"parallel__pp": 2, "parallel__schedule": "Interleaved1F1B", "compile__block": True}, None, []),
    *(
        ({"parallel__pp": 2, "parallel__schedule": schedule, **FIVE}, None, ["training.global_batch_size"])
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble")  # 5 are not 2 equal rounds
    ),
    ({"parallel__pp": 2, "parallel__schedule": "ZBVZeroBubble", **FIVE}, None, []),
    ({"parallel__tp": 2, "parallel__cp": 2, "model__vocab": 97}, None, []),
    ({"parallel__tp": 2, "parallel__cp": 4, "model__vocab": 97}, None, ["model.vocab"]),
    ({"parallel__tp": 2, "parallel__dp_shard": 2, "parallel__cp": 2, "model__vocab": 97}, None, ["model.vocab"]),
    ({"training__micro_batch_size": 3}, None, ["training.global_batch_size"]),
    ({"parallel__dp_shard": 3}, None, ["training.global_batch_size"]),
    ({"parallel__dp_shard": 3}, 4, ["parallel.dp_shard"]),  # and not also the batch
    ({"model__experts": 5, "parallel__dp_shard": 2, "parallel__ep": 2}, None, ["parallel.ep"]),
    ({"model__experts": 8, "parallel__dp_shard": 2, "parallel__tp": 2, "parallel__ep": 8}, None, ["parallel.ep"]),
    (
        {"model__experts": 8, "parallel__dp_shard": 2, "parallel__ep": 2, "parallel__zero_stage": 0},
        None,
        ["parallel.zero_stage"],
    ),
    (
        {"model__experts": 8, "parallel__tp": 4, "parallel__ep": 4, "training__sequence_length": 30},
        None,
        ["parallel.tp"],
    ),
    ({"data__sources": ()}, None, ["data.sources"]),
    ({"data__sources": (Source(), Source(kind="text"))}, None, ["data.sources.1.path"]),
    ({"data__sources": (Source(path="a"),)}, None, ["data.sources.0.path"]),
    ({"data__sources": HEADERLESS}, None, ["data.dtype", "data.separator"]),
    ({"data__sources": HEADERLESS, "data__dtype": "int32", "data__separator": 0}, None, []),
    *(
        ({"training__steps": 9, "data__stage": stages}, None, blamed)
        for stages, blamed in (
            ((MixtureStage(3, (1.0,)), MixtureStage(5, (1.0,)), MixtureStage(0, (2.0,))), []),
            ((MixtureStage(9, (1.0,)),), []),
            ((MixtureStage(8, (1.0,)),), ["data.stage.0.until"]),
            ((MixtureStage(0, (1.0,)), MixtureStage(0, (1.0,))), ["data.stage.0.until"]),
            ((MixtureStage(3, (1.0,)), MixtureStage(3, (1.0,))), ["data.stage.1.until"]),
            ((MixtureStage(3, ()), MixtureStage(0, (0.0,))), ["data.stage.0.weights", "data.stage.1.weights"]),
        )
    ),
]


def test_problems_are_blamed_on_their_keys() -> None:
    wrong = []
    for keys, world, blamed in PROBLEMS:
        found = [problem.key for problem in problems(change(**keys), world)]
        if found != blamed:
            wrong.append((keys, found, blamed))
    assert wrong == []


def test_wrong_profile_steps() -> None:
    for steps in ("10", "10:", "0:3", "3:3", "a:b", "5:4"):
        (problem,) = problems(change(metrics__profile_steps=steps), 1)
        assert problem.key == "metrics.profile_steps", steps
    assert not list(problems(change(metrics__profile_steps="10:13"), 1))


def test_ulysses_with_too_many_ranks_says_how_many_it_may_be() -> None:
    (problem,) = problems(change(parallel__cp=8, parallel__tp=2, model__kv_heads=4, **ULYSSES), None)
    assert "2 (model.kv_heads 4 / tp 2) do not divide by 8 ranks: set it to 2, or use" in problem.message


def test_stages_that_a_schedule_does_not_have() -> None:
    for schedule, stages, allowed in (("1F1B", 2, 1), ("DualPipeV", 3, 2), ("ZBVZeroBubble", 1, 2)):
        config = change(parallel__pp=2, parallel__schedule=schedule, parallel__virtual_stages=stages)
        message = f"{schedule} has {allowed} per rank, not {stages}"
        assert list(problems(config, 2)) == [config_error("parallel.virtual_stages", message)]


ALL_FIVE = Parallel(pp=2, dp_replicate=3, dp_shard=4, cp=5, tp=6)
DEGREES: list[tuple[Parallel, int | None, Parallel]] = [  # as written, number of ranks, resolved
    (Parallel(dp_shard=-1), 8, Parallel(dp_shard=8)),
    (Parallel(dp_shard=-1, tp=2), 8, Parallel(dp_shard=4, tp=2)),
    (Parallel(dp_replicate=-1, dp_shard=8), 64, Parallel(dp_replicate=8, dp_shard=8)),
    (ALL_FIVE, None, ALL_FIVE),
    (ALL_FIVE, 720, ALL_FIVE),
]


def test_degrees_are_resolved() -> None:
    for written, world, resolved in DEGREES:
        assert resolve_degrees(written, world) == (resolved, [])


def test_the_zero_stage_is_3_and_under_pp_2_unless_it_is_chosen() -> None:
    assert [Parallel(pp=pp).zero for pp in (1, 2)] == [3, 2]
    assert [Parallel(pp=pp, zero_stage=stage).zero for pp in (1, 2) for stage in (0, 3)] == [0, 3, 0, 3]


WRONG_DEGREES: list[tuple[Parallel, int | None, str, str]] = [  # number of ranks, the key to change, why
    (Parallel(dp_shard=0), 8, "parallel.dp_shard", "at least 1"),
    (Parallel(dp_replicate=0, dp_shard=1), 8, "parallel.dp_replicate", "at least 1"),
    (Parallel(dp_replicate=-1, dp_shard=-1), 8, "parallel.dp_replicate", "only one"),
    (Parallel(dp_shard=-1), None, "parallel.dp_shard", "set NPROC"),
    (
        Parallel(dp_replicate=-1, dp_shard=4),
        6,
        "parallel.dp_replicate",
        "6 ranks are no multiple of pp 1 x dp_shard 4 x cp 1 x tp 1 = 4",
    ),
    (Parallel(dp_shard=4, tp=2), 6, "parallel.dp_shard", "= 8 ranks, but there are 6"),
]


def test_wrong_degrees() -> None:
    for parallel, world, key, message in WRONG_DEGREES:
        unresolved, (problem,) = resolve_degrees(parallel, world)
        assert unresolved == parallel
        assert problem.key == key
        assert message in problem.message


def test_accumulation() -> None:
    parallel, _ = resolve_degrees(Parallel(dp_replicate=2, dp_shard=-1, tp=2), 16)
    assert parallel.data_ranks == 8
    assert parallel.ranks == 16
    training = replace(Config().training, global_batch_size=64, micro_batch_size=2)
    assert gradient_accumulation(training, parallel.data_ranks) == 4


def test_every_key_has_a_docstring() -> None:
    sections = [type(getattr(Config(), section.name)) for section in fields(Config)]
    for schema in (*sections, Source):
        assert schema.__doc__, schema
        docs = field_docs(schema)
        assert {name for name, text in docs.items() if text} == {field.name for field in fields(schema)}, schema
