"""How the search decides early: its bounds hold, and little is predicted. `test_enumeration.py` has what it finds."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from tests.tools.planner.test_comms import cluster
from torchllm.config import Model, Training
from torchllm.facts.parts.attention import PART
from torchllm.facts.parts.registry import MIXERS_OF_FORKS
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.parameters import StageSize
from torchllm.tools.planner.peak import Memory
from torchllm.tools.planner.predict import Pipeline, Prediction, memory_of, pipeline_seconds, predict
from torchllm.tools.planner.search.bounds import Bounds, at_least
from torchllm.tools.planner.search.layouts import DegreeMesh, Job, Layout
from torchllm.tools.planner.search.question import read_model
from torchllm.tools.planner.search.search import mesh_of, search, sharded

SMALL = Model(layers=6, hidden=512, heads=8, kv_heads=4, ffn=1536, vocab=1024)
LARGE = Model(layers=8, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)


def make_job(model: Model = SMALL, gpus: int = 8, batch: int = 16, length: int = 512, **fields: object) -> Job:
    """Return a job on A100, unless `fields` names other hardware."""
    training = Training(global_batch_size=batch, sequence_length=length)
    hardware = fields.pop("hardware", None) or cluster()
    return Job(model, training, hardware, gpus, **fields)


def all_layouts(job: Job) -> list[Layout]:
    """Return all layouts of a job, one by one."""
    layouts: list[Layout] = []
    for mesh in job.meshes:
        if not job.refusal(mesh):
            layouts += layouts_of_mesh(job, mesh)
    return layouts


def layouts_of_mesh(job: Job, mesh: DegreeMesh) -> Iterator[Layout]:
    """Yield all layouts of a mesh."""
    settings = list(product(job.modes(mesh), job.sequence_parallel(mesh), job.context_methods(mesh)))
    for size in job.pieces(mesh):
        for schedule, stages in job.schedules(mesh, size):
            for sharding, (mode, sp, method) in product(job.shardings(mesh), settings):
                layout = Layout(mesh.pp, 1, 1, mesh.cp, mesh.tp, schedule, stages, size, 0, mode, sp, method)
                yield sharded(layout, sharding)


def test_a_mesh_is_refused_with_its_reason() -> None:
    job = make_job(replace(SMALL, kv_heads=2, heads=6, hidden=384), gpus=12, batch=10)
    assert job.refusal(DegreeMesh(1, 1, 3, 4)) == "tp does not divide model.heads = 6"
    assert job.refusal(DegreeMesh(1, 4, 1, 3)) == "tp does not divide model.kv_heads = 2"
    assert job.refusal(DegreeMesh(12, 1, 1, 1)) == "pp exceeds model.layers = 6"
    assert job.refusal(DegreeMesh(1, 12, 1, 1)) == "the data-parallel ranks do not divide the batch of 10 sequences"
    assert job.refusal(DegreeMesh(1, 1, 12, 1)).startswith("cp divides neither the sequence of 512 tokens")
    assert not job.refusal(DegreeMesh(3, 2, 1, 2))


def test_heads_of_a_recurrence_are_those_that_ranks_share() -> None:
    """tp divides attention's heads, which the model has not."""
    job = make_job(replace(SMALL, mixer="gated_delta", delta_key_heads=2, delta_value_heads=4))
    assert job.refusal(DegreeMesh(1, 2, 1, 4)) == "tp does not divide model.delta_key_heads = 2"
    assert not job.refusal(DegreeMesh(1, 4, 1, 2))
    assert job.context_methods(DegreeMesh(1, 4, 2, 1)) == ["ring", "ulysses"]
    assert job.context_methods(DegreeMesh(1, 2, 2, 2)) == ["ring"]


def test_a_mixer_that_cannot_share_a_sequence_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS_OF_FORKS, "mine", replace(PART, name="mine", context=""))
    job = make_job(replace(SMALL, mixer="mine"))
    reason = "blocks with model.mixer = 'mine' cannot share a sequence with other ranks"
    assert job.refusal(DegreeMesh(1, 4, 2, 1)) == reason
    assert not job.refusal(DegreeMesh(1, 4, 1, 2))


def job_of_model(model: str, gpus: int, length: int, batch: int) -> Job:
    """Return a job of a model of train_configs/models on H100."""
    config = read_model(model).config
    training = Training(sequence_length=length, global_batch_size=batch)
    return Job(config.model, training, cluster("dgx_h100"), gpus)


