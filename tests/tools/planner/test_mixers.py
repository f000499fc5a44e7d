"""What mixers hold and send, by the planner and by the dry run: memory of Gated DeltaNet, messages of every kind."""

import math
from dataclasses import replace
from typing import Any, get_args

import pytest

import torchllm.config as c
from tests.tools.dry_run import preload
from tests.tools.planner.memory_layouts import GPU, peak_errors, read_model
from tests.tools.planner.test_predict import case
from torchllm.facts.parts.registry import parameter_of_block
from torchllm.facts.shapes import shapes_of_view
from torchllm.tools.dry_run.run import examine
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.comms import Group
from torchllm.tools.planner.stage import context_parallel, tensor_parallel

MODEL = replace(
    read_model("qwen3_1.7b"),
    layers=4,
    mixer="gated_delta",
    qk_norm="none",
    delta_key_heads=16,
    delta_value_heads=32,
    delta_key_dim=128,
    delta_value_dim=128,
)
WORST, MEAN = 0.08, 0.03
MODES = get_args(c.Recompute.__annotations__["mode"])
LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 4},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "tp": 2, "sequence_parallel": True},
    {"dp_shard": 1, "cp": 2},
    {"dp_shard": 1, "cp": 2, "cp_method": "ulysses"},
]


def error_of(layout: dict[str, Any], mode: Any) -> float:
    """Return the planned peak over the traced one, minus 1: the core's backward is the peak, with logits in chunks."""
    (error,) = peak_errors(MODEL, layout, mode, micro_batches=1, chunk=256).values()
    return error


@pytest.mark.exhaustive
def test_memory_of_a_recurrence_is_what_the_dry_run_traces() -> None:
    """1 % of the peak is 80 MB; what the core's backward holds is more than half of it."""
    assert abs(error_of({"dp_shard": 4}, "none")) < 0.01


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_memory_in_all_layouts() -> None:
    errors = {(str(layout), mode): error_of(layout, mode) for layout in LAYOUTS for mode in MODES}
    print(errors)
    assert max(map(abs, errors.values())) <= WORST
    assert sum(map(abs, errors.values())) <= MEAN * len(errors)


