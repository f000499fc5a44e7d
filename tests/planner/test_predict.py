"""Predictions: they add up, they move the right way, and papers' MFU and HFU follow from their own step times."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.test_comms import dgx_a100
from torchllm.config import Model, Parallel, Recompute, Training
from torchllm.planner.case import CP, SHARD, TP, Case
from torchllm.planner.compute import Kernels
from torchllm.planner.evidence.stacks import STACKS
from torchllm.planner.memory import StageSize
from torchllm.planner.predict import hardware_flops, pipeline_seconds, predict
from torchllm.planner.search.plot import TERMS
from torchllm.planner.simulate import simulate
from torchllm.planner.stage import cost_of_block, stage_cost
from torchllm.spec.flops import flops_per_token
from torchllm.spec.schedules import orders

LLAMA = Model(layers=40, hidden=5120, heads=40, ffn=13824, vocab=32000)


def case(stack: str = "torchllm", model: Model = LLAMA, **settings: Any) -> Case:
    """A layout of an A100 cluster; settings by their names in Parallel, Training, Recompute."""
    of = {kind: {k: v for k, v in settings.items() if k in kind.__dataclass_fields__} for kind in (Parallel, Training)}
    training = {"micro_batch_size": 1, "global_batch_size": 512, "sequence_length": 2048} | of[Training]
    parallel = {"dp_shard": 8} | of[Parallel]
    return Case(
        model,
        Training(**training),
        Parallel(**parallel),
        Recompute(mode=settings.get("mode", "none")),
        Kernels(attention=settings.get("attention", "flash2")),
        settings.get("hardware", dgx_a100()),
        STACKS[stack],
    )


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


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_the_terms_are_the_step(layout: dict[str, Any]) -> None:
    found = predict(case(**layout))
    assert sum(found.terms.values()) == pytest.approx(found.step, rel=1e-9)
    assert all(seconds >= -1e-9 * found.step for seconds in found.terms.values()), found.terms
    assert 0 < found.mfu <= found.hfu <= 1
    assert all(bytes >= 0 for bytes in found.memory)
    assert found.terms.keys() <= set(TERMS)  # else a plot would leave one out


@settings(max_examples=40, deadline=None)
@given(layouts, st.integers(0, 2), st.sampled_from(["bandwidth", "latency"]), st.floats(1.1, 20))
def test_a_slower_link_never_makes_a_step_faster(layout: dict[str, Any], at: int, what: str, factor: float) -> None:
    hardware = dgx_a100()
    links = list(hardware.links)
    value = links[at].bandwidth / factor if what == "bandwidth" else links[at].latency * factor
    links[at] = replace(links[at], **{what: value})
    before, after = predict(case(**layout)), predict(case(**layout, hardware=replace(hardware, links=tuple(links))))
    assert after.step >= before.step * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(layouts, st.sampled_from(["achievable", "memory_bandwidth"]))
def test_a_faster_gpu_never_makes_a_step_slower(layout: dict[str, Any], what: str) -> None:
    hardware = dgx_a100()
    faster = replace(hardware, **{what: 1.5 * getattr(hardware, what)})
    assert predict(case(**layout, hardware=faster)).step <= predict(case(**layout)).step * (1 + 1e-9)


def test_recomputation_costs_time() -> None:
    steps = {mode: predict(case(mode=mode)).step for mode in get_args(Recompute.__annotations__["mode"])}
    assert steps["none"] < steps["selective"] < steps["every_k"] < steps["full"]
    assert steps["selective"] < steps["selective_half"] < steps["full"]
    assert steps["none"] < steps["ffn"] < steps["full"]


def test_the_bubble_of_equal_stages_is_the_papers() -> None:
    """(p - 1) / m of the computing time (arXiv 2104.04473, section 2.2); transfers and the ends come on top."""
    model = replace(LLAMA, vocab=64, tied_embeddings=True)
    found = predict(case("megatron-2021", model, pp=4, dp_shard=1, zero_stage=0, global_batch_size=32))
    tail = sum(found.terms[name] for name in ("gradient reduction", "weight gather", "optimizer"))
    busy = found.step - found.terms["bubble"] - tail
    assert found.terms["bubble"] / busy == pytest.approx(3 / 32, rel=0.02)


def test_a_device_with_little_to_do_waits_for_the_host() -> None:
    """Of small kernels a micro batch takes the host's time for each, however small they are; of large ones none."""
    small = replace(LLAMA, layers=4, hidden=512, heads=8, ffn=1376, vocab=512)
    waiting = case(model=small, tp=8, dp_shard=1, sequence_length=256, global_batch_size=64)
    half = case(model=small, tp=8, dp_shard=1, sequence_length=128, global_batch_size=64)
    terms = predict(waiting).terms
    assert terms["host"] > 0.5 * predict(waiting).step
    assert predict(half).step == pytest.approx(predict(waiting).step, rel=0.02)
    assert predict(case(micro_batch_size=2)).terms["host"] == 0
    block = cost_of_block(waiting)
    kernels = waiting.micro_batches * small.layers * sum(block.kernels)
    assert predict(waiting).step == pytest.approx(kernels * waiting.software.constants.host, rel=0.1)


def test_host_time_grows_with_what_is_recomputed() -> None:
    kernels = {mode: cost_of_block(case(mode=mode)).kernels for mode in ("none", "full")}
    assert kernels["full"].input_gradient == kernels["none"].input_gradient + kernels["none"].forward


