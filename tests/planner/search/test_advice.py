"""The simplest layout wins where measurements cannot tell it from a faster one, and no pick risks its memory."""

import math
from dataclasses import replace

import pytest

from recipes.plan import read_hardware, read_model
from torchllm.config import Training
from torchllm.planner.evidence.residuals import ANY, LEVELS, RowClass, Spread
from torchllm.planner.predict import predict
from torchllm.planner.search import advice as module
from torchllm.planner.search.advice import (
    LEVELS_OF_SIMPLICITY,
    advice_lines,
    advise,
    level_of,
    only,
    ratio_of,
    simplest,
)
from torchllm.planner.search.compare import compare, why_not
from torchllm.planner.search.first_runs import first_runs, layouts_that_fit
from torchllm.planner.search.layouts import Job, Layout
from torchllm.planner.search.search import Ranked, search
from torchllm.planner.search.validity import UNMEASURED_LIMIT, judge

H100 = read_hardware("dgx_h100")


def job(model: str = "llama3_8b", gpus: int = 8, batch: int = 512, cluster: str = "dgx_h100") -> Job:
    training = Training(global_batch_size=batch, sequence_length=8192)
    return Job(read_model(model).config.model, training, read_hardware(cluster), gpus)


EIGHT = job()
ADVICE = advise(EIGHT, search(EIGHT, 1))


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(1, 1, 8, 1, 1), "FSDP"),
        (Layout(1, 8, 1, 1, 1, zero_stage=0), "FSDP"),
        (Layout(1, 2, 4, 1, 1), "HSDP"),
        (Layout(1, 1, 4, 1, 2), "tp"),
        (Layout(2, 1, 2, 1, 2), "pp"),
        (Layout(2, 1, 2, 2, 1), "cp"),
    ],
)
def test_levels(layout: Layout, name: str) -> None:
    assert LEVELS_OF_SIMPLICITY[level_of(layout)].name == name


def test_a_degree_that_the_run_sets_stays() -> None:
    fixed = replace(EIGHT, fixed={"tp": 2})
    assert only(fixed, {"tp": 1}) is None
    restricted = only(fixed, {"pp": 1})
    assert restricted is not None
    assert restricted.fixed == {"tp": 2, "pp": 1}


def ranked(seconds: float, **degrees: int) -> Ranked:
    layout = Layout(**{"pp": 1, "dp_replicate": 1, "dp_shard": 8, "cp": 1, "tp": 1, **degrees})
    return Ranked(layout, predict(EIGHT.case(layout))._replace(step=seconds))


def pairs(monkeypatch: pytest.MonkeyPatch, middle: float, half: float) -> None:
    """Let all pairs of measured layouts differ by `middle`, with an interval of `half` to both sides."""
    quantiles = tuple(middle + half * (2 * level - 1) / 0.9 for level in LEVELS)
    spread = Spread("ratio of two layouts", "framework", RowClass(ANY, "+tp", ANY), 100, 5, quantiles)
    monkeypatch.setattr(module, "spread_of_pair", lambda simple, complex: spread)


@pytest.mark.parametrize(
    ("slower", "middle", "half", "is_simple"),
    [
        (1.019, 0.0, 0.0, True),  # within 2 %
        (1.025, 0.0, 0.1, True),  # measurements cannot tell them apart, and little is lost on average
        (1.025, 0.0, 0.01, False),  # they can
        (1.04, 0.0, 0.1, False),  # the expected loss is 4 %
        (1.04, 0.02, 0.1, True),  # tp is usually 2 % slower than predicted: 2 %
    ],
)
def test_the_rule(monkeypatch: pytest.MonkeyPatch, slower: float, middle: float, half: float, is_simple: bool) -> None:
    pairs(monkeypatch, middle, half)
    plain, fast = ranked(slower), ranked(1.0, dp_shard=4, tp=2)
    taken, reason = simplest(EIGHT, [plain, fast], fast)
    assert (taken == plain) == is_simple
    assert ("than the fastest to bet on, which needs tp" in reason) == is_simple


def test_a_ratio_is_turned_by_what_the_other_one_usually_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs(monkeypatch, 0.1, 0.2)
    ratio = ratio_of(EIGHT, ranked(1.1), ranked(1.0, dp_shard=4, tp=2))
    assert ratio.predicted == pytest.approx(1.1)
    assert ratio.interval == pytest.approx((1.1 * math.exp(-0.3), 1.1 * math.exp(0.1)))
    assert ratio.mean == pytest.approx(1.1 * math.exp(-0.1))


def test_no_pick_of_an_unmeasured_machine_is_above_its_limit() -> None:
    for candidate in (ADVICE.simple, ADVICE.bet, *ADVICE.candidates):
        held = candidate.ranked if isinstance(candidate, module.Pick) else candidate
        assert held.prediction.memory.total <= UNMEASURED_LIMIT * H100.memory
    assert ADVICE.simple.fits == ADVICE.bet.fits == "fits"
    assert not ADVICE.is_measured


def test_the_bet_has_the_least_step_time_in_the_bad_case() -> None:
    bad = [judge(EIGHT.case(candidate.layout), candidate.prediction).seconds[1] for candidate in ADVICE.candidates]
    assert ADVICE.bet.seconds[1] == min(bad)


