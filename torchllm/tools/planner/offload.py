"""Seconds of copies to the host and back, of updates there, and bytes: keys of [optimizer] and `recompute.offload`."""

import math
from collections.abc import Iterable, Sequence
from operator import mul

from torchllm.config.errors import UserError
from torchllm.facts.flops import recompute_interval
from torchllm.facts.stages import stage_of_rank
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.cluster import Host
from torchllm.tools.planner.compute import ELEMENT_BYTES
from torchllm.tools.planner.moments import of_rank
from torchllm.tools.planner.optimizer_states import ENTRY
from torchllm.tools.planner.parameters import StageSize

USABLE = 0.8
"""share of the host's memory that a plan takes: the rest is for processes, caches of files and copies of checkpoints"""


def host_of(case: Case) -> Host:
    """Return the host of a GPU. UserError if its cluster file has none."""
    host = case.hardware.host
    if not host.bandwidth:
        raise UserError(
            f"the cluster file of {case.hardware.gpu} has no [host] with bandwidth and memory_bandwidth (bytes/s), "
            "which the time of optimizer.offload, optimizer.ema_offload and recompute.offload follows from: add it, or "
            "set them to false"
        )
    return host


def host_update_seconds(case: Case, parameters: float) -> float:
    """Return the seconds of an update on the host. parameters: the trained ones of a rank.

    Weights and gradients are copied there and weights back, while the host updates other parameters: it reads and
    writes all of it once more, and its moments, which it may have to round.
    """
    host, software = host_of(case), case.software
    copied = 2 * software.shards + (software.kept or software.gradients)
    in_memory = 2 * copied + 2 * moment_bytes(case) + software.rounding
    return parameters * max(copied / host.bandwidth, in_memory / host.memory_bandwidth)


def average_seconds(case: Case, parameters: float) -> float:
    """Return the seconds until an average on the host has followed: nothing overlaps with the copies of the weights.

    parameters: the trained ones of a rank. Three operations read and write the average, the weight and their
    difference: 32 bytes per parameter.
    """
    host, copied = host_of(case), case.software.shards
    return parameters * (copied / host.bandwidth + (copied + 8 * ENTRY) / host.memory_bandwidth)


def moment_bytes(case: Case) -> float:
    """Return the bytes of a parameter's moments on the host."""
    if not case.optimizer.offloads:
        return 0.0
    return 4.0 if case.optimizer.state_dtype == "bfloat16" else 8.0


def state_bytes(case: Case) -> float:
    """Return the bytes of a parameter's moments and of its average on the host."""
    return moment_bytes(case) + (ENTRY if case.optimizer.offloads_average else 0.0)


def inputs_on_host(case: Case, sizes: Sequence[StageSize], ranks: Iterable[int]) -> float:
    """Return the bytes that the rank with most of them keeps on the host: inputs of blocks, or segments.

    sizes: of the pipeline's stages. A rank keeps the inputs of all its micro batches in flight.
    """
    if not case.recompute.offload:
        return 0.0
    parallel = case.parallel
    interval = recompute_interval(case.recompute, case.model.layers) if case.recompute.mode == "segment" else 1
    most_inputs = 0
    for rank in ranks:
        inputs = [math.ceil(sizes[stage].blocks / interval) for stage in stage_of_rank(parallel, rank)]
        moments = of_rank(parallel.schedule, parallel.pp, parallel.stages_per_rank, case.micro_batches, rank)
        most_inputs = max(most_inputs, *(sum(map(mul, moment.flying, inputs)) for moment in moments))
    return most_inputs * _input_bytes(case)


def _input_bytes(case: Case) -> float:
    """Return the bytes of a block's input, of one micro batch."""
    return ELEMENT_BYTES * case.piece.tokens * case.model.hidden / case.piece.spread


def fits_on_host(case: Case, on_host: float) -> bool:
    """Return whether a rank's bytes have room in its share of the host's memory, if that is known."""
    capacity = case.hardware.host.capacity
    return not capacity or on_host <= USABLE * capacity


def exposed_copy_seconds(case: Case, computed: float) -> float:
    """Return the seconds that a block waits while its input is copied to the host, or back; 0 without offload.

    computed: seconds that the block computes meanwhile, forward or backward. Of a segment each block has a part.
    """
    if not case.recompute.offload:
        return 0.0
    blocks = recompute_interval(case.recompute, case.model.layers) if case.recompute.mode == "segment" else 1
    return max(0.0, _input_bytes(case) / host_of(case).bandwidth / blocks - computed)
