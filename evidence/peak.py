"""The part of a predicted peak of memory that a framework's measured peaks count. No torch."""

from torchllm.tools.planner.peak import Memory
from torchllm.tools.planner.software import Software


def counted(memory: Memory, software: Software) -> float:
    """Return the part that a framework's measured peaks count: torch's counters exclude CUDA's context and NCCL.

    Reserved bytes also include fragments. torch's optimizers create their moments at the end of the first step, in
    segments that its activations have left; the second step finds no room there, and reserves as much again. Of FSDP2
    runs of Llama 3 8B that torchtitan publishes (d9bdfbb206), that is 7.6 GiB on 8 GPUs, whose moments are 7.5 GiB, and
    1.0 on 64, with 0.9. Where memory is short the allocator frees such segments, so that `Memory.total` has none.
    """
    if software.peaks_allocated:
        return memory.live
    broken_up = min(memory.optimizer, memory.under_way) if software.fsdp else 0.0
    return memory.live + max(memory.allocator, broken_up)
