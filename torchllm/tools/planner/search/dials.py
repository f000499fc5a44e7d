"""Find the keys that make a job fit or faster, at a price: dtypes, offload, chunks of the loss. No torch."""

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.advice import within_risk
from torchllm.tools.planner.search.layouts import Job
from torchllm.tools.planner.search.search import Ranked, Search, search

CHUNK = 1024
"""tokens of training.loss_chunk"""
WORTH = 0.01
"""share of a step that more keys must save"""


class Dial(NamedTuple):
    """A key that frees memory, alone."""

    setting: str
    """as in a file"""
    job: Job
    """with the key"""


class PricedDial(NamedTuple):
    """A dial that makes a layout fit."""

    setting: str
    step: float
    """seconds of the fastest layout that fits"""
    slower: float
    """over the step that this layout would take without the dial, if it fitted"""


def dials(job: Job) -> Iterator[Dial]:
    """Yield the keys that the job has not set and that it can have."""
    training, optimizer = job.training, job.optimizer
    # A CUDA graph allows no copies to the host.
    may_offload = job.hardware.host.bandwidth > 0 and not (job.compile is not None and job.compile.graphs)
    if optimizer.name == "adamw":
        can_round = not (job.float8.is_on or job.trained.only_updates)
        if training.weights_dtype == "float32" and can_round:
            rounded = replace(training, weights_dtype="bfloat16")
            yield Dial('training.weights_dtype = "bfloat16"', replace(job, training=rounded))
        if may_offload and not optimizer.offload and optimizer.state_dtype != "int8":
            yield Dial("optimizer.offload = true", replace(job, optimizer=replace(optimizer, offload=True)))
    if may_offload and optimizer.ema_decay and not optimizer.ema_offload:
        yield Dial("optimizer.ema_offload = true", replace(job, optimizer=replace(optimizer, ema_offload=True)))
    if optimizer.name != "sgd" and optimizer.state_dtype == "float32" and not optimizer.offloads:
        for dtype in ("bfloat16", "int8"):
            narrow = replace(optimizer, state_dtype=dtype)
            yield Dial(f'optimizer.state_dtype = "{dtype}"', replace(job, optimizer=narrow))
    if may_offload and not job.offloads_inputs:
        yield Dial("recompute.offload = true", replace(job, offloads_inputs=True))
    if not training.loss_chunk:
        yield Dial(f"training.loss_chunk = {CHUNK}", replace(job, training=replace(training, loss_chunk=CHUNK)))


def cheapest_dial(job: Job) -> PricedDial | None:
    """Return the dial with the fastest step, of the dials that alone make a layout fit; None if there is none."""
    priced = []
    for dial in dials(job):
        if best := search(dial.job, 1).best:
            layout, prediction = best[0].layout, best[0].prediction
            without = predict(job.case(layout)).step
            priced.append(PricedDial(dial.setting, prediction.step, prediction.step / without))
    return min(priced, key=lambda dial: dial.step, default=None)


class DialedJob(NamedTuple):
    """A job with some dials, and its fastest layout within the limit of risk."""

    settings: tuple[str, ...]
    """of the dials, as in a file"""
    job: Job
    best: Ranked


def dial_sets(job: Job, written: Collection[str] = ()) -> dict[tuple[str, ...], Job]:
    """Return the job with every set of dials, the smallest set first: at most 40, or 80 with an average.

    The keys are the dials' settings, sorted; the first is empty. written: keys that stay as the user set them.
    """
    found: dict[tuple[str, ...], Job] = {(): job}
    newest = found
    while newest:
        larger = {}
        for settings, dialed in newest.items():
            for dial in dials(dialed):
                if dial.setting.partition(" ")[0] in written:
                    continue
                larger[tuple(sorted((*settings, dial.setting)))] = dial.job
        found |= larger
        newest = larger
    return found


def turn_dials(job: Job, written: Collection[str] = ()) -> list[DialedJob]:
    """Return the job with no dial, then with more and more, each at least `WORTH` faster than all before it.

    Empty if no layout fits, whatever the dials. written: as in `dial_sets`.
    """
    turned: list[DialedJob] = []
    enough = math.inf
    for settings, dialed in dial_sets(job, written).items():
        found = Search(within_risk(dialed), count=1, below=enough).find_best().best
        if found:
            turned.append(DialedJob(settings, dialed, found[0]))
            enough = (1 - WORTH) * found[0].prediction.step
    return turned


def dial_lines(turned: list[DialedJob]) -> Iterator[str]:
    """Yield a heading, then a line for each job that was found: step, memory, keys and layout."""
    yield f"Keys that free memory: each line is at least {WORTH:.0%} faster than those above it; the last is taken."
    yield "      step s    GiB  keys (--dials)"
    for dialed in turned:
        layout, prediction = dialed.best
        keys = " and ".join(dialed.settings) or "none"
        on_host = f"; on the host {prediction.on_host / 2**30:.1f} GiB" if prediction.on_host else ""
        yield f"    {prediction.step:8.4g} {prediction.memory.total / 2**30:6.1f}  {keys}: {layout.text()}{on_host}"
    if not turned[0].job.hardware.host.capacity:
        yield "Not known: whether the host has room ([host] capacity of the cluster file)."
    yield "docs/concepts.md has the losses of dtypes."
