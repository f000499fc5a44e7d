"""The device of this process and the dtype that it computes in."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from torchllm.config import Training
from torchllm.config.errors import UserError


def choose_device(requested: str, local_rank: int) -> torch.device:
    """Return the device of this rank: GPU number `local_rank`, or the CPU.

    `requested` is run.device: "auto", "cuda" or "cpu". Raises UserError if that GPU does not exist, or if this machine
    has GPUs that torch cannot use.
    """
    gpu_available = torch.cuda.is_available()
    if requested == "cuda" and not gpu_available:
        raise UserError('run.device = "cuda", but torch sees no GPU here; use "auto" or "cpu"')
    if requested == "auto" and not gpu_available and has_usable_gpu():
        raise UserError(
            f"this machine has a GPU, but torch {torch.__version__} cannot use it: it is a build without CUDA, or "
            'needs a newer driver. Install the build for your driver, or set run.device = "cpu" to train on the CPU'
        )
    if requested == "cpu" or not gpu_available:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        raise UserError(
            f"local rank {local_rank} has no GPU: it sees only {gpus}. Lower NPROC, or let each Slurm task see "
            "all GPUs of its node (--gpu-bind=none)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def has_usable_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether this process may use an NVIDIA GPU: a device file opens, and CUDA_VISIBLE_DEVICES names a GPU.

    It does not check whether torch can use the GPU. A container has only the device files of its GPUs, and a scheduler
    forbids opening other files.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip().startswith("-")):
        return False
    for file in devices.glob("nvidia[0-9]*"):
        with suppress(OSError):
            os.close(os.open(file, os.O_RDWR))
            return True
    return False


def compute_dtype(training: Training, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: training.dtype, where "auto" is bfloat16 on a GPU and float32 on a CPU.

    float32 becomes float64 if that is torch's default dtype, as in proofs that must tell a mistake from rounding.
    """
    name = training.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.promote_types(torch.get_default_dtype(), torch.float32)
