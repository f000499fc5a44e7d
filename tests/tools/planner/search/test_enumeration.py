"""The search against an enumeration written apart from it: all that the config accepts, each layout predicted.

By default ten small random jobs; `pytest -m exhaustive tests/tools/planner/search/test_enumeration.py` takes 300.
Packed documents are not among them: the cost model takes each sequence as one document.
"""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Literal

import pytest

from tests.tools.planner.test_comms import cluster
from torchllm.config import SCHEDULES, Config, Model, Optimizer, Training
from torchllm.config.schema import Lora
from torchllm.tools.config.checks import problems
from torchllm.tools.planner.cluster import Hardware
from torchllm.tools.planner.predict import Prediction, predict
from torchllm.tools.planner.search.layouts import MODES, ContextMethod, Job, Layout, divisors
from torchllm.tools.planner.search.search import MEMORY, NEARLY, Found, Search

FOUND_FAULTS = (140, 190, 239, 286)
"""seeds of jobs that found faults: in memory of dense blocks beside sparse ones, in the choice of the moment at which
most is reserved, and in this enumeration"""
JOBS = (1, 6, 7, 8, 18, 20, *FOUND_FAULTS)
"""seeds of the jobs that are tried by default"""
OPEN = {
    "tp": [1, 2],
    "cp": [1, 2],
    "pp": [1, 2, 3],
    "dp_shard": [1, 2],
    "dp_replicate": [1, 2],
    "zero_stage": [0, 1, 2, 3],
    "schedule": ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"],
    "micro_batch_size": [1, 2],
    "sequence_parallel": [False],
    "cp_method": ["ring", "ulysses"],
    "ep": [1, 2],
}
"""keys that a job may fix, with values"""


def random_job(seed: int) -> Job:
    """Return a model whose sizes divide in some layouts only, two GPUs per node, and memory that is often too small."""
    draw = random.Random(seed)
    model = random_model(draw)
    batch = draw.choice([1, 2, 4, 6])
    length = draw.choice([512, 2048, 8192])
    training = Training(global_batch_size=batch, sequence_length=length)
    memory = draw.choice([2e9, 4e9, 8e9, 12e9, 20e9, 80e9])
    hardware = small_nodes(memory)
    gpus = draw.choice([1, 2, 3, 4, 4, 6])
    fixed = {}
    for key, values in OPEN.items():
        if draw.random() < 0.1:
            fixed[key] = draw.choice(values)
    if draw.random() < 0.7:
        fixed["recompute"] = draw.choice(MODES)
    lora = Lora()
    if model.family == "llama" and not model.experts and draw.random() < 0.4:
        lora = Lora(rank=8)
    name: Literal["adamw", "muon"] = draw.choice(["adamw", "adamw", "muon"])
    optimizer = Optimizer(name="adamw" if lora.rank else name)  # Muon does not train the matrices of LoRA
    if seed % 3 == 0:  # moments in blocks of 32, an odd number per row: tp must not cut them
        optimizer = replace(optimizer, state_dtype="int8")
        model = replace(model, ffn=32 * 97, expert_ffn=32 * 33 if model.experts else 0)
    return Job(model, training, hardware, gpus, trained=Config(lora=lora).trained, optimizer=optimizer, fixed=fixed)


def random_model(draw: random.Random) -> Model:
    """Return a small model of either family, some with experts."""
    model = Model(
        family=draw.choice(["llama", "gpt"]),
        layers=draw.randint(2, 5),
        hidden=draw.choice([1024, 4096]),
        heads=8,
        kv_heads=draw.choice([1, 2, 8]),
        ffn=draw.choice([3072, 11008]),
        vocab=draw.choice([1023, 32000]),
        max_sequence_length=8192,
        tied_embeddings=draw.random() < 0.3,
    )
    if model.family == "llama" and draw.random() < 0.6:
        width = draw.choice([1024, 4096])
        dense_layers = draw.randint(0, 1)
        model = replace(model, experts=4, expert_ffn=width, dense_layers=dense_layers, tied_embeddings=False)
    return model


def small_nodes(memory: float) -> Hardware:
    inner, *outer = cluster().links
    links = (replace(inner, gpus=2), *outer)
    return cluster(gpus_per_node=2, links=links, memory=memory)


