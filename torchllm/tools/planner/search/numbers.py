"""Find numbers of GPUs, and batch sizes near the wanted one, that train more tokens per second. No torch.

A number of GPUs that shares few divisors with the batch leaves only uneven layouts: fewer GPUs may then do more.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from torchllm.tools.planner.search.advice import within_risk
from torchllm.tools.planner.search.layouts import Job
from torchllm.tools.planner.search.search import Ranked, Search

FEWER = 16
"""numbers of whole nodes, below the given one, that are tried; none is below half of it"""
NEAR_BATCH = 0.05
"""largest relative difference of another batch size"""
BATCHES = 2
"""other batch sizes that are tried"""
WORTH_A_LINE = 0.01
"""gain below which another batch size is not worth a word"""


def fewer_gpus(gpus: int, per_node: int) -> list[int]:
    """Return the numbers of GPUs to try in the place of `gpus`, descending: whole nodes, or parts of one node."""
    step = per_node if gpus > per_node else 1
    largest = (gpus - 1) // step * step
    numbers = range(largest, 0, -step)[:FEWER]
    return [number for number in numbers if 2 * number >= gpus]


def fastest_number(job: Job) -> Job:
    """Return the job on the number of GPUs, at most its own, that has the least predicted step.

    Searches of smaller numbers end as soon as they cannot be faster.
    """
    best, seconds = job, math.inf
    for gpus in (job.gpus, *fewer_gpus(job.gpus, job.hardware.gpus_per_node)):
        smaller = replace(job, gpus=gpus)
        found = Search(smaller, count=1, below=seconds).find_best().best
        if found and found[0].prediction.step < seconds:
            best, seconds = smaller, found[0].prediction.step
    return best


def wasted_gpus(job: Job, first: Ranked) -> Iterator[str]:
    """Yield a line if fewer GPUs, and one if a batch of nearly the same size, would train more tokens per second.

    first: the first pick; others are searched in as much memory as it may use.
    """
    limited = within_risk(job)
    rate = tokens_per_second(job, first)
    fewer = []
    for gpus in fewer_gpus(job.gpus, job.hardware.gpus_per_node):
        fewer += candidates(replace(limited, gpus=gpus), rate)
    if fewer:
        best, ranked = max(fewer, key=lambda found: tokens_per_second(*found))
        yield f"Fewer GPUs train faster: {best.gpus} make {_gain(best, ranked, rate)}"
    batches = []
    for size in better_batches(job.training.global_batch_size, job.gpus):
        training = replace(job.training, global_batch_size=size)
        batches += candidates(replace(limited, training=training), rate * (1 + WORTH_A_LINE))
    if batches:
        best, ranked = max(batches, key=lambda found: tokens_per_second(*found))
        size = best.training.global_batch_size
        yield f"A batch that divides better: {size} sequences make {_gain(best, ranked, rate)}"


def _gain(job: Job, ranked: Ranked, rate: float) -> str:
    more = tokens_per_second(job, ranked)
    return f"{more:,.0f} tokens/s, {more / rate - 1:+.1%}, with {ranked.layout.text()}."


def candidates(job: Job, rate: float) -> list[tuple[Job, Ranked]]:
    """Return the job with its fastest layout, if that makes more than `rate` tokens per second."""
    tokens = job.training.global_batch_size * job.training.sequence_length
    return [(job, ranked) for ranked in Search(job, count=1, below=tokens / rate).find_best().best]


def better_batches(size: int, gpus: int) -> list[int]:
    """Return batch sizes near `size` that share a larger divisor with the number of GPUs, the largest divisor first."""
    lowest, highest = math.ceil(size * (1 - NEAR_BATCH)), math.floor(size * (1 + NEAR_BATCH))
    shared = math.gcd(size, gpus)
    near = [batch for batch in range(lowest, highest + 1) if math.gcd(batch, gpus) > shared]
    near.sort(key=lambda batch: (-math.gcd(batch, gpus), abs(batch - size)))
    return near[:BATCHES]


def tokens_per_second(job: Job, ranked: Ranked) -> float:
    """Return the predicted rate of all GPUs."""
    return job.training.global_batch_size * job.training.sequence_length / ranked.prediction.step
