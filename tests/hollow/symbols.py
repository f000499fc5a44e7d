"""Compares the names that torch and Triton look up in CUDA's libraries with those that the stand-in has.

    python -m tests.hollow.symbols     prints those that neither it nor `absent.txt` has

A name that is missing is a crash at its first use, or at the import of a compiled module: a new release of torch or of
Triton is to fail here, with names. What no test needs is in `absent.txt`, by what it is for.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.hollow.bed import build

ABSENT = Path(__file__).parent / "absent.txt"
LIBRARIES = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so")
NAME = re.compile(r"^(cu[A-Z]|cuda[A-Z]|__cuda|nccl|cublas)\w*$")
OTHERS = re.compile(r"^cu(File|blas|fft|rand|solver|sparse|dnn)")
"""prefixes of libraries that are real here: they come with torch's wheel"""


def _symbols(library: Path, option: str) -> set[str]:
    """Return the names of a library's dynamic symbols, without versions. option: of nm."""
    done = subprocess.run(["nm", "-D", option, str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines()}


def exported() -> set[str]:
    """Return the names that the stand-in has."""
    return _symbols(build() / "libcuda.so.1", "--defined-only")


def asked() -> set[str]:
    """Return the names that the installed torch and Triton ask for."""
    names: set[str] = set()
    for library in LIBRARIES:
        for name in _symbols(_folder("torch") / "lib" / library, "--undefined-only"):
            if NAME.match(name) and not OTHERS.match(name):
                names.add(name)
    driver = (_folder("triton") / "backends" / "nvidia" / "driver.c").read_text()
    names.update(name for name in re.findall(r"\bcu[A-Z]\w+", driver) if not name.endswith(("Handle", "_t")))
    return names


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def absent() -> set[str]:
    """Return the names of `absent.txt`."""
    lines = (line.partition("#")[0] for line in ABSENT.read_text().splitlines())
    return {name for line in lines for name in line.split()}


def missing() -> list[str]:
    """Return the names that are asked for, that neither the stand-in has nor `absent.txt`."""
    has = exported() | absent()
    return sorted(name for name in asked() if name not in has and f"{name}_v2" not in has)


if __name__ == "__main__":
    print("\n".join(missing()))
    sys.exit(bool(missing()))
