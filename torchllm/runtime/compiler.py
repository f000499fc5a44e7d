"""Find out, without torch, whether torch can compile for the GPUs of this machine.

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
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
