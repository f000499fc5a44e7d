"""The simplest layout wins where measurements cannot tell it from a faster one, and no pick risks its memory."""

import math
import re
from dataclasses import replace
from functools import cache

import pytest

from torchllm.config import Optimizer, Training
from torchllm.tools.planner.cluster import Host
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.residuals import ANY, LEVELS, RowClass, Spread
from torchllm.tools.planner.search import advice as module
from torchllm.tools.planner.search.advice import (
    LEVELS_OF_SIMPLICITY,
    Advice,
    advice_lines,
    advise,
    level_of,
    only,
    ratio_of,
    simplest,
)
from torchllm.tools.planner.search.compare import compare, why_not
from torchllm.tools.planner.search.first_runs import first_runs, layouts_that_fit
from torchllm.tools.planner.search.layouts import Job, Layout
from torchllm.tools.planner.search.question import read_hardware, read_model
from torchllm.tools.planner.search.search import Found, Ranked, search
from torchllm.tools.planner.validity import RISK, judge, memory_limit


def job(model: str = "llama3_8b", gpus: int = 8, batch: int = 512, cluster: str = "dgx_h100") -> Job:
    config = read_model(model).config
    training = Training(global_batch_size=batch, sequence_length=8192)
    return Job(config.model, training, read_hardware(cluster), gpus)


@cache
def eight() -> Job:
    return job()


@cache
def searched() -> Found:
    return search(eight(), 1)


@cache
def usual_advice() -> Advice:
    return advise(eight(), searched())


def test_levels() -> None:
    for layout, name in [
        (Layout(1, 1, 8, 1, 1), "FSDP"),
        (Layout(1, 8, 1, 1, 1, zero_stage=0), "FSDP"),
        (Layout(1, 2, 4, 1, 1), "HSDP"),
        (Layout(1, 1, 4, 1, 2), "tp"),
        (Layout(2, 1, 2, 1, 2), "pp"),
        (Layout(2, 1, 2, 2, 1), "cp"),
    ]:
        assert LEVELS_OF_SIMPLICITY[level_of(layout)].name == name, layout


def test_a_degree_that_the_run_sets_stays() -> None:
    fixed = replace(eight(), fixed={"tp": 2})
    assert only(fixed, {"tp": 1}) is None
    restricted = only(fixed, {"pp": 1})
    assert restricted is not None
    assert restricted.fixed == {"tp": 2, "pp": 1}


def ranked(seconds: float, dp_shard: int = 8, tp: int = 1) -> Ranked:
    """Return a layout of 8B on 8 GPUs, as if its step took `seconds`."""
    layout = Layout(pp=1, dp_replicate=1, dp_shard=dp_shard, cp=1, tp=tp)
    prediction = predict(eight().case(layout))
    return Ranked(layout, prediction._replace(step=seconds))


def pairs(monkeypatch: pytest.MonkeyPatch, middle: float, half: float) -> None:
    """Let all pairs of measured layouts differ by `middle`, with an interval of `half` to both sides."""
    quantiles = []
    for level in LEVELS:
        from_the_middle = (2 * level - 1) / 0.9  # -1 and 1 at the ends of a 90 % interval
        quantiles.append(middle + half * from_the_middle)
    of_pairs = RowClass(ANY, "+tp", ANY)
    spread = Spread("ratio of two layouts", "framework", of_pairs, rows=100, folds=5, quantiles=tuple(quantiles))
    monkeypatch.setattr(module, "spread_of_pair", lambda simple, complex: spread)


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    for slower, middle, half, is_simple in [
        (1.019, 0.0, 0.0, True),  # within 2 %
        (1.025, 0.0, 0.1, True),  # measurements cannot tell them apart, and little is lost on average
        (1.025, 0.0, 0.01, False),  # they can
        (1.04, 0.0, 0.1, False),  # the expected loss is 4 %
        (1.04, 0.02, 0.1, True),  # tp is usually 2 % slower than predicted: 2 %
    ]:
        pairs(monkeypatch, middle, half)
        plain, fast = ranked(slower), ranked(1.0, dp_shard=4, tp=2)
        taken, reason = simplest(eight(), [plain, fast], fast)
        assert (taken == plain) == is_simple, slower
        assert ("than the fastest to bet on, which needs tp" in reason) == is_simple, slower
    pairs(monkeypatch, 0.1, 0.2)  # tp is usually slower than predicted, by which a ratio is turned
    ratio = ratio_of(eight(), ranked(1.1), ranked(1.0, dp_shard=4, tp=2))
    assert ratio.predicted == pytest.approx(1.1)
    assert ratio.interval == pytest.approx((1.1 * math.exp(-0.3), 1.1 * math.exp(0.1)))
    assert ratio.mean == pytest.approx(1.1 * math.exp(-0.1))


def test_no_pick_of_an_unmeasured_machine_is_above_its_limit() -> None:
    picks = [usual_advice().simple.ranked, usual_advice().bet.ranked]
    for candidate in picks + list(usual_advice().candidates):
        needed = candidate.prediction.memory.total
        assert needed <= memory_limit(eight().hardware)
    assert usual_advice().simple.fits == usual_advice().bet.fits == "fits"
    assert not usual_advice().is_measured
    bad_cases = []  # the bet has the least step time in the bad case
    for candidate in usual_advice().candidates:
        bad_cases.append(judge(eight().case(candidate.layout), candidate.prediction).seconds[1])
    assert usual_advice().bet.seconds[1] == min(bad_cases)


