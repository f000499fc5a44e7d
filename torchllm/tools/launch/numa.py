"""Keep a rank on the CPUs next to its GPU: a copy to or from a GPU of another NUMA node crosses the link between them.

torchrun has `--numa-binding` for the same, which needs the command numactl, ends the job where that is missing, and
does not exist where Slurm starts each rank.
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

PCI_DEVICES = Path("/sys/bus/pci/devices")


def bind_near_gpu(device: torch.device, pci_devices: Path = PCI_DEVICES) -> None:
    """Let the calling thread, and those that it starts, run only on the CPUs of the NUMA node of a GPU.

    CPUs that the process may not use anyway are left out. Nothing happens on a CPU, where the kernel does not know the
    node (most virtual machines), or where the process may use none of its CPUs.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):  # Linux
        return
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack its place on the PCI bus
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    near = allowed & local_cpus(pci_devices / address)
    if near and near != allowed:
        os.sched_setaffinity(0, near)
        log.info("on %d of %d CPUs, on the NUMA node of GPU %s", len(near), len(allowed), address)


def local_cpus(pci_device: Path) -> set[int]:
    """Return the CPUs of the NUMA node of a PCI device, from its folder in sysfs; none if the kernel does not say."""
    cpus: set[int] = set()
    try:
        text = (pci_device / "local_cpulist").read_text().strip()
    except OSError:
        return cpus
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
