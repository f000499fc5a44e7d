"""The checks between keys, the degrees, and the docstrings of the settings."""

from dataclasses import fields, replace
from itertools import product
from math import inf
from typing import Annotated, Any

import pytest

from tests.config.conftest import config_of
from torchllm.config import Config, Kinds, MixtureStage, Model, Parallel, Source, gradient_accumulation
from torchllm.config.keys import Bound
from torchllm.tools.config.checks import problems
from torchllm.tools.config.degrees import resolve_degrees
from torchllm.tools.config.help import field_docs
from torchllm.tools.config.read import config_error, describe

pytestmark = pytest.mark.quick


def test_the_defaults_are_right_on_any_number_of_ranks() -> None:
    for world in (1, 2, 4, 8):
        assert list(problems(Config(), world)) == []


LATENT = {
    **{"model.mixer": "latent_attention", "model.latent_kv_width": 24},
    **{"model.nope_head_dim": 8, "model.rope_head_dim": 4, "model.v_head_dim": 6},
}
ULYSSES = {"parallel.cp_method": "ulysses"}
ROWWISE = {"float8.recipe": "rowwise"}
KINDS = {"model.pattern": ("local", "full"), "model.kinds": Kinds(local={}, full={"window": 0})}
BOTH = {
    **{"model.pattern": ("a", "b"), "model.norm_position": "both"},
    "model.kinds": Kinds(a={}, b={"norm_position": "before"}),
}
DELTA = {"model.mixer": "gated_delta"}
MIXED = {"model.pattern": ("r", "full"), "model.kinds": Kinds(r={"mixer": "gated_delta"}, full={})}
FIVE = {"training.global_batch_size": 5, "training.micro_batch_size": 1}
HEADERLESS = (Source(kind="nanogpt", path="a"),)
PROBLEMS: list[tuple[dict[str, Any], int | None, list[str]]] = [
    # Those whose cures are tried are in test_advice.py.
    ({"model.heads": 3}, None, ["model.heads"]),
    ({"model.heads": 3, "model.head_dim": 2}, None, []),
    ({"model.kv_heads": 3}, None, ["model.kv_heads"]),
    ({"model.head_dim": 3}, None, ["model.head_dim"]),
    ({"model.head_dim": 3, "model.family": "gpt"}, None, []),
    ({"model.family": "nanochat", "model.qk_norm": "head"}, None, []),
    ({"model.family": "nanochat", "model.qk_norm": "width"}, None, ["model.qk_norm"]),
    ({"model.family": "nanochat", "model.experts": 4}, None, ["model.experts"]),
    ({"training.sequence_length": 4096}, None, []),
    ({"training.sequence_length": 4096, "model.family": "gpt"}, None, ["training.sequence_length"]),
    (
        {"model.rope_scaling_factor": 8.0, "model.rope_high_frequency_factor": 1.0},
        None,
        ["model.rope_high_frequency_factor"],
    ),
    (
        {"model.rope_scaling": "yarn", "model.rope_scaling_factor": 8.0, "model.rope_beta_fast": 0.5},
        None,
        ["model.rope_beta_fast"],
    ),
    ({"parallel.cp": 4, "model.window": 2048}, None, []),
    ({"parallel.cp": 4, "model.window": 2047, **ULYSSES}, None, []),
    ({"parallel.cp": 4, **KINDS, "model.kinds.local.attention": "flex"}, None, ["model.kinds.local.attention"]),
    ({"parallel.cp": 4, **KINDS, "model.kinds.full.kv_heads": 2, **ULYSSES}, None, ["parallel.cp"]),
    ({"parallel.cp": 4, **KINDS, "model.kinds.local.window": 2047, **ULYSSES}, None, []),
    ({"parallel.cp": 4, **KINDS, "model.kinds.local.window": 2048, "model.window": 2047}, None, []),
    ({"parallel.cp": 4, **KINDS, "model.kinds.local.window": 257}, None, []),
    ({"parallel.cp": 4, **KINDS, "model.kinds.local.window": 258}, None, ["parallel.cp_method"]),
    ({**BOTH, "model.block_scale": True}, None, ["model.kinds.b.norm_position"]),
    ({**BOTH, "model.dense_beside": True, "model.experts": 4}, None, ["model.kinds.b.norm_position"]),
    (
        {**BOTH, "model.dense_beside": True, "model.experts": 4, "model.kinds.b.experts": 0},
        None,
        [],
    ),
    ({"model.base_width": 256, "model.tied_embeddings": True}, None, []),  # as wide as the model
    ({"model.base_width": 64, "optimizer.name": "sgd"}, None, ["model.base_width"]),
    ({"compile.norm": True, "model.family": "gpt"}, None, ["compile.norm"]),
    ({"compile.norm": True}, None, []),
    ({"schedule.warmup_steps": 1001}, None, ["schedule.warmup_steps"]),
    ({"schedule.warmup_steps": 1001, "finetune.epochs": 2.0}, None, []),  # these decide the steps
    (
        {"schedule.name": "wsd", "schedule.warmup_steps": 1, "schedule.decay_steps": 1000},
        None,
        ["schedule.decay_steps"],
    ),
    ({"recompute.mode": "segment", "recompute.k": 5}, None, ["recompute.k"]),
    ({"recompute.mode": "full", "recompute.k": 2}, None, ["recompute.k"]),
    ({"parallel.sequence_parallel": True}, None, []),  # tests/config/test_inert.py
    ({"parallel.sequence_parallel": True, "parallel.tp": 8, "training.sequence_length": 12}, None, ["parallel.tp"]),
    ({"parallel.tp": 3}, None, ["parallel.tp"] * 3),  # heads, kv_heads, ffn
    ({"parallel.tp": 4, "model.kv_heads": 2}, None, ["parallel.tp"]),
    ({"parallel.tp": 2, "model.vocab": 1}, None, ["parallel.tp"]),
    ({**DELTA, "parallel.tp": 4, "model.delta_key_heads": 2}, None, ["parallel.tp"]),
    ({**MIXED, "parallel.tp": 4, "model.delta_key_heads": 2}, None, ["parallel.tp"]),
    ({**DELTA, "model.delta_key_heads": 3}, None, ["model.delta_key_heads"]),
    ({"model.delta_key_heads": 2}, None, ["model.delta_key_heads"]),  # it needs the mixer
    ({**DELTA, **ULYSSES, "parallel.cp": 4, "model.delta_key_heads": 2}, None, ["parallel.cp"]),
    ({**MIXED, **ULYSSES, "parallel.cp": 4, "model.delta_key_heads": 2}, None, ["parallel.cp"]),
    ({**DELTA, "parallel.cp": 4, "model.delta_key_heads": 2}, None, []),
    ({"parallel.pp": 2}, None, []),
    ({"parallel.cp": 4}, None, []),
    ({"parallel.cp": 4, "training.sequence_length": 12}, None, ["parallel.cp"]),  # not into 8 pieces
    ({"parallel.cp": 4, "training.sequence_length": 12, **ULYSSES}, None, []),
    ({"parallel.cp": 4, "training.sequence_length": 6, **ULYSSES}, None, ["parallel.cp"]),
    ({"parallel.cp": 4, "model.kv_heads": 2}, None, []),
    ({"parallel.cp": 4, "model.kv_heads": 2, **ULYSSES}, None, ["parallel.cp"]),
    ({"parallel.cp": 4, "parallel.tp": 4, **ULYSSES}, None, ["parallel.cp"]),  # 8 heads / tp 4
    ({"parallel.cp": 2, "parallel.tp": 4, **ULYSSES}, None, []),
    ({"model.attention": "flash", "training.dtype": "bfloat16"}, None, []),
    ({**ROWWISE, "parallel.tp": 2}, None, []),
    ({**ROWWISE, "model.hidden": 264, "model.head_dim": 32}, None, ["float8.recipe"]),
    ({**ROWWISE, "model.kv_heads": 4, "model.head_dim": 12, "parallel.tp": 4}, None, ["float8.recipe"] * 2),
    ({**ROWWISE, "model.kv_heads": 4, "parallel.tp": 4}, None, []),
    ({**ROWWISE, "model.attention_gate": "head"}, None, ["float8.recipe"]),  # of 8 heads
    ({**ROWWISE, **DELTA}, None, ["float8.recipe"] * 2),  # decay and step size of each head
    ({**ROWWISE, **DELTA, "model.delta_value_heads": 32}, None, []),
    (  # as many features of keys as of hidden states, which tp does not cut
        {
            **{**ROWWISE, **DELTA, "parallel.tp": 8, "model.hidden": 64, "model.head_dim": 32, "model.ffn": 128},
            **{"model.delta_key_heads": 8, "model.delta_key_dim": 8, "model.delta_value_heads": 128},
        },
        None,
        ["float8.recipe"] * 2,
    ),
    ({**ROWWISE, **DELTA, "model.delta_value_heads": 32, "parallel.tp": 4}, None, ["float8.recipe"] * 2),
    ({"float8.recipe": "rowwise_with_gw_hp", "training.sequence_length": 24}, None, []),
    ({**ROWWISE, "training.sequence_length": 32, "parallel.cp": 4}, None, ["training.micro_batch_size"]),
    ({"parallel.cp": 2, "model.attention": "flash"}, None, ["model.attention"]),
    ({"parallel.cp": 2, "compile.block": True, "recompute.mode": "none"}, None, []),
    ({"parallel.cp": 2, "compile.block": True, "recompute.mode": "every_k"}, None, ["compile.block"]),
    ({"parallel.cp": 2, "compile.block": True, "recompute.mode": "selective"}, None, ["compile.block"]),
    ({"parallel.pp": 2, "parallel.schedule": "DualPipeV", "compile.block": True}, None, ["compile.block"]),
    *(
        ({"parallel.pp": 2, "parallel.schedule": schedule, **FIVE}, None, ["training.global_batch_size"])
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble")  # 5 are not 2 equal rounds
    ),
    ({"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", **FIVE}, None, []),
    ({"parallel.tp": 2, "parallel.cp": 2, "model.vocab": 97}, None, []),
    ({"parallel.tp": 2, "parallel.cp": 4, "model.vocab": 97}, None, ["model.vocab"]),
    ({"parallel.tp": 2, "parallel.dp_shard": 2, "parallel.cp": 2, "model.vocab": 97}, None, ["model.vocab"]),
    ({"training.micro_batch_size": 3}, None, ["training.global_batch_size"]),
    ({"parallel.dp_shard": 3}, None, ["training.global_batch_size"]),
    ({"parallel.dp_shard": 3}, 4, ["parallel.dp_shard"]),  # and not also the batch
    ({"model.experts": 5, "parallel.dp_shard": 2, "parallel.ep": 2}, None, ["parallel.ep"]),
    ({"model.experts": 8, "parallel.dp_shard": 2, "parallel.tp": 2, "parallel.ep": 8}, None, ["parallel.ep"]),
    (
        {"model.experts": 4, "parallel.dp_shard": 2, "parallel.ep": 2, "parallel.expert_chunks": 10**6},
        None,
        ["parallel.expert_chunks"],
    ),
    (
        {"model.experts": 8, "parallel.tp": 4, "parallel.ep": 4, "training.sequence_length": 30},
        None,
        ["parallel.tp"],
    ),
    ({"model.head_dim": 12, "model.rotary_fraction": 0.25}, None, ["model.rotary_fraction"]),  # 3 features
    ({"model.experts": 4, "model.top_k": 5, "model.dense_layers": 4}, None, ["model.top_k", "model.dense_layers"]),
    ({**LATENT, "lora.rank": 4}, None, ["lora.targets"]),
    ({**LATENT, "model.qk_norm": "head", "model.window": 4}, None, ["model.qk_norm", "model.window"]),
    ({**LATENT, "model.v_head_dim": 13}, None, ["model.v_head_dim"]),
    (
        {**LATENT, "model.latent_kv_width": 0, "model.v_head_dim": 0},
        None,
        ["model.latent_kv_width", "model.v_head_dim"],
    ),
    ({"model.experts": 8, "model.router_groups": 3}, None, ["model.router_groups"]),
    ({"model.experts": 8, "model.router_groups": 8}, None, ["model.router_groups"]),
    ({"model.experts": 8, "model.router_groups": 2, "model.router_top_groups": 3}, None, ["model.router_top_groups"]),
    ({"model.experts": 8, "model.router_groups": 4, "model.top_k": 3}, None, ["model.router_top_groups"]),
    ({"model.experts": 4, "model.expert_ffn": 33, "parallel.tp": 2}, None, ["parallel.tp"]),
    ({"lora.rank": 4, "lora.targets": ("q_proj", "q_proj")}, None, ["lora.targets"]),
    ({"checkpoint.interval": 500, "checkpoint.keep_every": 700}, None, ["checkpoint.keep_every"]),
    ({"data.sources": ()}, None, ["data.sources"]),
    ({"data.sources": (Source(), Source(kind="text"))}, None, ["data.sources.1.path"]),
    ({"data.sources": (Source(path="a"),)}, None, ["data.sources.0.path"]),
    ({"data.sources": HEADERLESS}, None, ["data.dtype", "data.separator"]),
    ({"data.sources": HEADERLESS, "data.dtype": "int32", "data.separator": 0}, None, []),
    *(
        ({"training.steps": 9, "data.stage": stages}, None, blamed)
        for stages, blamed in (
            ((MixtureStage(3, (1.0,)), MixtureStage(5, (1.0,)), MixtureStage(0, (2.0,))), []),
            ((MixtureStage(9, (1.0,)),), []),
            ((MixtureStage(8, (1.0,)),), ["data.stage.0.until"]),
            ((MixtureStage(0, (1.0,)), MixtureStage(0, (1.0,))), ["data.stage.0.until"]),
            ((MixtureStage(3, (1.0,)), MixtureStage(3, (1.0,))), ["data.stage.1.until"]),
            ((MixtureStage(3, (1.0, 1.0)), MixtureStage(0, (0.0,))), ["data.stage.0.weights", "data.stage.1.weights"]),
        )
    ),
]


