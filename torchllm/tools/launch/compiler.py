"""Find out, without torch, which GPUs this machine has and whether torch can compile for them.

Kernels for a GPU are written in Triton, which builds a small library with a C compiler when it first launches one.
"""

import ctypes
import importlib.util
import os
import shutil
import sysconfig
from contextlib import suppress
from pathlib import Path

CUDA_DRIVER = "libcuda.so.1"
AMD_DRIVER = Path("/dev/kfd")
HIP_RUNTIME = "libamdhip64.so"
"""AMD's"""
HIP_BUILD = "libtorch_hip.so"
"""a library that only torch's build for AMD has"""


def lack_of_gpu_compiler() -> str:
    """Return the part that torch lacks to compile kernels for a GPU here, as a sentence; "" if nothing is missing."""
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
    """Return how many GPUs this process has, by CUDA's driver or else by torch's build for AMD; 0 without either.

    Both respect the variables that hide GPUs (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES).
    """
    driver, count = _driver(), ctypes.c_int()
    if driver is not None and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
        return count.value
    runtime = _hip_runtime()
    if runtime is not None and runtime.hipGetDeviceCount(ctypes.byref(count)) == 0:
        return count.value
    return 0


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


def _hip_runtime() -> ctypes.CDLL | None:
    """Return AMD's runtime, its own or the system's, of torch's build for AMD; None if another build is installed."""
    torch = importlib.util.find_spec("torch")
    for folder in (torch and torch.submodule_search_locations) or ():
        libraries = Path(folder, "lib")
        names = (str(libraries / HIP_RUNTIME), HIP_RUNTIME) if (libraries / HIP_BUILD).exists() else ()
        for name in names:
            with suppress(OSError):
                return ctypes.CDLL(name)
    return None