def written_layouts(job: Job) -> Iterator[Layout]:
    """Yield all combinations of keys, but for those that run as another one."""
    fixed = job.fixed
    sizes = divisors(job.training.global_batch_size)
    zero_stages = range(4)
    expert_degrees = divisors(job.model.experts) if job.model.experts else [1]
    all_schedules = list(product(SCHEDULES, range(1, 5)))
    only_schedule = fixed.get("schedule", "1F1B"), fixed.get("virtual_stages", 0)
    only_method = fixed.get("cp_method", "ring")
    for axes in product(divisors(job.gpus), repeat=5):
        if math.prod(axes) != job.gpus:
            continue
        pp, _, _, cp, _ = axes
        schedules = all_schedules if pp > 1 else [only_schedule]
        methods = ["ring", "ulysses"] if cp > 1 else [only_method]
        settings = product(sizes, zero_stages, MODES, (False, True), methods, expert_degrees)
        for keys, (schedule, stages) in product(settings, schedules):
            layout = Layout(*axes, schedule, stages, *keys)
            values = layout._asdict()
            if fixed.items() <= values.items() and not runs_as_another(layout, fixed):
                yield layout


def runs_as_another(layout: Layout, fixed: Mapping[str, object]) -> bool:
    """Return whether the search lists another layout instead, which runs in the same way."""
    if layout.sequence_parallel and layout.tp == 1:
        return True
    if layout.virtual_stages == 1 and layout.schedule in ("Interleaved1F1B", "LoopedBFS"):  # 1F1B and GPipe
        return True
    if layout.dp_shard * layout.cp == 1:  # DDP is written with dp_shard, and without data ranks no stage shards
        return layout.dp_replicate > 1 or layout.zero_stage != fixed.get("zero_stage", 3)
    if layout.zero_stage == 0:
        return layout.dp_replicate > 1
    return layout.zero_stage == 2 and layout.pp > 1 and fixed.get("zero_stage") != 2  # acts as 1


def enumerate_layouts(job: Job) -> dict[Layout, Prediction]:
    """Predict every layout that the config accepts."""
    base = Config(lora=Lora(rank=job.trained.rank), optimizer=job.optimizer)
    predictions = {}
    for layout in written_layouts(job):
        config = job.config(base, layout)
        if not any(problems(config, job.gpus)):
            predictions[layout] = predict(job.case(layout))
    return predictions


def with_fewer_cp_ranks(layout: Layout, method_without_cp: ContextMethod) -> Iterator[Layout]:
    """Yield the layouts whose ranks compute as many tokens, of fewer sequences that are cut into fewer parts.

    method_without_cp: what `cp_method` is where nothing is cut.
    """
    for parts in divisors(layout.cp)[1:]:
        if layout.micro_batch_size % parts == 0:
            yield layout._replace(
                cp=layout.cp // parts,
                micro_batch_size=layout.micro_batch_size // parts,
                dp_shard=layout.dp_shard * parts,
                cp_method=layout.cp_method if layout.cp > parts else method_without_cp,
            )


def is_cut_in_vain(layout: Layout, predictions: dict[Layout, Prediction], method_without_cp: ContextMethod) -> bool:
    """Return whether fewer cp ranks do the same. They must not take longer, nor need more memory."""
    for twin in with_fewer_cp_ranks(layout, method_without_cp):
        if twin in predictions:
            assert predictions[twin].step <= predictions[layout].step * (1 + 1e-9)
            assert predictions[twin].memory.total <= predictions[layout].memory.total * (1 + 1e-9)
            return True
    return False


def without_twins(
    predictions: dict[Layout, Prediction], count: int, method_without_cp: ContextMethod
) -> list[Prediction]:
    """Return the fastest that fit.

    Those that differ from a faster one in schedule and split of the data ranks only, and need no less memory, are
    missing; and those that cut sequences in vain.
    """
    least_memory: dict[Layout, float] = {}
    best = []
    fastest_first = sorted(predictions, key=lambda layout: speed_and_size(predictions[layout]))
    for layout in fastest_first:
        prediction = predictions[layout]
        memory = prediction.memory.total
        twin = layout._replace(dp_replicate=1, dp_shard=layout.data_ranks, zero_stage=0)
        twin = twin._replace(schedule="1F1B", virtual_stages=0)
        if is_cut_in_vain(layout, predictions, method_without_cp):
            continue
        if prediction.fits and memory < least_memory.get(twin, math.inf):
            least_memory[twin] = memory
            best.append(prediction)
    return best[:count]


def speed_and_size(prediction: Prediction) -> tuple[float, float]:
    """Return by what predictions are ordered: their step, then their memory."""
    return prediction.step, prediction.memory.total


