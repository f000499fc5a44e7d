"""What torch needs to compile for a GPU is found, or named, without torch."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from torchllm.tools.launch import compiler
from torchllm.tools.launch.compiler import count_gpus, first_gpu, lack_of_gpu_compiler

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *count) { *count = 3; return 0; }
int hipGetDeviceCount(int *count) { *count = 4; return INIT; }
int cuDeviceGetName(char *name, int length, int gpu) { strncpy(name, "NVIDIA H100", length); return gpu; }
"""


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with Triton, gcc and the headers of Python, which lie in the folder that is returned."""
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    return tmp_path


def test_what_is_missing_is_named(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lack_of_gpu_compiler() == ""
    (complete / "Python.h").unlink()
    assert lack_of_gpu_compiler() == f"Python's headers are not installed ({complete / 'Python.h'})"
    monkeypatch.setenv("CC", "icc")
    assert lack_of_gpu_compiler() == "there is no C compiler here (icc)"
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert lack_of_gpu_compiler() == "there is no C compiler here (gcc or clang)"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert lack_of_gpu_compiler() == "Triton is not installed"


def build_driver(library: Path, init: int = 0) -> str:
    """Build a driver whose initialization returns `init`; return its path."""
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    source = library.with_suffix(".c")
    source.write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", f"-DINIT={init}", "-o", str(library), str(source)], check=True)
    return str(library)


def test_gpus_are_counted_and_named_by_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "CUDA_DRIVER", "no_such_driver.so")
    assert count_gpus() == 0
    assert first_gpu() == ""
    for init, gpus, name in ((0, 3, "NVIDIA H100"), (100, 0, "")):  # CUDA_ERROR_NO_DEVICE
        monkeypatch.setattr(compiler, "CUDA_DRIVER", build_driver(tmp_path / f"libcuda{init}.so", init))
        assert count_gpus() == gpus
        assert first_gpu() == name


def test_amd_gpus_are_counted_by_the_runtime_of_torchs_build_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "CUDA_DRIVER", "no_such_driver.so")
    libraries = tmp_path / "torch/lib"
    libraries.mkdir(parents=True)
    (tmp_path / "torch/__init__.py").write_text("raise AssertionError('it is not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    build_driver(libraries / compiler.HIP_RUNTIME)
    assert count_gpus() == 0  # torch is another build, whatever else is there
    (libraries / compiler.HIP_BUILD).touch()
    assert count_gpus() == 4
