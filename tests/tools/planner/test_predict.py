"""Predictions: they add up, they move the right way, and papers' MFU and HFU follow from their own step times."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evidence.stacks import STACKS
from tests.tools.planner.test_comms import dgx_a100
from torchllm.config import Model, Parallel, Recompute, Training
from torchllm.config.schema import RecomputeMode
from torchllm.tools.planner.case import CP, SHARD, TP, Case
from torchllm.tools.planner.compute import Kernels
from torchllm.tools.planner.parameters import StageSize
from torchllm.tools.planner.predict import hardware_flops, pipeline_seconds, predict
from torchllm.tools.planner.schedules import orders
from torchllm.tools.planner.simulate import play, simulate_played
from torchllm.tools.planner.stage import cost_of_block, stage_cost

TERMS = {"matmul", "attention", "elementwise", "launch", "host", "ends", "recompute", "tensor parallel", "fsdp"} | {
    *("context parallel", "expert parallel", "pipeline parallel", "bubble"),
    *("gradient reduction", "weight gather", "optimizer"),
}
LLAMA = Model(layers=40, hidden=5120, heads=40, ffn=13824, vocab=32000)


def case(stack: str = "torchllm", model: Model = LLAMA, **settings: Any) -> Case:
    """Return a layout of an A100 cluster. settings: named as in Parallel and Training, and `mode`, `hardware`."""
    batch = {"global_batch_size": 512, "sequence_length": 2048} | fields_of(Training, settings)
    degrees = {"dp_shard": 8} | fields_of(Parallel, settings)
    training = Training(**batch)
    parallel = Parallel(**degrees)
    recompute = Recompute(mode=settings.get("mode", "none"))
    hardware = settings.get("hardware", dgx_a100())
    return Case(model, training, parallel, recompute, Kernels("flash2"), hardware, STACKS[stack])


def fields_of(section: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Return those settings that are fields of a dataclass."""
    return {key: value for key, value in settings.items() if key in section.__dataclass_fields__}


def step_of(**settings: Any) -> float:
    """Return the predicted seconds of a step of a `case`."""
    return predict(case(**settings)).step


layouts = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8]),
        "pp": st.sampled_from([1, 2, 4]),
        "dp_shard": st.sampled_from([1, 2, 8, 16]),
        "dp_replicate": st.sampled_from([1, 2]),
        "cp": st.sampled_from([1, 2]),
        "micro_batch_size": st.sampled_from([1, 2, 4]),
        "zero_stage": st.sampled_from([0, 1, 2, 3]),
        "mode": st.sampled_from(["none", "full", "segment", "every_k", "ffn", "selective", "selective_half"]),
        "schedule": st.sampled_from(["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"]),
        "stack": st.sampled_from(sorted(STACKS)),
    }
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layouts)
def test_the_terms_are_the_step(layout: dict[str, Any]) -> None:
    prediction = predict(case(**layout))
    terms = prediction.terms
    assert sum(terms.values()) == pytest.approx(prediction.step, rel=1e-9)
    assert min(terms.values()) >= -1e-9 * prediction.step, terms
    assert 0 < prediction.mfu <= prediction.hfu <= 1
    assert min(prediction.memory) >= 0
    assert terms.keys() <= TERMS


def test_a_device_with_little_to_do_waits_for_the_host() -> None:
    """Of small kernels a micro batch takes the host's time for each, however small they are; of large ones none."""
    small = replace(LLAMA, layers=4, hidden=512, heads=8, ffn=1376, vocab=512)
    waiting = case(model=small, tp=8, dp_shard=1, sequence_length=256, global_batch_size=64)
    prediction = predict(waiting)
    assert prediction.terms["host"] > 0.5 * prediction.step
    step_of_half = step_of(model=small, tp=8, dp_shard=1, sequence_length=128, global_batch_size=64)
    assert step_of_half == pytest.approx(prediction.step, rel=0.02)
    block = cost_of_block(waiting)
    kernels = waiting.micro_batches * small.layers * sum(block.kernels)
    host_seconds = kernels * waiting.software.constants.host
    assert prediction.step == pytest.approx(host_seconds, rel=0.1)
    graphed = predict(replace(waiting, kernels=waiting.kernels._replace(graphs=True)))
    large = predict(case(micro_batch_size=2))
    assert graphed.terms["host"] == large.terms["host"] == 0