def test_problems_are_blamed_on_their_keys() -> None:
    wrong = []
    for keys, world, blamed in PROBLEMS:
        found = [problem.key for problem in problems(config_of(keys), world)]
        if found != blamed:
            wrong.append((keys, found, blamed))
    assert wrong == []


def test_a_window_in_a_kind_that_is_too_long_for_a_ring_is_refused_with_the_path_of_the_kind() -> None:
    (problem,) = problems(config_of({"parallel.cp": 4, **KINDS, "model.kinds.local.window": 2047}), None)
    assert problem.message == (
        "in a ring a window reaches back over one of 8 pieces of the sequence, 256 tokens, and "
        'model.kinds.local.window = 2047 is longer: use "ulysses"'
    )


def test_a_block_has_the_view_of_its_kind() -> None:
    kinds = Kinds(local={"window": 8, "rotary_fraction": 0.0}, full={"rope_theta": 5.0})
    model = Model(layers=7, window=3, pattern=("local", "local", "full"), kinds=kinds, experts=4, dense_layers=2)
    assert [view.window for view in model.views] == [8, 8, 3, 8, 8, 3, 8]
    assert [view.rotary_fraction for view in model.views] == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert [view.rope_theta for view in model.views] == [1e4, 1e4, 5.0, 1e4, 1e4, 5.0, 1e4]
    assert [view.experts for view in model.views] == [0, 0, 4, 4, 4, 4, 4]
    assert (
        model.of_block(5)
        == model.of_kind("full")
        == replace(model, window=3, rope_theta=5.0, pattern=(), kinds=Kinds(), dense_layers=0)
    )
    assert {view.of_block(4) == view for view in model.views} == {True}
    config = Config(model=model)
    assert {path: of_kind.model for path, of_kind in config.of_kinds.items()} == {
        "model.kinds.local": model.of_block(3),
        "model.kinds.full": model.of_block(2),
    }
    assert Config().of_kinds == {"model": Config()}
    assert Model(layers=7).views == (Model(layers=7),) * 7


