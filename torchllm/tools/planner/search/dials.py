"""Find the key that makes a job fit at the least price in time: dtypes, offload, chunks of the loss. No torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.layouts import Job
from torchllm.tools.planner.search.search import search

CHUNK = 1024
"""tokens of training.loss_chunk"""


class Dial(NamedTuple):
    """A key that frees memory, alone."""

    setting: str
    """as in a file"""
    job: Job
    """with the key"""


class PricedDial(NamedTuple):
    """A dial with which a layout fits."""

    setting: str
    step: float
    """seconds of the fastest layout that fits"""
    slower: float
    """over the step that this layout would take without the dial, if it fitted"""


def dials(job: Job) -> Iterator[Dial]:
    """Yield the keys that the job has not set and that it can have."""
    training, optimizer = job.training, job.optimizer
    if optimizer.name == "adamw":
        can_round = not (job.float8.is_on or job.trained.only_updates)
        if training.weights_dtype == "float32" and can_round:
            rounded = replace(training, weights_dtype="bfloat16")
            yield Dial('training.weights_dtype = "bfloat16"', replace(job, training=rounded))
        if job.hardware.host.bandwidth and not optimizer.offload and optimizer.state_dtype != "int8":
            yield Dial("optimizer.offload = true", replace(job, optimizer=replace(optimizer, offload=True)))
    if optimizer.name != "sgd" and optimizer.state_dtype == "float32" and not optimizer.offload:
        narrow = replace(optimizer, state_dtype="bfloat16")
        yield Dial('optimizer.state_dtype = "bfloat16"', replace(job, optimizer=narrow))
    if job.hardware.host.bandwidth and not job.offloads_inputs:
        yield Dial("recompute.offload = true", replace(job, offloads_inputs=True))
    if not training.loss_chunk:
        yield Dial(f"training.loss_chunk = {CHUNK}", replace(job, training=replace(training, loss_chunk=CHUNK)))


def cheapest_dial(job: Job) -> PricedDial | None:
    """Return the dial with the fastest step of those with each of which alone a layout fits; None: none does."""
    priced = []
    for dial in dials(job):
        if best := search(dial.job, 1).best:
            layout, prediction = best[0].layout, best[0].prediction
            without = predict(job.case(layout)).step
            priced.append(PricedDial(dial.setting, prediction.step, prediction.step / without))
    return min(priced, key=lambda dial: dial.step, default=None)
