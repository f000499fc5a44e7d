"""The search against what it stands for: every layout tried with the config's own checks, every layout predicted."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from recipes.plan import read_model
from torchllm.config import SCHEDULES, Cluster, Config, Model, Optimizer, Parallel, Recompute, Training
from torchllm.config.checks import problems
from torchllm.planner.case import Case
from torchllm.planner.predict import Pipeline, Prediction, pipeline_seconds, predict
from torchllm.planner.search.bounds import Bounds, at_least
from torchllm.planner.search.layouts import MODES, DegreeMesh, Job, Layout, divisors
from torchllm.planner.search.search import Ranked, Search, mesh_of, search, sharded
from torchllm.planner.simulate import StageTimes
from torchllm.planner.stage import stage_cost
from torchllm.spec.cluster import Hardware, read_cluster

SMALL = Model(layers=6, hidden=512, heads=8, kv_heads=4, ffn=1536, vocab=1024)
LARGE = Model(layers=8, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
DEEP = Model(layers=80, hidden=8192, heads=64, ffn=22016, vocab=128000)
WIDE = Model(family="gpt", layers=12, hidden=12288, heads=96, ffn=49152, vocab=51200, tied_embeddings=True)


def cluster(name: str = "dgx_a100", **changed: object) -> Hardware:
    found: list[str] = []
    hardware = read_cluster(name, found)
    assert hardware, found
    return replace(hardware, **changed)


def job(model: Model = SMALL, gpus: int = 8, batch: int = 16, length: int = 512, **more: object) -> Job:
    hardware = more.pop("hardware", None) or cluster()
    training = Training(global_batch_size=batch, sequence_length=length)
    return Job(model, training, hardware, gpus, **more)


def every(of: Job) -> list[Layout]:
    """All its layouts, one by one."""
    found = []
    for mesh in of.meshes:
        if of.refusal(mesh):
            continue
        for size in of.pieces(mesh):
            for (name, stages), (replicate, shard, zero, ep), mode, sp, method in product(
                of.schedules(mesh, size),
                of.shardings(mesh),
                of.modes(mesh),
                of.sequence_parallel(mesh),
                of.context_methods(mesh),
            ):
                found.append(
                    Layout(mesh.pp, replicate, shard, mesh.cp, mesh.tp, name, stages, size, zero, mode, sp, method, ep)
                )
    return found


def config_of(of: Job, layout: Layout) -> Config:
    return of.config(Config(), layout)


def test_the_config_accepts_each_layout() -> None:
    """A sample of them, of models whose heads, vocabulary, blocks, sequence and batch divide unevenly."""
    uneven = replace(SMALL, layers=7, vocab=1022, kv_heads=2, heads=6, hidden=384)
    for of in (job(), job(uneven, gpus=12, batch=24), job(WIDE, gpus=16, batch=20, length=1536)):
        layouts = every(of)
        assert len(layouts) == sum(of.count(mesh) for mesh in of.meshes if not of.refusal(mesh))
        assert len(set(layouts)) == len(layouts)
        for layout in random.Random(0).sample(layouts, 300):
            assert not list(problems(config_of(of, layout), of.gpus)), layout
            assert of.accepts(layout)


def test_no_layout_that_the_config_accepts_is_left_out() -> None:
    """All combinations of what may be written, those that run alike taken as one."""
    of = job(replace(SMALL, layers=3, kv_heads=2, heads=2, vocab=1023), gpus=4, batch=6)
    known, left_out = set(every(of)), set()
    degrees = [axes for axes in product(divisors(4), repeat=5) if axes[0] * axes[1] * axes[2] * axes[3] * axes[4] == 4]
    for axes, schedule, stages, size, zero, sp, method in product(
        degrees, SCHEDULES, (1, 2, 3), divisors(6), range(4), (False, True), ("ring", "ulysses")
    ):
        pp, replicate, shard, cp, tp = axes
        if sp and tp == 1:  # runs as without
            continue
        if (pp == 1 and (schedule, stages) != ("1F1B", 1)) or (cp == 1 and method == "ulysses"):
            continue
        if shard * cp == 1 and (zero != 3 if replicate == 1 else True):  # DDP is written with dp_shard
            continue
        if (zero == 0 and replicate > 1) or (zero == 2 and pp > 1):  # 2 acts as 1 under pp
            continue
        if stages == 1 and schedule in ("Interleaved1F1B", "LoopedBFS"):  # 1F1B and GPipe
            continue
        for mode in MODES:
            layout = Layout(*axes, schedule, stages if pp > 1 else 0, size, zero, mode, sp, method)
            if not list(problems(config_of(of, layout), 4)) and layout not in known:
                left_out.add(layout)
    assert not left_out
    assert len(known) > 500


def test_a_mesh_is_refused_with_its_reason() -> None:
    of = job(replace(SMALL, kv_heads=2, heads=6, hidden=384), gpus=12, batch=10)
    assert of.refusal(DegreeMesh(1, 1, 3, 4)) == "tp does not divide model.heads = 6"
    assert of.refusal(DegreeMesh(1, 4, 1, 3)) == "tp does not divide model.kv_heads = 2"
    assert of.refusal(DegreeMesh(12, 1, 1, 1)) == "pp exceeds model.layers = 6"
    assert of.refusal(DegreeMesh(1, 12, 1, 1)) == "the data-parallel ranks do not divide the batch of 10 sequences"
    assert of.refusal(DegreeMesh(1, 1, 12, 1)).startswith("cp divides neither the sequence of 512 tokens")
    assert not of.refusal(DegreeMesh(3, 2, 1, 2))


@pytest.mark.parametrize(
    "of",
    [
        job(gpus=4, batch=8),
        job(gpus=4, batch=8, optimizer=Optimizer(name="muon")),
        job(LARGE, gpus=4, batch=8, length=2048),
        job(LARGE, batch=16, length=4096, fixed={"micro_batch_size": 1}, hardware=cluster(memory=40e9)),
        job(WIDE, gpus=16, batch=16, length=1024, fixed={"cp": 1, "sequence_parallel": True}),
        job(DEEP, gpus=64, batch=2048, length=2048, fixed={"pp": 4, "tp": 4, "cp": 1, "micro_batch_size": 2}),
    ],
    ids=["small", "muon", "large", "tight", "wide", "deep"],
)
def test_the_best_ten_are_those_of_predicting_everything(of: Job) -> None:
    """Without twins: of layouts that agree in all but schedule and sharding, a slower one needs less memory."""
    predicted = [(predict(of.case(layout), at_least), layout) for layout in every(of)]
    fitting = sorted(((one.step, layout) for one, layout in predicted if one.fits), key=lambda pair: pair[0])
    found = search(of)
    slowest = found.best[-1].prediction.step
    exact = []
    for least, layout in fitting:  # those that may be among them
        if least <= slowest * (1 + 1e-9):
            exact.append(Ranked(layout, predict(of.case(layout))))
    exact.sort(key=lambda one: (one.prediction.step, one.prediction.memory.total))
    least_memory: dict[Layout, float] = {}
    expected = []
    for layout, prediction in exact:
        start = layout._replace(dp_replicate=1, dp_shard=1, zero_stage=3, schedule="1F1B", virtual_stages=0)
        if prediction.memory.total < least_memory.get(start, math.inf):
            least_memory[start] = prediction.memory.total
            expected.append(prediction.step)
    assert [one.prediction.step for one in found.best] == pytest.approx(expected[:10], rel=1e-12)
    assert all(of.accepts(one.layout) and one.prediction.fits for one in found.best)
    assert found.layouts == len(predicted) == len(found.best) + found.rejected.total()
    too_large = sum(not one.fits for one, _ in predicted)
    assert found.rejected["more memory than a GPU has"] <= too_large
    if found.misses:
        assert all(miss.over > 0 and miss.prediction.step < found.best[0].prediction.step for miss in found.misses)


def named(model: str, gpus: int, length: int, batch: int) -> Job:
    """A job of train_configs on H100."""
    config = read_model(model).config
    return Job(config.model, Training(sequence_length=length, global_batch_size=batch), cluster("dgx_h100"), gpus)


def test_the_fastest_comes_first() -> None:
    """Of 8B on 64 GPUs it has ZeRO stage 2, which reduces gradients but gathers no weights while it computes."""
    best = search(named("llama3_8b", 64, 8192, 1024)).best
    steps = [one.prediction.step for one in best]
    assert steps == sorted(steps)
    assert len(best) == 10
    assert best[0].layout.zero_stage == 2


def test_few_layouts_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 626,087 layouts. The numbers are about twice those of today."""
    counts = Counter[str]()

    def counting(case: Case, pipeline: Pipeline = pipeline_seconds) -> Prediction:
        counts[pipeline.__name__] += 1
        return predict(case, pipeline)

    monkeypatch.setattr("torchllm.planner.search.search.predict", counting)
    assert search(named("llama3_8b", 64, 8192, 1024)).layouts > 600_000
    assert counts["pipeline_seconds"] <= 60
    assert counts["at_least"] <= 400