def test_configs_with_equal_kinds_are_one_key_of_a_cache() -> None:
    """Whatever the order of tables and keys, and whether they are plain dicts."""
    one = Model(kinds=Kinds(a={"window": 1, "rope_theta": 2.0}, b={}))
    same = Model(kinds={"b": {}, "a": {"rope_theta": 2.0, "window": 1}})  # type: ignore[arg-type]
    assert len({one, same}) == 1
    assert len({one, Model(kinds=Kinds(a={"window": 2, "rope_theta": 2.0}, b={}))}) == 2


def test_wrong_profile_steps() -> None:
    for steps in ("10", "10:", "0:3", "3:3", "a:b", "5:4"):
        (problem,) = problems(config_of({"metrics.profile_steps": steps}), 1)
        assert problem.key == "metrics.profile_steps", steps
    assert not list(problems(config_of({"metrics.profile_steps": "10:13"}), 1))


def test_ulysses_with_too_many_ranks_says_how_many_it_may_be() -> None:
    (problem,) = problems(config_of({"parallel.cp": 8, "parallel.tp": 2, "model.kv_heads": 4, **ULYSSES}), None)
    assert "2 (model.kv_heads 4 / tp 2) do not divide by 8 ranks: set it to 2, or use" in problem.message


def test_stages_that_a_schedule_does_not_have() -> None:
    for schedule, stages, allowed in (("1F1B", 2, 1), ("DualPipeV", 3, 2), ("ZBVZeroBubble", 1, 2)):
        config = config_of({"parallel.pp": 2, "parallel.schedule": schedule, "parallel.virtual_stages": stages})
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