def test_few_layouts_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 626,087 layouts. The numbers are about twice those of today."""
    counts = Counter[str]()

    def counting(case: Case, pipeline: Pipeline = pipeline_seconds) -> Prediction:
        counts[pipeline.__name__] += 1
        return predict(case, pipeline)

    monkeypatch.setattr("torchllm.tools.planner.search.search.predict", counting)
    outcome = search(job_of_model("llama3_8b", 64, 8192, 1024))
    assert outcome.layouts > 600_000
    assert counts["pipeline_seconds"] <= 60
    assert counts["at_least"] <= 400


def test_of_few_ranks_the_whole_memory_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral on 64 GPUs, of whose starts most need too much memory under any schedule. About twice today's number."""
    ranks = []

    def counting(case: Case, sizes: list[StageSize], rank: int) -> Memory:
        ranks.append(rank)
        return memory_of(case, sizes, rank)

    monkeypatch.setattr("torchllm.tools.planner.search.bounds.memory_of", counting)
    found = search(job_of_model("mixtral_8x7b", 64, 4096, 1024))
    assert found.layouts > 2_000_000
    assert len(ranks) <= 150
    assert ranks.count(0) >= len(ranks) / 2  # the last rank only where the first one fits


@pytest.mark.parametrize("model", [LARGE, replace(SMALL, experts=8, expert_ffn=512, dense_layers=1)])
def test_bounds_of_memory_hold(model: Model) -> None:
    """Sharding is decided last, and costs least when it is open. test_enumeration.py has the bounds of seconds."""
    job = make_job(model, gpus=8, batch=8, length=2048)
    bounds = Bounds(job)
    for layout in random.Random(1).sample(all_layouts(job), 150):
        unsharded = layout._replace(dp_replicate=1, dp_shard=layout.data_ranks, zero_stage=0)
        possible = [sharding for sharding in job.shardings(mesh_of(layout)) if sharding.ep == layout.ep]
        smallest = sharded(layout, possible[-1])
        held = bounds.held(layout)
        assert bounds.held(smallest) <= held * (1 + 1e-9), layout
        assert held <= predict(job.case(layout), at_least).memory.total * (1 + 1e-9), layout
        assert bounds.in_flight(unsharded) == bounds.in_flight(layout), layout


def test_blocks_are_compiled_on_gpus_where_the_config_accepts_it() -> None:
    layout = Layout(pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1)
    on_gpus = make_job().compile_of(layout)
    on_a_cpu = make_job(hardware=cluster("this_cpu")).compile_of(layout)
    assert on_gpus.block
    assert not on_a_cpu.block
    split_backward = make_job(fixed={"pp": 2, "schedule": "ZBVZeroBubble"})
    compiled = split_backward.compile_of(search(split_backward).best[0].layout)
    assert compiled.norm
    assert not compiled.block  # which the config refuses


def test_least_memory_is_among_those_nearly_as_fast() -> None:
    job = make_job(LARGE, batch=32, length=2048)
    fastest = search(job).best[0].prediction
    small = [ranked.prediction for ranked in search(job, objective="memory").best]
    assert small[0].memory.total < fastest.memory.total
    assert small[0].step <= 1.05 * fastest.step
    totals = [prediction.memory.total for prediction in small]
    assert totals == sorted(totals)


def test_bounds_of_another_search_change_nothing() -> None:
    """With less memory and fewer axes, as the advice searches after the first time."""
    job = make_job(LARGE, batch=32, length=2048)
    bounds = search(job).bounds
    smaller = replace(job, hardware=cluster(memory=60e9), fixed={"cp": 1})
    shared = search(smaller, bounds=bounds)
    alone = search(smaller)
    assert shared.best == alone.best
    assert shared.rejected == alone.rejected
    assert shared.misses == alone.misses


def test_the_bound_of_what_regather_frees_holds() -> None:
    """The search looks at it where it may free enough; memory includes the allocator's rest."""
    job = make_job(LARGE, gpus=8, batch=8, length=65536)  # mostly activations
    bounds = Bounds(job)
    layouts = [layout for layout in all_layouts(job) if job.regather(layout) == [False, True]]
    tightest = 0.0
    for layout in random.Random(1).sample(layouts, 40):
        kept, again = (
            predict(job.case(layout._replace(regather=regather)), at_least).memory.total for regather in (False, True)
        )
        freed = (kept - again) / kept / bounds.freed_by_regather(layout)
        assert freed <= 1, layout
        tightest = max(tightest, freed)
    assert tightest > 0.5