def test_bounds_hold() -> None:
    """Of every layout: of time without its schedule and sharding, of both, of memory. Also where stages wait long for
    each other, which the blocks of one do once together."""
    waits = cluster(constants=replace(cluster().constants, wait=0.1))
    for of in (
        job(LARGE, gpus=8, batch=8, length=2048),
        job(WIDE, gpus=16, batch=16, length=1024),
        job(DEEP, gpus=8, batch=64, length=1024, hardware=waits),
        job(LARGE, gpus=8, batch=8, length=2048, optimizer=Optimizer(name="muon")),
        job(replace(SMALL, experts=8, expert_ffn=512, dense_layers=1), gpus=8, batch=16, length=1024),
    ):
        bounds = Bounds(of)
        for layout in random.Random(1).sample(every(of), 400):
            start = layout._replace(
                dp_replicate=1, dp_shard=layout.data_ranks, zero_stage=0, schedule="1F1B", virtual_stages=1
            )
            unsharded = start._replace(schedule=layout.schedule, virtual_stages=layout.virtual_stages)
            alike = [one for one in bounds.shardings(mesh_of(layout)) if one.ep == layout.ep]
            widest = sharded(layout, alike[-1])
            least = predict(of.case(layout), at_least)
            assert least.step <= predict(of.case(layout)).step * (1 + 1e-9), layout
            assert bounds.shared(start) <= least.step * (1 + 1e-9), layout
            assert bounds.scheduled(unsharded) <= bounds.scheduled(layout) * (1 + 1e-9), layout
            assert bounds.scheduled(layout) + bounds.tail(layout) <= least.step * (1 + 1e-9), layout
            assert bounds.held(widest) <= bounds.held(layout) * (1 + 1e-9), layout
            assert bounds.held(layout) <= least.memory.total * (1 + 1e-9), layout