@cache
def searched(seed: int) -> tuple[Job, Found]:
    """Return a random job, and what a search finds."""
    job = random_job(seed)
    return job, Search(job).run()


def check_job(job: Job, outcome: Found) -> None:
    """Compare what a search has found with predictions of all layouts of the job."""
    predictions = enumerate_layouts(job)
    method_without_cp = job.fixed.get("cp_method", "ring")
    assert outcome.layouts == len(predictions)
    predictions_once = predictions
    predictions = predictions | dict(gathered_again(job, predictions))
    expected = without_twins(predictions, 10, method_without_cp)
    steps = [ranked.prediction.step for ranked in outcome.best]
    expected_steps = [prediction.step for prediction in expected]
    assert steps == pytest.approx(expected_steps, rel=1e-9)
    for layout, prediction in outcome.best:
        assert prediction == predictions[layout]
        assert job.accepts(layout)

    check_near_misses(job, outcome, predictions)
    misses = list(outcome.misses)
    if outcome.closest_miss:
        misses.append(outcome.closest_miss)
    for miss in misses:
        prediction = predictions[miss.layout]
        over = prediction.memory.total - job.hardware.memory
        assert not prediction.fits
        assert miss.over == pytest.approx(over)
    predictions = predictions_once
    too_large = sum(not prediction.fits for prediction in predictions.values())
    assert outcome.rejected[MEMORY] <= too_large
    if 0 < len(expected) < 10:  # all were looked at, but those that cut sequences in vain
        in_vain = [layout for layout in predictions if is_cut_in_vain(layout, predictions, method_without_cp)]
        assert outcome.rejected[MEMORY] == too_large - sum(not predictions[layout].fits for layout in in_vain)
    if not expected:
        assert outcome.rejected[MEMORY] == len(predictions)
        assert bool(outcome.closest_miss) == bool(predictions)


def gathered_again(job: Job, predictions: dict[Layout, Prediction]) -> Iterator[tuple[Layout, Prediction]]:
    """Yield the layouts that do not fit with inputs that are gathered again instead of kept, if they keep any."""
    for layout, prediction in predictions.items():
        if not prediction.fits and job.regather(layout) == [False, True]:
            again = layout._replace(regather=True)
            yield again, predict(job.case(again))


def check_near_misses(job: Job, outcome: Found, predictions: dict[Layout, Prediction]) -> None:
    """Check that there are near misses, if any layout is faster than the best and needs up to a quarter more memory."""
    if not outcome.best:
        assert not outcome.misses
        return
    fastest = outcome.best[0].prediction.step
    most_memory = (1 + NEARLY) * job.hardware.memory
    for miss in outcome.misses:
        assert miss.prediction.step < fastest
        assert job.hardware.memory < miss.prediction.memory.total <= most_memory
    nearly_fit = [
        prediction
        for prediction in predictions.values()
        if prediction.step < fastest * (1 - 1e-9) and prediction.memory.total <= most_memory
    ]
    assert bool(outcome.misses) >= bool(nearly_fit)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.exhaustive] if seed in FOUND_FAULTS else []) for seed in JOBS]
)
def test_search_finds_what_enumeration_finds(seed: int) -> None:
    check_job(*searched(seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 300, 20))
def test_search_finds_what_enumeration_finds_in_more_jobs(first: int) -> None:
    for seed in range(first, first + 20):
        job = random_job(seed)
        check_job(job, Search(job).run())


def kind_of(outcome: Found) -> str:
    """Return in words how much a search has found."""
    if outcome.layouts == 0:
        return "no layout"
    if not outcome.best:
        return "nothing fits"
    return "a part fits" if outcome.rejected[MEMORY] else "everything fits"


def test_the_jobs_have_what_a_search_decides_by() -> None:
    """In some nothing fits, in some a part; among the best are all kinds of recomputation, ep, cp, LoRA and Muon."""
    jobs, outcomes = zip(*map(searched, JOBS), strict=True)
    kinds = {kind_of(outcome) for outcome in outcomes}
    layouts = [ranked.layout for outcome in outcomes for ranked in outcome.best]
    assert kinds == {"no layout", "nothing fits", "a part fits", "everything fits"}
    assert {layout.ep for layout in layouts} >= {1, 2, 4}
    assert {layout.recompute for layout in layouts} == set(MODES)
    assert {layout.cp_method for layout in layouts} == {"ring", "ulysses"}
    assert {job.trained.only_updates for job in jobs} == {True, False}
    assert {job.optimizer.name for job in jobs} == {"adamw", "muon"}
