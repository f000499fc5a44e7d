"""Facts about this machine for a bug report: `torchllm env`. Imports torch only to ask it."""

import os
import platform
import subprocess
import sys
from collections import Counter
from importlib import metadata

from torchllm import __version__
from torchllm.runtime.host_limits import usable_cores
from torchllm.tools.resources import HOME

PACKAGES = (
    "torchdata",
    "datasets",
    "tiktoken",
    "tokenizers",
    "tensorboard",
    "numpy",
    "flash-attn",
    "torchao",
    "nvidia-ml-py",
    "wandb",
    "mlflow",
    "trackio",
)
"""distributions whose version a bug report needs, besides torch"""
VARIABLES = ("CUDA_", "NCCL_", "TORCH", "OMP_")
"""prefixes of the environment variables that change torch's behavior"""


def report() -> str:
    """Return one line per fact."""
    lines = [
        f"torchllm: {__version__}{commit()} in {HOME}",
        f"Python: {platform.python_version()} ({sys.executable})",
        f"system: {platform.platform()}",
        f"cores: {usable_cores()}",
        f"memory: {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        *torch_lines(),
    ]
    lines += [f"{name}: {version(name)}" for name in PACKAGES]
    lines += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
    return "\n".join(lines)


def commit() -> str:
    """Return the commit of a checkout, and whether files differ from it; empty for an installed package."""
    if not (HOME / ".git").exists():
        return ""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):  # no git here, or the folder belongs to another user
        return ""
    return f", commit {head}" + (" with changed files" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(HOME), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def version(distribution: str) -> str:
    """Return the installed version."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def torch_lines() -> list[str]:
    """Return the lines about torch, its libraries and the GPUs it sees."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of CUDA is missing
        return [f"torch: {version('torch')}, but importing it fails: {error}"]
    lines = [f"torch: {torch.__version__}"]
    if not torch.cuda.is_available():
        return [*lines, "GPUs: none that torch can use"]
    cudnn = torch.backends.cudnn.version()
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    lines.append(f"CUDA: {torch.version.cuda}, cuDNN {cudnn}, NCCL {nccl}")
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    models = Counter(f"{device.name}, {device.total_memory / 2**30:.1f} GiB" for device in devices)
    lines += [f"GPUs: {count} x {model}" for model, count in models.items()]
    return lines
