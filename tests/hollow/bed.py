"""Builds the stand-in and starts commands on it.

It is three libraries in one folder: `libcuda.so.1`, which is preloaded and stands for CUDA's driver and runtime, cuBLAS
and NCCL; the same as `libcuda.so`, which Triton links; and `libnvidia-ml.so.1`. The headers come with torch's CUDA
wheel.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "stand_in"
SITE = Path(__file__).parent / "site"
BUILDS = ROOT / ".cache" / "hollow"
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


class Machine(NamedTuple):
    """The machine that a command sees."""

    architecture: str = "sm_90"
    """one of `ARCHITECTURES`"""
    devices: int = 1
    gib: float = 0.0
    """memory of a GPU; 0: what a GPU of that architecture has"""

    def settings(self) -> dict[str, str]:
        return {
            "HOLLOW_ARCHITECTURE": self.architecture,
            "HOLLOW_DEVICES": str(self.devices),
            "HOLLOW_GIB": str(self.gib),
        }


H100 = Machine()


def missing() -> str:
    """Return what this Python lacks to run on the hollow GPU; empty: nothing."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed"
    if not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return "torch is a build without CUDA: .ci/cuda installs the other"
    if find_spec("triton") is None:
        return "triton, which brings CUDA's headers, is not installed"
    return ""


def _include_folders() -> list[Path]:
    """Return the folders of this Python's CUDA headers. Those of the CUDA wheel itself lack some; Triton's have all."""
    folders = []
    for package, inside in (("triton", "backends/nvidia/include"), ("nvidia.nccl", "include")):
        spec = find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations
        folders.append(Path(spec.submodule_search_locations[0]) / inside)
    return folders


def build() -> Path:
    """Return the folder of the libraries, built if their sources have changed. RuntimeError if g++ fails."""
    include = [f"-I{folder}" for folder in _include_folders()]
    digest = hashlib.sha256("".join(include).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    folder = BUILDS / digest.hexdigest()[:16]
    if folder.exists():
        return folder
    BUILDS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILDS) as name:
        made = Path(name) / "built"
        made.mkdir()
        cuda = [str(source) for source in sorted(SOURCES.glob("*.cpp")) if source.name != "nvml.cpp"]
        exports = f"-Wl,--version-script={SOURCES / 'exports.map'}"
        _compile([*include, exports, *cuda], made / "libcuda.so.1")
        (made / "libcuda.so").symlink_to("libcuda.so.1")
        _compile([str(SOURCES / "nvml.cpp")], made / "libnvidia-ml.so.1")
        if not folder.exists():  # another process may have been faster
            made.rename(folder)
    return folder


def _compile(arguments: Sequence[str], library: Path) -> None:
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-Wl,-soname,{library.name}"]
    done = subprocess.run(["g++", *options, *arguments, "-o", str(library), "-ldl"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the hollow GPU does not build:\n{done.stderr}")


def environment(machine: Machine, messages: Path) -> dict[str, str]:
    """Return the environment of a command on this machine. messages: a folder that all its processes share."""
    libraries = build()
    return {
        **os.environ,
        **machine.settings(),
        "HOLLOW_FOLDER": str(messages),
        "LD_PRELOAD": str(libraries / "libcuda.so.1"),
        "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", libraries),
        "PYTHONPATH": f"{SITE}:{_before('PYTHONPATH', ROOT)}",
        "PYTHON": sys.executable,
        "PATH": _before("PATH", Path(sys.executable).parent),
        # cuDNN's attention needs a GPU while it chooses a kernel; all others choose theirs without. See site/.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1"),
    }


def _before(variable: str, folder: Path) -> str:
    """Return a search path of the environment with a folder in front."""
    return ":".join(filter(None, [str(folder), os.environ.get(variable, "")]))


def run(
    command: Sequence[str], machine: Machine = H100, seconds: float = 280, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command on a hollow machine and return what came of it; standard error is in the output.

    variables: of its environment. subprocess.TimeoutExpired after so many seconds.
    """
    with tempfile.TemporaryDirectory() as messages:
        return subprocess.run(
            command,
            env={**environment(machine, Path(messages)), **variables},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
