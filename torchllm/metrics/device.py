"""What NVIDIA's driver says of this rank's GPU: use, power, clock. Needs the package nvidia-ml-py (extra `gpu`).

gpu/busy      share of the last sample period in which a kernel ran
gpu/watts     its power
gpu/mhz       clock of the multiprocessors; falls when the GPU is too hot or over its power limit
gpu/celsius   its temperature
"""

from typing import Any

import torch


class DeviceMeter:
    """Of one GPU. `library`: pynvml, or what stands in for it."""

    def __init__(self, library: Any, index: int) -> None:
        self.library = library
        library.nvmlInit()
        uuid = torch.cuda.get_device_properties(index).uuid  # torch counts the visible ones, the driver all
        self.handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def read(self) -> dict[str, float]:
        """Now, by key."""
        nvml, handle = self.library, self.handle
        return {
            "gpu/busy": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu/watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu/mhz": float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "gpu/celsius": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        }


def device_meter(device: torch.device) -> DeviceMeter | None:
    """Of a GPU; None of a CPU, or where the package is not there or the driver does not answer."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        return DeviceMeter(pynvml, device.index or 0)
    except Exception:  # ImportError, and every error of the driver's: what is only watched ends no run
        return None
