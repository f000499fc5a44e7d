"""The driver's figures, from a stand-in: there is no GPU here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchllm.metrics.device import DeviceMeter, device_meter


class Driver:
    """What is used of pynvml."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError_NotSupported(Exception):
        pass

    def nvmlInit(self) -> None:
        self.started = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self.started
        return f"handle of {uuid}"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        assert handle == "handle of GPU-1234"
        return SimpleNamespace(gpu=93, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 651_500  # milliwatts

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return {self.NVML_CLOCK_SM: 1830}[clock]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return {self.NVML_TEMPERATURE_GPU: 61}[sensor]


class VirtualGpuDriver(Driver):
    """A driver that does not know the power of a virtual GPU."""

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        raise self.NVMLError_NotSupported


@pytest.fixture
def third_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(index: int) -> Any:
        assert index == 3
        return SimpleNamespace(uuid="1234")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


@pytest.mark.usefixtures("third_gpu")
def test_what_a_gpu_does_not_have_is_missing() -> None:
    assert DeviceMeter(VirtualGpuDriver(), 3).read().keys() == {"gpu/busy", "gpu/mhz", "gpu/celsius"}


@pytest.mark.usefixtures("third_gpu")
def test_it_reads_the_gpu_that_torch_uses() -> None:
    assert DeviceMeter(Driver(), 3).read() == {
        "gpu/busy": 0.93,
        "gpu/watts": 651.5,
        "gpu/mhz": 1830.0,
        "gpu/celsius": 61.0,
    }


def test_without_a_gpu_or_a_driver_there_is_none() -> None:
    assert device_meter(torch.device("cpu")) is None
    assert device_meter(torch.device("cuda", 0)) is None or torch.cuda.is_available()