def test_if_every_layout_is_a_risk_the_roomiest_is_taken_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_limit", lambda case: 0.0)
    advice = advise(EIGHT, search(EIGHT, 1))
    assert "every layout's risk of running out of memory is above 5%" in advice.reason
    assert advice.first.prediction.memory.total < search(EIGHT, 1).best[0].prediction.memory.total


def test_lines_name_each_layout_once() -> None:
    lines = list(advice_lines(ADVICE))
    text = ADVICE.first.layout.text()
    assert lines[0] == f"the simple one: {text}"
    assert [line for line in lines if line.endswith(f": {text}")] == [lines[0]]
    assert "s in 9 of 10 cases; out of memory in " in lines[1]
    assert lines[-2].startswith("Take the first: ")
    assert lines[-1].startswith("Intervals: from ")


def test_another_layout_is_compared_term_by_term() -> None:
    layout = Layout(1, 1, 1, 1, 8, sequence_parallel=True)
    lines = list(compare(EIGHT, layout, ADVICE))
    public = predict(EIGHT.case(layout))
    [row] = [line for line in lines if line.startswith("  tensor parallel ")]
    assert float(row.split()[2]) == pytest.approx(public.terms["tensor parallel"], rel=1e-3)
    assert float(row.split()[3]) == 0
    sums = [line.split() for line in lines if line.startswith("  sum ")]
    assert float(sums[0][1]) == pytest.approx(public.step, rel=1e-3)
    assert float(sums[1][1]) == pytest.approx(public.memory.total / 2**30, rel=1e-3)
    assert "tensor parallel" in why_not(EIGHT, Ranked(layout, public), ADVICE)


def test_a_layout_above_the_limit_is_not_taken_though_it_is_faster() -> None:
    fastest = search(EIGHT, 1).best[0]
    assert "GiB up to which a plan goes" in why_not(EIGHT, fastest, ADVICE)
    huge = Ranked(fastest.layout._replace(micro_batch_size=8), predict(EIGHT.case(fastest.layout)))
    too_large = huge.prediction._replace(fits=False)
    assert "more than a GPU has" in why_not(EIGHT, Ranked(fastest.layout, too_large), ADVICE)


def test_first_runs_fit_and_differ() -> None:
    runs = first_runs(EIGHT, ADVICE)
    assert len({ranked.layout for ranked in runs}) == 6
    candidates = {ranked.layout for ranked in layouts_that_fit(EIGHT, ADVICE)}
    assert {ranked.layout for ranked in runs} <= candidates
    assert ADVICE.first.layout in candidates
    assert all(ranked.prediction.memory.total <= UNMEASURED_LIMIT * H100.memory for ranked in runs)
    assert first_runs(EIGHT, ADVICE, count=2) == runs[:2]


@pytest.mark.parametrize("gpus", [8, 64])
def test_8b_takes_fsdp_or_hsdp(gpus: int) -> None:
    planned = job(gpus=gpus)
    assert level_of(advise(planned, search(planned, 1)).first.layout) <= 1


PUBLIC = {
    # torchtitan's published run of the 70B: FSDP x tp 8, everything recomputed
    "70b": ("llama3_70b", 64, "dgx_h100", 512, Layout(1, 1, 8, 1, 8, recompute="full", sequence_parallel=True)),
    # Dubey et al. 2024 (arXiv 2407.21783), table 4: tp 8, cp 1, pp 16, dp 128
    "405b": (
        "llama3_405b",
        16384,
        "llama3_24k",
        2048,
        Layout(16, 1, 128, 1, 8, "Interleaved1F1B", 2, zero_stage=1, sequence_parallel=True),
    ),
}


@pytest.mark.parametrize("name", ["70b", pytest.param("405b", marks=pytest.mark.every_run)])
def test_what_public_runs_use_is_close_or_the_term_against_it_is_named(name: str) -> None:
    model, gpus, cluster, batch, layout = PUBLIC[name]
    planned = job(model, gpus, batch, cluster)
    advice = advise(planned, search(planned, 1))
    public = Ranked(layout, predict(planned.case(layout)))
    if abs(public.prediction.step / advice.first.prediction.step - 1) > 0.05:
        assert any(term in why_not(planned, public, advice) for term in [*public.prediction.terms, "GiB", "faster"])


def test_half_the_network_costs_a_data_parallel_plan_what_its_bytes_say() -> None:
    """Of 8B on 64 GPUs with ZeRO 2, gradients and weights pass the network once a step."""
    planned = job(gpus=64)
    node, *network = planned.hardware.links
    slow = replace(
        planned,
        hardware=replace(
            planned.hardware, links=(node, *(replace(link, bandwidth=link.bandwidth / 2) for link in network))
        ),
    )
    layout = Layout(1, 1, 64, 1, 1, zero_stage=2)
    fast_terms, slow_terms = predict(planned.case(layout)).terms, predict(slow.case(layout)).terms
    changed = {name for name in fast_terms if slow_terms[name] > fast_terms[name] * 1.001}
    assert changed <= {"fsdp", "weight gather", "gradient reduction"}
    assert slow_terms["weight gather"] == pytest.approx(2 * fast_terms["weight gather"], rel=0.05)