KINDS = c.Kinds(
    full={"qk_norm": "head"},
    local={"window": 17, "sinks": True},
    delta={"mixer": "gated_delta", "delta_value_heads": 8},
    latent={
        **{"mixer": "latent_attention", "kv_heads": 0, "latent_kv_width": 24, "latent_q_width": 20},
        **{"nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6},
    },
)
EVERY_KIND = c.Model(layers=4, hidden=64, heads=8, kv_heads=4, ffn=64, vocab=64, pattern=tuple(KINDS), kinds=KINDS)
SIZES: dict[str, Any] = {"hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 64, "vocab": 64}
DELTA: dict[str, Any] = {"mixer": "gated_delta", "delta_value_heads": 8}
OF_EXPERTS: dict[str, Any] = {"experts": 8, "top_k": 2, "expert_ffn": 32}
MODELS = {
    "every mixer": EVERY_KIND,
    "Gemma 4 with experts": c.Model(
        **SIZES,
        **OF_EXPERTS,
        layers=2,
        norm_position="both",
        qk_norm="head",
        v_norm=True,
        dense_beside=True,
        pattern=("local", "full"),
        kinds=c.Kinds(local={"window": 17}, full={"keys_as_values": True, "head_dim": 12, "kv_heads": 2}),
    ),
    "Qwen3-Next": c.Model(
        **SIZES,
        **OF_EXPERTS,
        layers=2,
        qk_norm="head",
        attention_gate="element",
        shared_experts=1,
        shared_gate=True,
        pattern=("delta", "full"),
        kinds=c.Kinds(delta=DELTA, full={}),
    ),
    "OLMo Hybrid": c.Model(
        **SIZES,
        layers=2,
        qk_norm="width",
        pattern=("delta", "full"),
        kinds=c.Kinds(delta=DELTA, full={"norm_position": "after"}),
    ),
    "nanochat": c.Model(**SIZES, layers=1, family="nanochat", qk_norm="head"),
    "Ministral 3": c.Model(
        **SIZES, layers=1, rope_scaling="yarn", rope_scaling_factor=4.0, rope_original_length=64, rope_query_scale=0.7
    ),
}
SHARED: dict[str, dict[str, Any]] = {
    "ring of four": {"cp": 4},
    "ring of two": {"cp": 2},
    "ulysses": {"cp": 2, "cp_method": "ulysses"},
    "tp": {"tp": 2},
    "tp, sp": {"tp": 2, "sequence_parallel": True},
    "tp, sp, ring": {"tp": 2, "sequence_parallel": True, "cp": 2},
}


def traced_bytes(model: c.Model, layout: dict[str, Any]) -> dict[str, float]:
    """Return what a rank sends over cp and tp, by axis."""
    preload()
    parallel = c.Parallel(dp_replicate=1, dp_shard=2, **layout)
    training = c.Training(sequence_length=256, dtype="bfloat16", micro_batch_size=1, global_batch_size=2)
    (kind,) = examine(c.Config(model=model, parallel=parallel, training=training, cluster=GPU)).kinds
    axes = dict.fromkeys(("cp", "tp"), 0.0)
    for (axis, _), total in kind.sent.items():
        if axis in axes:
            axes[axis] += total.bytes
    return axes


def planned_bytes(model: c.Model, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the seconds of a period's collectives where a byte takes one and nothing else takes any, by axis."""
    settings = {"dp_shard": 2, "sequence_length": 256, "global_batch_size": 2, "micro_batch_size": 1, **layout}
    whole = case(model=model, **settings)
    waitless = replace(whole.software.constants, wait=0.0, exposed=1.0)
    whole = replace(whole, software=replace(whole.software, constants=waitless))

    def bytes_as_seconds(of: Case, dimensions: list[int]) -> Group:
        (size,) = (of.mesh[dimension] for dimension in dimensions)
        return Group(size, size, 1.0, 0.0)

    monkeypatch.setattr(Case, "group", bytes_as_seconds)
    over_cp = [context_parallel(view, core=0.0) for view in whole.of_views]
    over_tp = [tensor_parallel(view, 0.0, 0.0, 0.0) for view in whole.of_views]
    return {
        axis: sum(x.forward + x.backward for x in passes) for axis, passes in {"cp": over_cp, "tp": over_tp}.items()
    }


def omitted_bytes(model: c.Model, layout: dict[str, Any]) -> float:
    """Return what the planner omits: gradients of vectors and routers that a rank uses for its heads, its features or
    its part of sequences; a router's are float32."""
    cuts = {"whole_per_head", "whole_summed"} | ({"whole"} if "sequence_parallel" in layout else set())
    omitted = 0.0
    for view in model.views:
        for name, shape in shapes_of_view(view).items():
            parameter = parameter_of_block(name)
            assert parameter is not None
            if parameter.cut in cuts and parameter.role in ("vector", "router"):
                omitted += (4.0 if ".router." in name else 2.0) * math.prod(shape)
    return omitted * 2 * (layout["tp"] - 1) / layout["tp"] if "tp" in layout else 0.0


EACH_AXIS = ("tp", "tp, sp, ring", "ulysses")
"""layouts of models whose mixers the first has, too: what is sent over tp, over a ring and by Ulysses"""
CASES = [(model, layout) for model in MODELS for layout in (SHARED if model == "every mixer" else EACH_AXIS)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "layout_name"), CASES)
def test_messages_are_what_the_dry_run_traces(name: str, layout_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one more period: the ends of a model send too. In a ring the busiest rank counts, which is not the first."""
    model, layout = MODELS[name], SHARED[layout_name]
    once, twice = (traced_bytes(replace(model, layers=layers), layout) for layers in (model.layers, 2 * model.layers))
    planned = planned_bytes(model, layout, monkeypatch)
    planned["tp"] += omitted_bytes(model, layout)
    assert {axis: twice[axis] - once[axis] for axis in once} == planned