SPARSE = replace(SMALL, experts=8, top_k=2, expert_ffn=256, dense_layers=2)


@pytest.mark.parametrize("model", [SMALL, SPARSE], ids=["dense", "experts"])
def test_what_layouts_share_is_what_each_of_them_has(model: Model) -> None:
    """Costs of stages, tails and memory that were computed for other layouts, beside those of this one alone."""
    of = job(model, batch=16)
    bounds = Bounds(of)
    layouts = every(of)
    drawn = random.Random(0).sample(layouts, 800)
    for layout in drawn:  # fill what is kept, in another order
        bounds.costs(layout, bounds.sizes(layout)), bounds.tail(layout), bounds.held(layout)
    for layout in drawn[:400]:
        case, sizes = of.case(layout), bounds.sizes(layout)
        alone = Bounds(of)
        assert bounds.costs(layout, sizes) == [stage_cost(case, size) for size in sizes], layout
        assert bounds.tail(layout) == alone.tail(layout), layout
        assert bounds.held(layout) == alone.held(layout), layout


def test_the_bound_of_a_schedule_of_equal_stages_without_transfers_is_met() -> None:
    """By schedules that leave the way back empty, of as many micro batches as there are ranks."""
    of = job(replace(SMALL, layers=8, vocab=2), gpus=4, batch=16, fixed={"pp": 4, "recompute": "none"})
    for layout in every(of):
        case = of.case(layout)
        stages = [StageTimes(1.0, 1.2, 0.8)] * case.parallel.stages
        least, _ = at_least(case, stages, 0.0)
        step, _ = pipeline_seconds(case, stages, 0.0)
        assert least <= step, layout
        if case.micro_batches >= 4 and layout.schedule in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"):
            assert least == pytest.approx(step), layout


def test_what_is_fixed_stays() -> None:
    found = search(job(LARGE, batch=32, length=1024, fixed={"tp": 4, "recompute": "full", "micro_batch_size": 2}))
    assert found.best
    for one in found.best:
        assert (one.layout.tp, one.layout.recompute, one.layout.micro_batch_size) == (4, "full", 2)


def test_compiled_blocks_are_not_planned_where_the_config_refuses_them() -> None:
    of = job(fixed={"pp": 2, "schedule": "ZBVZeroBubble"})
    compiled = of.compile_of(search(of).best[0].layout)
    assert (compiled.norm, compiled.block) == (True, False)
    assert job().compile_of(Layout(1, 1, 8, 1, 1)).block
    assert not job(hardware=cluster("this_cpu")).compile_of(Layout(1, 1, 8, 1, 1)).block


def test_least_memory_is_among_those_nearly_as_fast() -> None:
    of = job(LARGE, batch=32, length=2048)
    fastest, small = search(of), search(of, objective="memory")
    assert small.best[0].prediction.memory.total < fastest.best[0].prediction.memory.total
    assert small.best[0].prediction.step <= 1.05 * fastest.best[0].prediction.step
    held = [one.prediction.memory.total for one in small.best]
    assert held == sorted(held)


def test_nothing_fits() -> None:
    found = Search(job(LARGE, gpus=4, batch=4, length=4096, hardware=cluster(memory=12e9))).run()
    assert not found.best
    assert found.least is not None
    assert found.least.over > 0


@pytest.mark.parametrize("memory", [14e9, 24e9, 34e9])
def test_each_layout_that_does_not_fit_is_counted_once(memory: float) -> None:
    """All of them, one by one or in groups, where none fits."""
    found = Search(job(LARGE, gpus=4, batch=4, length=4096, hardware=cluster(memory=memory))).run()
    assert not found.best
    assert found.rejected == {"more memory than a GPU has": found.layouts}


def test_a_config_of_a_layout_keeps_the_rest() -> None:
    of, base = job(), Config(cluster=Cluster("dgx_a100"))
    layout = Layout(2, 1, 2, 1, 2, "Interleaved1F1B", 2, 2, 1, "full", True)
    written = of.config(base, layout)
    assert written.parallel == Parallel(
        pp=2, dp_shard=2, tp=2, schedule="Interleaved1F1B", virtual_stages=2, zero_stage=1, sequence_parallel=True
    )
    assert (written.recompute, written.training.micro_batch_size, written.cluster) == (
        Recompute("full"),
        2,
        base.cluster,
    )
