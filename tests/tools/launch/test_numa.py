"""A rank on a GPU runs on the CPUs of that GPU's NUMA node, as far as the process may use them."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchllm.tools.launch.numa import bind_near_gpu, local_cpus

ADDRESS = "0001:0a:00.0"
GPU = SimpleNamespace(pci_domain_id=1, pci_bus_id=10, pci_device_id=0)


def bound_cpus(device: str, pci_devices: Path) -> set[int]:
    def bind() -> set[int]:
        bind_near_gpu(torch.device(device), pci_devices)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as thread:  # binding holds for a thread and those that it starts
        return thread.submit(bind).result()


def write_cpus(folder: Path, text: str) -> None:
    device = folder / ADDRESS
    device.mkdir(exist_ok=True)
    (device / "local_cpulist").write_text(text)


def test_a_list_of_cpus_is_read(tmp_path: Path) -> None:
    for number, (text, cpus) in enumerate([("0-2,8,10-11\n", {0, 1, 2, 8, 10, 11}), ("5\n", {5}), ("\n", set())]):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_cpus(folder, text)
        assert local_cpus(folder / ADDRESS) == cpus, text


def test_a_rank_is_bound_to_the_cpus_of_its_gpus_node_that_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPU)
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    absent = max(allowed) + 1
    assert bound_cpus("cuda:0", tmp_path) == allowed, "the kernel does not know the node"
    write_cpus(tmp_path, f"{first},{absent}")
    assert bound_cpus("cuda:0", tmp_path) == {first}
    write_cpus(tmp_path, str(absent))
    assert bound_cpus("cuda:0", tmp_path) == allowed, "it may use none of the node's"


def test_nothing_is_bound_on_a_cpu(tmp_path: Path) -> None:
    write_cpus(tmp_path, str(min(os.sched_getaffinity(0))))
    assert bound_cpus("cpu", tmp_path) == os.sched_getaffinity(0)
