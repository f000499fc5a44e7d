"""The search against an enumeration written apart from it: all that the config accepts, each layout predicted.

By default a sample of small random jobs; `pytest -m lattice --count=300 tests/planner/search/test_enumeration.py` takes
the others of 300. Packed documents are not among them: the cost model takes each sequence as one document.
"""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import pytest

from torchllm.config import SCHEDULES, Config, Lora, Model, Optimizer, Training
from torchllm.config.checks import problems
from torchllm.planner.predict import Prediction, predict
from torchllm.planner.search.layouts import MODES, Job, Layout, divisors
from torchllm.planner.search.search import MEMORY, Search
from torchllm.spec.cluster import Hardware, read_cluster
from torchllm.spec.flops import WITHOUT_LORA

SAMPLE = 25
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
    training = Training(global_batch_size=draw.choice([1, 2, 4, 6]), sequence_length=draw.choice([512, 2048, 8192]))
    hardware = small_nodes(memory=draw.choice([2e9, 4e9, 8e9, 12e9, 20e9, 80e9]))
    gpus = draw.choice([1, 2, 3, 4, 4, 6])
    fixed = {key: draw.choice(values) for key, values in OPEN.items() if draw.random() < 0.1}
    if draw.random() < 0.7:
        fixed["recompute"] = draw.choice(MODES)
    lora = WITHOUT_LORA
    if model.family == "llama" and not model.experts and draw.random() < 0.4:
        lora = Lora(rank=8)
    optimizer = Optimizer(name=draw.choice(["adamw", "adamw", "muon"]))
    return Job(model, training, hardware, gpus, lora=lora, optimizer=optimizer, fixed=fixed)


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
    """Return nodes of two A100 with `memory` bytes each."""
    hardware = read_cluster("dgx_a100", [])
    assert hardware
    inner, *outer = hardware.links
    links = (replace(inner, gpus=2), *outer)
    return replace(hardware, gpus_per_node=2, links=links, memory=memory)


def written_layouts(job: Job) -> Iterator[Layout]:
    """Yield all combinations of keys, but for those that run as another one."""
    sizes = divisors(job.training.global_batch_size)
    experts = divisors(job.model.experts) if job.model.experts else [1]
    for axes in product(divisors(job.gpus), repeat=5):
        if math.prod(axes) != job.gpus:
            continue
        pp, cp = axes[0], axes[3]
        schedules = [(job.fixed.get("schedule", "1F1B"), job.fixed.get("virtual_stages", 0))]
        if pp > 1:
            schedules = list(product(SCHEDULES, range(1, 5)))
        methods = ["ring", "ulysses"] if cp > 1 else [job.fixed.get("cp_method", "ring")]
        for (schedule, stages), *keys in product(schedules, sizes, range(4), MODES, (False, True), methods, experts):
            layout = Layout(*axes, schedule, stages, *keys)
            is_open = all(getattr(layout, key) == value for key, value in job.fixed.items())
            if is_open and not runs_as_another(layout, job.fixed):
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
    base = Config(lora=job.lora, optimizer=job.optimizer)
    predictions = {}
    for layout in written_layouts(job):
        if not any(problems(job.config(base, layout), job.gpus)):
            predictions[layout] = predict(job.case(layout))
    return predictions


def without_twins(predictions: dict[Layout, Prediction], count: int) -> list[Prediction]:
    """Return the fastest that fit.

    Those that differ from a faster one in schedule and split of the data ranks only, and need no less memory, are
    missing.
    """
    least_memory: dict[tuple[object, ...], float] = {}
    best = []
    fastest_first = sorted(predictions.items(), key=lambda item: (item[1].step, item[1].memory.total))
    for layout, prediction in fastest_first:
        mesh = layout.pp, layout.data_ranks, layout.cp, layout.tp
        rest = layout.recompute, layout.sequence_parallel, layout.cp_method, layout.ep
        kind = *mesh, layout.micro_batch_size, *rest
        if prediction.fits and prediction.memory.total < least_memory.get(kind, math.inf):
            least_memory[kind] = prediction.memory.total
            best.append(prediction)
    return best[:count]


def check_job(seed: int) -> None:
    """Search a random job, and compare with predictions of all its layouts."""
    job = random_job(seed)
    outcome = Search(job).run()
    predictions = enumerate_layouts(job)
    expected = without_twins(predictions, 10)
    assert outcome.layouts == len(predictions)
    steps = [ranked.prediction.step for ranked in outcome.best]
    assert steps == pytest.approx([prediction.step for prediction in expected], rel=1e-9)
    for layout, prediction in outcome.best:
        assert prediction == predictions[layout]

    misses = list(outcome.misses)
    if outcome.closest_miss:
        misses.append(outcome.closest_miss)
    for miss in misses:
        prediction = predictions[miss.layout]
        assert not prediction.fits
        assert miss.over == pytest.approx(prediction.memory.total - job.hardware.memory)
    too_large = sum(not prediction.fits for prediction in predictions.values())
    assert outcome.rejected[MEMORY] <= too_large
    if not expected:
        assert outcome.rejected[MEMORY] == len(predictions)
        assert bool(outcome.closest_miss) == bool(predictions)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per further job, so that the time limit of a test is one of a job."""
    if "further_seed" in metafunc.fixturenames:
        count = metafunc.config.getoption("--count")
        jobs = int(count) if count.isdecimal() else SAMPLE
        metafunc.parametrize("further_seed", range(SAMPLE, jobs))


@pytest.mark.parametrize("seed", range(SAMPLE))
def test_search_finds_what_enumeration_finds(seed: int) -> None:
    check_job(seed)


@pytest.mark.lattice
def test_search_finds_what_enumeration_finds_in_more_jobs(further_seed: int) -> None:
    check_job(further_seed)


def test_the_jobs_are_not_all_alike() -> None:
    """Some have no layout, in some nothing fits, in some a part, in some everything."""
    outcomes = set()
    for seed in range(SAMPLE):
        outcome = Search(random_job(seed)).run()
        outcomes.add((bool(outcome.layouts), bool(outcome.best), bool(outcome.rejected[MEMORY])))
    assert outcomes == {(False, False, False), (True, False, True), (True, True, True), (True, True, False)}


def test_the_jobs_have_what_a_search_decides_by() -> None:
    """Among the best layouts of the sample are each recomputation and method of cp, expert parallelism and LoRA."""
    values: dict[str, set[object]] = {"ep": set(), "recompute": set(), "cp_method": set(), "lora": set()}
    for seed in range(SAMPLE):
        job = random_job(seed)
        for layout, _ in Search(job).run().best:
            values["ep"].add(layout.ep)
            values["recompute"].add(layout.recompute)
            values["cp_method"].add(layout.cp_method)
            values["lora"].add(job.lora.is_on)
    assert values["ep"] >= {1, 2, 4}
    assert values["recompute"] == set(MODES)
    assert values["cp_method"] == {"ring", "ulysses"}
    assert values["lora"] == {True, False}