def test_8b_takes_fsdp_or_hsdp() -> None:
    planned = job(gpus=64)
    assert level_of(usual_advice().first.layout) <= 1
    assert level_of(advise(planned, search(planned, 1)).first.layout) <= 1


def test_if_every_layout_is_a_risk_the_roomiest_is_taken_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_limit", lambda hardware: 1.0)
    advice = advise(eight(), searched())
    fastest = searched().best[0]
    assert f"every layout's risk of running out of memory is above {RISK:.0%}" in advice.reason
    assert advice.first.prediction.memory.total < fastest.prediction.memory.total


def test_lines_name_each_layout_once() -> None:
    lines = list(advice_lines(usual_advice()))
    text = usual_advice().first.layout.text()
    assert lines[0] == f"the simple one: {text}"
    assert [line for line in lines if line.endswith(f": {text}")] == [lines[0]]
    assert "s in 9 of 10 cases; out of memory in " in lines[1]
    assert lines[-2].startswith("Take the first: ")
    assert lines[-1].startswith("Intervals: from ")


def numbers_after(start: str, lines: list[str]) -> list[float]:
    """Return the first two numbers of the lines that begin so: of the layout that was asked for, of the first pick."""
    numbers = []
    for line in lines:
        if line.startswith(start):
            words = line.removeprefix(start).split()
            numbers += [float(words[0]), float(words[1])]
    return numbers


def test_another_layout_is_compared_term_by_term() -> None:
    layout = Layout(1, 1, 1, 1, 8, sequence_parallel=True)
    lines = list(compare(eight(), layout, usual_advice()))
    asked = predict(eight().case(layout))
    of_tp = asked.terms["tensor parallel"]
    assert numbers_after("  tensor parallel ", lines) == [pytest.approx(of_tp, rel=1e-3), 0]
    seconds, _, gib, _ = numbers_after("  sum ", lines)
    assert seconds == pytest.approx(asked.step, rel=1e-3)
    assert gib == pytest.approx(asked.memory.total / 2**30, rel=1e-3)
    assert "tensor parallel" in why_not(eight(), Ranked(layout, asked), usual_advice())


def with_more_activations(share: float) -> Ranked:
    """Return the first pick, as if it were faster and had this share of a GPU's memory more of activations."""
    prediction = usual_advice().first.prediction
    memory = prediction.memory
    more = memory._replace(activations=memory.activations + share * eight().hardware.memory)
    is_within = more.total <= eight().hardware.memory
    faster = prediction._replace(step=0.9 * prediction.step, memory=more, fits=is_within)
    return Ranked(usual_advice().first.layout, faster)


def test_a_layout_above_the_limit_is_not_taken_though_it_is_faster() -> None:
    held = usual_advice().first.prediction.memory.total / eight().hardware.memory
    near_full = with_more_activations(0.99 - held)
    too_large = with_more_activations(1.05 - held)
    assert "above a plan's limit of" in why_not(eight(), near_full, usual_advice())
    assert "more than a GPU has; most of it is activations" in why_not(eight(), too_large, usual_advice())


def test_a_layout_without_room_on_the_host_is_told_what_it_needs_there() -> None:
    hardware = replace(eight().hardware, host=Host(bandwidth=30e9, memory_bandwidth=50e9, capacity=2**30))
    job = replace(eight(), hardware=hardware, optimizer=Optimizer(offload=True))
    layout = usual_advice().first.layout
    reason = why_not(job, Ranked(layout, predict(job.case(layout))), usual_advice())
    assert re.fullmatch(
        r"it needs [\d.]+ GiB on the host, more than 80% of the 1\.0 GiB of host memory per GPU", reason
    )


def test_first_runs_fit_and_differ() -> None:
    runs = first_runs(eight(), usual_advice())
    layouts = {run.layout for run in runs}
    candidates = {candidate.layout for candidate in layouts_that_fit(eight(), usual_advice())}
    largest = max(run.prediction.memory.total for run in runs)
    assert len(layouts) == 6
    assert layouts <= candidates
    assert usual_advice().first.layout in candidates
    assert largest <= memory_limit(eight().hardware)
    assert first_runs(eight(), usual_advice(), count=2) == runs[:2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("planned", "layout"),
    [
        # torchtitan's published run: FSDP x tp 8, everything recomputed; here on 64 GPUs
        (job("llama3_70b", 64, 512), Layout(1, 1, 8, 1, 8, recompute="full", sequence_parallel=True)),
        # Dubey et al. 2024 (arXiv 2407.21783), table 4: tp 8, cp 1, pp 16, dp 128
        (
            job("llama3_405b", 16384, 2048, "llama3_24k"),
            Layout(16, 1, 128, 1, 8, "Interleaved1F1B", 2, zero_stage=1, sequence_parallel=True),
        ),
    ],
)
def test_what_public_runs_use_is_close_or_what_speaks_against_it_is_named(planned: Job, layout: Layout) -> None:
    """It is within 5 % of the first pick, or what takes most of the memory, or of the lost time, is named."""
    advice = advise(planned, search(planned, 1))
    case = planned.case(layout)
    prediction = predict(case)
    first = advice.first.prediction
    if abs(prediction.step / first.step - 1) <= 0.05:
        return
    costs = prediction.memory._asdict()
    if prediction.memory.total <= memory_limit(case.hardware):
        assert prediction.step > first.step
        costs = {name: seconds - first.terms.get(name, 0.0) for name, seconds in prediction.terms.items()}
    largest = max(costs, key=lambda name: costs[name])
    reason = why_not(planned, Ranked(layout, prediction), advice)
    assert f"most of it is {largest}, " in reason
