"""Seconds of copies to the host and back, and of the update there: `optimizer.offload`, `recompute.offload`."""

from torchllm.config.errors import UserError
from torchllm.facts.flops import recompute_interval
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.cluster import Host
from torchllm.tools.planner.compute import ELEMENT_BYTES


def host_of(case: Case) -> Host:
    """Return the host of a GPU. UserError if its cluster file has none."""
    host = case.hardware.host
    if not host.bandwidth:
        raise UserError(
            f"the cluster file of {case.hardware.gpu} has no [host] with bandwidth and memory_bandwidth (bytes/s), "
            "which the time of optimizer.offload and recompute.offload follows from: add it, or set both to false"
        )
    return host


def host_update_seconds(case: Case, parameters: float) -> float:
    """Return the seconds of an update on the host. parameters: the trained ones of a rank.

    Weights and gradients are copied there and weights back, while the host updates other parameters: it reads and
    writes all of it once more, and its moments, which it may have to round.
    """
    host, software = host_of(case), case.software
    copied = 2 * software.shards + (software.kept or software.gradients)
    moments = 4.0 if case.optimizer.state_dtype == "bfloat16" else 8.0
    in_memory = 2 * copied + 2 * moments + software.rounding
    return parameters * max(copied / host.bandwidth, in_memory / host.memory_bandwidth)


def exposed_copy_seconds(case: Case, computed: float) -> float:
    """Return the seconds that a block waits while its input is copied to the host, or back; 0 without offload.

    computed: seconds that the block computes meanwhile, forward or backward. Of a segment each block has a part.
    """
    if not case.recompute.offload:
        return 0.0
    blocks = recompute_interval(case.recompute, case.model.layers) if case.recompute.mode == "segment" else 1
    copied = ELEMENT_BYTES * case.piece.tokens * case.model.hidden / case.piece.spread
    return max(0.0, copied / host_of(case).bandwidth / blocks - computed)