def test_a_bound_is_described_by_its_finite_limits() -> None:
    for over, least, most in product((-inf, 0.25), (-inf, 0.5), (inf, 8.5)):
        text = describe(Annotated[float, Bound(at_least=least, at_most=most, over=over)])
        assert "inf" not in text
        assert [str(limit) in text for limit in (over, most)] == [over > -inf, most < inf], text
        assert (str(least) in text) == (least > -inf and over == -inf), text
    assert describe(Annotated[float, Bound(over=0.0, at_most=1.0)]) == "a number over 0 and not over 1"
    assert describe(Annotated[int, Bound(at_most=7)]) == "a whole number of at most 7"
    assert describe(Annotated[float, Bound(at_least=0.0, at_most=0.5)]) == "a number from 0.0 to 0.5"


def test_every_key_has_a_docstring() -> None:
    sections = [type(getattr(Config(), section.name)) for section in fields(Config)]
    for schema in (*sections, Source):
        assert schema.__doc__, schema
        docs = field_docs(schema)
        assert {name for name, text in docs.items() if text} == {field.name for field in fields(schema)}, schema


def test_a_width_that_tp_does_not_divide_is_named_by_its_kind() -> None:
    config = config_of({"parallel.tp": 8, **KINDS, "model.kinds.full.heads": 4, "model.kinds.local.ffn": 12})
    assert [problem.message for problem in problems(config, None)] == [
        "8 does not divide model.kinds.local.ffn = 12",
        "8 does not divide model.kinds.full.heads = 4",
        "8 does not divide model.kv_heads = 4",
    ]