def test_very_many_micro_batches_are_carried_on_exactly() -> None:
    """What is not simulated follows from what is: a step of 200 micro batches by both ways."""
    layout = case(pp=4, dp_shard=1, zero_stage=0, global_batch_size=200)
    stages = [stage_cost(layout, StageSize(10, at == 0, at == 3)).times for at in range(4)]
    short, _ = pipeline_seconds(layout, stages, 1e-4)
    whole = simulate(orders(layout.parallel, 200), stages, [1e-4] * 3).step
    assert short == pytest.approx(whole, rel=1e-9)


# Published steps: model, GPUs, sequences, length, seconds, MFU or None, HFU or None.
GPT: dict[str, Any] = {"family": "gpt", "tied_embeddings": True, "vocab": 51200, "max_sequence_length": 2048}
PUBLISHED = {
    # Hagemann et al. 2023 (arXiv 2311.05610), table 2: LLAMA 13B on 64 A100, 70.5 % MFU in 26.54 s
    "13B": (Model(layers=40, hidden=5120, heads=40, ffn=13824, vocab=128000), 64, 2048, 26.54, 70.5, None),
    # Narayanan et al. 2021 (arXiv 2104.04473), table 1: HFU; seconds from its tokens per second per GPU
    "1.7B": (Model(layers=24, hidden=2304, heads=24, ffn=9216, **GPT), 32, 512, 3.528, None, 44.0),
    "145B": (Model(layers=80, hidden=12288, heads=96, ffn=49152, **GPT), 1536, 2304, 24.817, None, 47.0),
    "1T": (Model(layers=128, hidden=25600, heads=160, ffn=102400, **GPT), 3072, 3072, 102.63, None, 52.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_mfu_and_hfu_follow_from_their_own_times(name: str) -> None:
    """To 0.2 points; HFU is printed without decimals, so to that more."""
    model, gpus, sequences, seconds, mfu, hfu = PUBLISHED[name]
    tokens = sequences * 2048 / seconds / gpus / 312e12
    if mfu is not None:
        assert 100 * tokens * flops_per_token(model, 2048) == pytest.approx(mfu, abs=0.2)
    if hfu is not None:
        full = case("megatron-2021", model, mode="full")
        assert 100 * tokens * hardware_flops(full) == pytest.approx(hfu, abs=0.5 + 0.2)


def test_overlapped_tensor_parallelism_costs_less_in_both_passes() -> None:
    """Nothing is hidden; the backward's behind the weights' gradients; both behind the products beside them."""
    waits = case(tp=8, dp_shard=1, micro_batch_size=4)
    costs = []
    for facts in ({}, {"overlaps_tensor_parallel": True}, {"overlaps_products": True}):
        block = cost_of_block(with_facts(waits, **facts))
        costs.append((block.times.forward, sum(block.times), block.terms["tensor parallel"]))
    forward, total, sent = zip(*costs, strict=True)
    assert forward[0] == forward[1] > forward[2]
    assert total[0] > total[1] > total[2]
    assert sent[2] == pytest.approx(waits.software.constants.exposed * sent[0])  # as much as may overlap does


def with_facts(of: Case, **facts: Any) -> Case:
    """The same layout under a framework that differs in some facts."""
    return replace(of, software=replace(of.software, **facts))


def test_gathers_and_reductions_at_a_steps_ends_may_overlap() -> None:
    replicated = case(dp_replicate=16, global_batch_size=128)
    waits = predict(with_facts(replicated, overlaps_reduction=False)).terms
    overlaps = predict(with_facts(replicated, overlaps_reduction=True)).terms
    assert overlaps["gradient reduction"] < waits["gradient reduction"]
    zero_1 = case(dp_shard=128, zero_stage=1, global_batch_size=128)
    assert (
        predict(with_facts(zero_1, overlaps_gather=True)).terms["weight gather"]
        < predict(with_facts(zero_1, overlaps_gather=False)).terms["weight gather"]
    )


def test_the_last_reduction_of_fsdp_has_nothing_to_hide_behind() -> None:
    """Of the embedding's table, whose gradient is the last one."""
    of = case(dp_shard=128, zero_stage=3, global_batch_size=128)
    table = of.software.sent_gradients * of.model.vocab * of.model.hidden
    assert predict(of).terms["gradient reduction"] == pytest.approx(of.group([SHARD, CP]).gather(table))


def test_gradients_are_sent_in_their_own_type() -> None:
    of = case(dp_shard=512, global_batch_size=512)
    whole, half = (predict(with_facts(of, reduced=bytes)).terms["fsdp"] for bytes in (4.0, 2.0))
    assert predict(of).terms["fsdp"] == whole > half


def test_inputs_that_are_not_kept_are_gathered_once_more() -> None:
    """Two more gathers per block's backward with sequence parallelism, and none without it."""
    extra = []
    for sequence_parallel in (True, False):
        of = case(tp=8, dp_shard=1, sequence_parallel=sequence_parallel)
        kept, again = (
            cost_of_block(with_facts(of, keeps_gathered=keeps)).terms["tensor parallel"] for keeps in (True, False)
        )
        extra.append(again - kept)
    one = of.group([TP]).gather(2.0 * of.piece.tokens * of.model.hidden) + of.software.constants.wait
    assert extra == [pytest.approx(2 * one), 0.0]
