"""Find out, without torch, which GPUs this machine has and whether torch can compile for them.

Kernels for a GPU are written in Triton, which builds a small library with a C compiler when it first launches one.
"""

import ctypes
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

CUDA_DRIVER = "libcuda.so.1"


def lack_of_gpu_compiler() -> str:
    """Return what torch lacks to compile kernels for a GPU here, as a sentence; "" if nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(shutil.which(compiler) for compiler in compilers):
        return f"there is no C compiler here ({' or '.join(compilers)})"
    # Debian's Python names another folder by default, which only packages that pip installs have.
    default = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if default == "posix_local" else default
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if not header.is_file():
        return f"Python's headers are not installed ({header})"
    return ""


def count_gpus() -> int:
    """Return how many GPUs CUDA's driver gives to this process; 0 without a driver."""
    driver = _driver()
    count = ctypes.c_int()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def first_gpu() -> str:
    """Return the driver's name of the first GPU that it gives to this process; empty if there is none."""
    driver = _driver()
    name = ctypes.create_string_buffer(256)
    if driver is None or driver.cuDeviceGetName(name, len(name), 0) != 0:
        return ""
    return name.value.decode()


def _driver() -> ctypes.CDLL | None:
    """Return CUDA's driver, ready to be asked; None where there is none or it finds no GPU."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None