def test_blocks_with_experts_in_any_pattern() -> None:
    kinds = Kinds(dense={"experts": 0, "expert_ffn": 8}, sparse={"heads": 2})
    model = Model(layers=5, experts=4, shared_experts=1, router_bias=True, pattern=("dense", "sparse"), kinds=kinds)
    assert (model.sparse_blocks, replace(model, dense_layers=2).sparse_blocks) == ((1, 3), (3,))
    assert model.of_block(0) == replace(model, **NO_EXPERTS, pattern=(), kinds=Kinds())
    assert (model.of_block(0), model.of_block(2)) == (model.of_kind("dense"), replace(model, layers=5).of_block(4))
    assert model.of_block(1).rotary_settings != model.of_block(0).rotary_settings  # heads of 128 features, and of 32


NO_EXPERTS = {"experts": 0, "shared_experts": 0, "router_bias": False}


def test_widths_of_latent_heads_are_those_of_latent_attention_alone() -> None:
    """A kind with another mixer has the head width and the rotary fraction that its own keys say."""
    kinds = Kinds(latent={"mixer": "latent_attention"}, plain={}, nope={"rotary_fraction": 0.0, "head_dim": 16})
    model = Model(hidden=32, heads=4, pattern=tuple(kinds), kinds=kinds, nope_head_dim=8, rope_head_dim=4)
    views = [model.of_kind(name) for name in kinds]
    assert [(view.head_width, view.turned_width) for view in views] == [(12, 4), (8, 8), (16, 0)]
    assert [view.has_rotary_positions for view in views] == [True, True, False]
