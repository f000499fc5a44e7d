"""The search against an enumeration written apart from it: all that the config accepts, each layout predicted.

By default a sample of small random jobs; `pytest -m lattice --count=300 tests/planner/search/test_enumeration.py` takes
as many as --count says.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from torchllm.config import SCHEDULES, Config, Lora, Model, Optimizer, Training
from torchllm.config.checks import problems
from torchllm.planner.predict import Prediction, predict
from torchllm.planner.search.layouts import MODES, Job, Layout, divisors
from torchllm.planner.search.search import MEMORY, Search
from torchllm.spec.cluster import read_cluster
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
    """A model whose sizes divide in some layouts only, two GPUs a node, and memory that is often too small."""
    draw = random.Random(seed)
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
    if model.family == "llama" and draw.random() < 0.3:
        model = replace(model, experts=4, expert_ffn=1024, dense_layers=draw.randint(0, 1), tied_embeddings=False)
    hardware = read_cluster("dgx_a100", [])
    assert hardware
    inner, *outer = hardware.links
    hardware = replace(
        hardware,
        gpus_per_node=2,
        links=(replace(inner, gpus=2), *outer),
        memory=draw.choice([4e9, 8e9, 12e9, 20e9, 80e9]),
    )
    training = Training(global_batch_size=draw.choice([1, 2, 4, 6]), sequence_length=draw.choice([512, 2048, 8192]))
    fixed = {key: draw.choice(values) for key, values in OPEN.items() if draw.random() < 0.1}
    if draw.random() < 0.7:
        fixed["recompute"] = draw.choice(MODES)
    lora = Lora(rank=8) if model.family == "llama" and not model.experts and draw.random() < 0.4 else WITHOUT_LORA
    optimizer = Optimizer(name=draw.choice(["adamw", "adamw", "muon"]))
    return Job(model, training, hardware, draw.choice([1, 2, 3, 4, 4, 6]), lora=lora, optimizer=optimizer, fixed=fixed)


def combinations(of: Job) -> Iterator[Layout]:
    """Yield all combinations of keys; of those that run alike one."""
    fixed = of.fixed
    degrees = [each for each in product(divisors(of.gpus), repeat=5) if math.prod(each) == of.gpus]
    for axes, size, zero, sp in product(degrees, divisors(of.training.global_batch_size), range(4), (False, True)):
        pp, replicate, shard, cp, tp = axes
        if sp and tp == 1:  # runs as without
            continue
        if shard * cp == 1 and (replicate > 1 or zero != fixed.get("zero_stage", 3)):  # DDP is written with dp_shard
            continue
        if zero == 0 and replicate > 1:
            continue
        if zero == 2 and pp > 1 and fixed.get("zero_stage") != 2:  # acts as 1
            continue
        methods = ["ring", "ulysses"] if cp > 1 else [fixed.get("cp_method", "ring")]
        schedules = [(fixed.get("schedule", "1F1B"), fixed.get("virtual_stages", 0))]
        if pp > 1:
            schedules = list(product(SCHEDULES, range(1, 5)))
        experts = divisors(of.model.experts) if of.model.experts else [1]
        for (schedule, stages), method, mode, ep in product(schedules, methods, MODES, experts):
            if stages == 1 and schedule in ("Interleaved1F1B", "LoopedBFS"):  # 1F1B and GPipe
                continue
            layout = Layout(*axes, schedule, stages, size, zero, mode, sp, method, ep)
            if all(getattr(layout, key) == value for key, value in fixed.items()):
                yield layout


def enumerated(of: Job) -> dict[Layout, Prediction]:
    """Predict every layout that the config accepts."""
    found = {}
    for layout in combinations(of):
        if not problems(of.config(Config(lora=of.lora, optimizer=of.optimizer), layout), of.gpus):
            found[layout] = predict(of.case(layout))
    return found


def without_twins(predicted: dict[Layout, Prediction], count: int) -> list[Prediction]:
    """The fastest that fit, without those that differ from a faster one in schedule and split of the data ranks only,
    and need no less memory."""
    least: dict[tuple[object, ...], float] = {}
    best = []
    for layout, prediction in sorted(predicted.items(), key=lambda item: (item[1].step, item[1].memory.total)):
        same = layout.pp, layout.data_ranks, layout.cp, layout.tp, layout.micro_batch_size, *layout[9:]
        if prediction.fits and prediction.memory.total < least.get(same, math.inf):
            least[same] = prediction.memory.total
            best.append(prediction)
    return best[:count]


def check(seed: int) -> None:
    of = random_job(seed)
    predicted = enumerated(of)
    found = Search(of).run()
    expected = without_twins(predicted, 10)
    assert found.layouts == len(predicted)
    assert [one.prediction.step for one in found.best] == pytest.approx([one.step for one in expected], rel=1e-9)
    for layout, prediction in found.best:
        assert prediction == predicted[layout]
    for miss in [*found.misses, *([found.least] if found.least else [])]:
        assert not predicted[miss.layout].fits
        assert miss.over == pytest.approx(predicted[miss.layout].memory.total - of.hardware.memory)
    too_large = sum(not one.fits for one in predicted.values())
    assert found.rejected[MEMORY] <= too_large
    if not expected:
        assert found.rejected[MEMORY] == len(predicted)
        assert bool(found.least) == bool(predicted)


@pytest.mark.parametrize("seed", range(SAMPLE))
def test_search_finds_what_enumeration_finds(seed: int) -> None:
    check(seed)


@pytest.mark.lattice
def test_search_finds_what_enumeration_finds_in_more_jobs(request: pytest.FixtureRequest) -> None:
    for seed in range(SAMPLE, int(request.config.getoption("--count"))):
        check(seed)


def test_the_jobs_are_not_all_alike() -> None:
    """Some have no layout, in some nothing fits, in some a part, in some everything."""
    outcomes = set()
    for seed in range(SAMPLE):
        found = Search(random_job(seed)).run()
        outcomes.add((bool(found.layouts), bool(found.best), bool(found.rejected[MEMORY])))
    assert outcomes == {(False, False, False), (True, False, True), (True, True, True), (True, True, False)}
