"""The key that makes a job fit: it does so alone, no other is faster, and the message has it with its price."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.tools.planner.search.test_enumeration import gathered_again
from tests.tools.planner.search.test_search import LARGE, SMALL, all_layouts, cluster, make_job
from torchllm.config import Compile, Config, Optimizer
from torchllm.tools.planner.cluster import Host
from torchllm.tools.planner.offload import USABLE
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.advice import within_risk
from torchllm.tools.planner.search.dials import WORTH, cheapest_dial, dial_lines, dial_sets, dials, turn_dials
from torchllm.tools.planner.search.explain import fits_nowhere
from torchllm.tools.planner.search.layouts import Job, Layout
from torchllm.tools.planner.search.search import HOST_MEMORY, search

HOST = Host(bandwidth=30e9, memory_bandwidth=50e9)


def job_with(memory: float, host: Host = HOST, optimizer: Optimizer | None = None) -> Job:
    """Return a job of a few hundred layouts, of which without a key none fits in 40 GB."""
    hardware = replace(cluster(memory=memory), host=host)
    few = {"pp": 1, "cp": 1}
    return make_job(
        LARGE, gpus=4, batch=8, length=4096, hardware=hardware, optimizer=optimizer or Optimizer(), fixed=few
    )


def test_the_key_that_makes_it_fit_is_named_with_its_price() -> None:
    job = job_with(28e9)
    outcome = search(job)
    assert not outcome.best
    assert [dial.setting for dial in dials(job) if search(dial.job).best] == ["optimizer.offload = true"]
    dial = cheapest_dial(job)
    assert dial is not None
    (best,) = search(replace(job, optimizer=Optimizer(offload=True)), 1).best
    assert (dial.setting, dial.step) == ("optimizer.offload = true", best.prediction.step)
    assert dial.slower == best.prediction.step / predict(job.case(best.layout)).step > 1
    message = f"; with optimizer.offload = true it would, and a step takes {dial.slower - 1:.1%} longer; "
    assert message in fits_nowhere(job, outcome)


@pytest.mark.exhaustive
def test_a_key_whose_bytes_the_host_cannot_hold_does_not_make_it_fit() -> None:
    """Moments in bfloat16 have half the bytes, and room."""
    moments = search(job_with(28e9, optimizer=Optimizer(offload=True)), 1).best[0].prediction.on_host
    job = job_with(28e9, replace(HOST, capacity=0.75 * moments / USABLE))
    assert cheapest_dial(job) is None
    offloaded = replace(job, optimizer=Optimizer(offload=True))
    outcome = search(offloaded)
    assert not outcome.best
    assert outcome.rejected[HOST_MEMORY] > 0
    assert outcome.rejected.total() == outcome.layouts
    assert f"; {outcome.rejected[HOST_MEMORY]} fit there, but not in 80% of the" in fits_nowhere(offloaded, outcome)
    assert search(replace(job, optimizer=Optimizer(offload=True, state_dtype="bfloat16"))).best


def test_layouts_without_room_on_the_host_are_counted_once() -> None:
    """Also those that are looked at again with inputs that are gathered again."""
    job = job_with(40e9, replace(HOST, capacity=17e9 / USABLE), Optimizer(offload=True))
    rejected = 0
    for layout in filter(job.accepts, all_layouts(job)):
        prediction = predict(job.case(layout))
        lacks_host = prediction.memory.total <= job.hardware.memory and not prediction.has_room_on_host
        rejected += lacks_host and layout.regather == job.regather(layout)[0]
    outcome = search(job, count=job.gpus * 1000)  # every layout that fits
    assert outcome.rejected[HOST_MEMORY] == rejected > 0


def test_of_several_the_fastest_is_named() -> None:
    job = job_with(40e9)
    steps = {}
    for dial in dials(job):
        if best := search(dial.job, 1).best:
            steps[dial.setting] = best[0].prediction.step
    cheapest = cheapest_dial(job)
    assert len(steps) > 1
    assert cheapest is not None
    assert cheapest.setting == min(steps, key=lambda setting: steps[setting])


def test_keys_that_a_job_cannot_have_are_not_tried() -> None:
    def settings(job: Job) -> set[str]:
        return {dial.setting.partition(" ")[0] for dial in dials(job)}

    everything = settings(job_with(28e9))
    assert everything == {
        *("training.weights_dtype", "training.loss_chunk", "optimizer.state_dtype", "optimizer.offload"),
        "recompute.offload",
    }
    offload = {"optimizer.offload", "recompute.offload"}
    assert settings(job_with(28e9, host=Host())) == everything - offload
    muon = job_with(28e9, optimizer=Optimizer(name="muon"))
    assert settings(muon) == everything - {"training.weights_dtype", "optimizer.offload"}
    sgd = job_with(28e9, optimizer=Optimizer(name="sgd"))
    assert settings(sgd) == {"recompute.offload", "training.loss_chunk"}
    in_8_bits = job_with(28e9, optimizer=Optimizer(state_dtype="int8"))
    assert settings(in_8_bits) == everything - {"optimizer.state_dtype", "optimizer.offload"}
    graphed = replace(job_with(28e9), compile=Compile(graphs=True))
    assert settings(graphed) == everything - offload  # a graph allows no copies to the host
    averaged = job_with(28e9, optimizer=Optimizer(ema_decay=0.9))
    assert settings(averaged) == everything | {"optimizer.ema_offload"}
    taken = replace(in_8_bits, offloads_inputs=True, optimizer=Optimizer(offload=True))
    assert settings(taken) == {"training.weights_dtype", "training.loss_chunk"}


def test_every_set_of_keys_is_tried_once() -> None:
    sets = dial_sets(job_with(28e9))
    assert len(sets) == 40  # two by three, where int8 has no offload: (2 x 3 - 1) x 2 x 2 x 2
    assert len({frozenset(settings) for settings in sets}) == 40
    assert [len(settings) for settings in sets] == sorted(len(settings) for settings in sets)
    for settings, job in sets.items():
        keys = {setting.partition(" ")[0] for setting in settings}
        assert (job.training.weights_dtype == "bfloat16") == ("training.weights_dtype" in keys)
        assert (job.optimizer.state_dtype != "float32") == ("optimizer.state_dtype" in keys)
        assert job.optimizer.offload == ("optimizer.offload" in keys)
        assert job.offloads_inputs == ("recompute.offload" in keys)
        assert (job.training.loss_chunk > 0) == ("training.loss_chunk" in keys)


@pytest.mark.exhaustive  # 40 searches each
@pytest.mark.parametrize("memory", [28e9, 34e9])
def test_each_line_is_faster_and_the_last_is_the_fastest(memory: float) -> None:
    job = job_with(memory)
    turned = turn_dials(job)
    fastest = {}
    for settings, dialed in dial_sets(job).items():
        if best := search(within_risk(dialed), 1).best:
            fastest[settings] = best[0].prediction.step
    steps = [dialed.best.prediction.step for dialed in turned]
    assert len(steps) > 1
    assert all(later <= (1 - WORTH) * step for step, later in pairwise(steps))
    assert [fastest[dialed.settings] for dialed in turned] == steps
    assert steps[-1] <= min(fastest.values()) / (1 - WORTH)
    lines = list(dial_lines(turned))
    assert len(lines) == len(turned) + 4
    assert f"{' and '.join(turned[-1].settings)}: {turned[-1].best.layout.text()}" in lines[-3]
    assert lines[-2] == "Not known: whether the host has room ([host] capacity of the cluster file)."


@pytest.mark.parametrize("memory", [2.07e9, 2.1e9])
def test_the_search_with_offload_finds_what_trying_all_finds(memory: float) -> None:
    """The fastest does not fit; with the larger memory the best gathers its inputs again."""
    hardware = replace(cluster(memory=memory), host=Host(1e9, 1e9))
    job = make_job(
        SMALL,
        gpus=4,
        batch=4,
        hardware=hardware,
        optimizer=Optimizer(offload=True),
        offloads_inputs=True,
        fixed={"schedule": "1F1B"},
    )
    predictions = {layout: predict(job.case(layout)) for layout in all_layouts(job) if job.accepts(layout)}
    predictions |= dict(gathered_again(job, predictions))
    steps = [prediction.step for prediction in predictions.values() if prediction.fits]
    found = search(job, 1).best
    assert [ranked.prediction.step for ranked in found] == [min(steps)]
    assert min(steps) > min(prediction.step for prediction in predictions.values())


def test_a_layout_that_recomputes_no_whole_blocks_offloads_none() -> None:
    job = replace(job_with(80e9), offloads_inputs=True)
    layout = Layout(pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=1)
    for mode, offloads in (("none", False), ("selective", False), ("full", True), ("segment", True)):
        run = job.config(Config(), layout._replace(recompute=mode))  # type: ignore[arg-type]  # one of its words
        assert (run.recompute.mode, run.recompute.offload) == (mode, offloads)
