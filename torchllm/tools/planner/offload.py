"""Seconds of what goes over a GPU's link to its host: the update there (`optimizer.offload`). No torch."""

from torchllm.config.errors import UserError
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.cluster import Host


def host_of(case: Case) -> Host:
    """Return the host of a GPU. UserError if its cluster file has none."""
    host = case.hardware.host
    if not host.bandwidth:
        raise UserError(
            f"the cluster file of {case.hardware.gpu} has no [host] with bandwidth and memory_bandwidth (bytes/s), "
            "which the time of optimizer.offload follows from: add it, or set the key to false"
        )
    return host


def update_seconds(case: Case, parameters: float) -> float:
    """Return the seconds of an update on the host. parameters: the trained ones of a rank.

    Weights and gradients are copied there and weights back, while the host updates other parameters: it reads and
    writes all of it once more, and its moments. Random bits for bfloat16 are not priced.
    """
    host, software = host_of(case), case.software
    copied = 2 * software.shards + (software.kept or software.gradients)
    moments = 4.0 if case.optimizer.state_dtype == "bfloat16" else 8.0
    in_memory = 2 * copied + 2 * moments
    return parameters * max(copied / host.bandwidth, in_memory / host.memory_bandwidth)
