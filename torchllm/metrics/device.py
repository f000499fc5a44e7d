"""What NVIDIA's driver says about this rank's GPU. Needs the package nvidia-ml-py (extra `gpu`).

gpu/busy      share of the driver's last sample period in which a kernel ran
gpu/watts     power
gpu/mhz       clock of the multiprocessors; it falls when the GPU is too hot or over its power limit
gpu/celsius   temperature
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


class DeviceMeter:
    """Reads one GPU."""

    def __init__(self, library: Any, index: int) -> None:
        """library: pynvml. index: torch's number of the GPU."""
        self.library = library
        library.nvmlInit()
        uuid = torch.cuda.get_device_properties(index).uuid  # torch numbers the visible GPUs, the driver all
        self.handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def read(self) -> dict[str, float]:
        """Return the present values by key, without those that this GPU does not have, being virtual, say."""
        nvml, handle = self.library, self.handle
        readings: dict[str, Callable[[], float]] = {
            "gpu/busy": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu/watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu/mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "gpu/celsius": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        }
        values = {}
        for key, reading in readings.items():
            with suppress(nvml.NVMLError_NotSupported):
                values[key] = reading()
        return values


def device_meter(device: torch.device) -> DeviceMeter | None:
    """Return the meter of a GPU; None for a CPU, without the package, or if the driver does not answer."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        return DeviceMeter(pynvml, device.index or 0)
    except Exception:  # ImportError, and every error of the driver's: what only observes ends no run
        return None