def test_very_many_micro_batches_are_carried_on_exactly() -> None:
    """What is not simulated follows from what is: a step of 200 micro batches by both ways."""
    layout = case(pp=4, dp_shard=1, zero_stage=0, global_batch_size=200)
    stages = []
    for index in range(4):
        size = StageSize((0,) * 10, first=index == 0, last=index == 3)
        stages.append(stage_cost(layout, size).times)
    extrapolated, _ = pipeline_seconds(layout, stages, 1e-4)
    simulated = simulate_played(play(orders(layout.parallel, 200)), stages, [1e-4] * 3)
    assert extrapolated == pytest.approx(simulated.step, rel=1e-9)


GPT_1T = Model(family="gpt", layers=128, hidden=25600, heads=160, ffn=102400, vocab=51200, tied_embeddings=True)


def test_a_papers_hfu_follows_from_its_own_time() -> None:
    """Narayanan et al. 2021 (arXiv 2104.04473), table 1: 52 % on 3,072 A100, printed without decimals."""
    full = case("megatron-2021", GPT_1T, mode="full")
    tokens_per_second = 3072 * 2048 / 102.63 / 3072
    rate = tokens_per_second * hardware_flops(full)
    assert 100 * rate / 312e12 == pytest.approx(52, abs=0.5 + 0.2)


def test_overlapped_tensor_parallelism_costs_less_in_both_passes() -> None:
    """Nothing is hidden; the backward's behind the weights' gradients; both behind the products beside them."""
    layout = case(tp=8, dp_shard=1, micro_batch_size=4)
    nothing = cost_of_block(layout)
    in_backward = cost_of_block(with_facts(layout, overlaps_tensor_parallel=True))
    in_both = cost_of_block(with_facts(layout, overlaps_products=True))
    assert nothing.times.forward == in_backward.times.forward
    assert in_backward.times.forward > in_both.times.forward
    assert sum(nothing.times) > sum(in_backward.times)
    assert sum(in_backward.times) > sum(in_both.times)
    exposed = layout.software.constants.exposed * nothing.terms["tensor parallel"]
    assert in_both.terms["tensor parallel"] == pytest.approx(exposed)  # as much as may overlap does


def with_facts(layout: Case, **facts: Any) -> Case:
    """Return the same layout under a framework that differs in some facts."""
    software = replace(layout.software, **facts)
    return replace(layout, software=software)


def test_the_last_reduction_of_fsdp_has_nothing_to_hide_behind() -> None:
    """Of the embedding's table, whose gradient is the last one."""
    layout = case(dp_shard=128, zero_stage=3, global_batch_size=128)
    table_bytes = layout.software.sent_gradients * layout.model.vocab * layout.model.hidden
    exposed = predict(layout).terms["gradient reduction"]
    data_ranks = layout.group([SHARD, CP])
    assert exposed == pytest.approx(data_ranks.gather(table_bytes))


def sent_again(layout: Case) -> float:
    """Return the seconds that a block's tensor parallelism takes longer where it gathers its inputs again."""
    keeps = cost_of_block(with_facts(layout, keeps_gathered=True))
    gathers_again = cost_of_block(with_facts(layout, keeps_gathered=False))
    return gathers_again.terms["tensor parallel"] - keeps.terms["tensor parallel"]


def test_inputs_that_are_not_kept_are_gathered_once_more() -> None:
    """Two more gathers per block's backward with sequence parallelism, and none without it."""
    layout = case(tp=8, dp_shard=1, sequence_parallel=True)
    input_bytes = 2.0 * layout.piece.tokens * layout.model.hidden
    gather = layout.group([TP]).gather(input_bytes) + layout.software.constants.wait
    assert sent_again(layout) == pytest.approx(2 * gather)
    without_sp = case(tp=8, dp_shard=1, sequence_parallel=False)
    assert sent_again(without_sp) == 0


GATHERS = {"none": 2, "ffn": 1, "every_k": 1, "full": 0, "segment": 0, "selective": 2, "selective_half": 2}


@pytest.mark.parametrize("mode", GATHERS)
def test_regather_sends_inputs_once_more_that_are_not_recomputed(mode: RecomputeMode) -> None:
    """The gathers of test_regather.py, per block."""
    kept = replace(case(tp=8, dp_shard=1, sequence_parallel=True), recompute=Recompute(mode))
    again = replace(kept, parallel=replace(kept.parallel, regather=True))
    gather = kept.group([TP]).gather(2.0 * kept.piece.tokens * kept.model.hidden) + kept.software.constants.wait
    longer = cost_of_block(again).terms["tensor parallel"] - cost_of_block(kept).terms["tensor parallel"]
    assert longer == pytest.approx(GATHERS[mode] * gather, abs=1e-12)
