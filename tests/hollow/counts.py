"""Reads, in a process on the hollow GPU, what the stand-in has counted."""

import ctypes
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Counted(NamedTuple):
    """Everything of one kind and name since the last reset."""

    kind: str
    """launch, sync, copy, memset, collective, communicator, allocation, event, wait or missing; of captures: node,
    obstacle, or concurrent: a node that is not ordered before or after some rows that NCCL sends"""
    name: str
    """of the kernel (mangled), function or direction"""
    times: int
    bytes: int


def reset() -> None:
    """Forget what was counted."""
    ctypes.CDLL(None).hollow_reset()


def read() -> list[Counted]:
    """Return what was counted since the last reset. AttributeError in a process that is not on the hollow GPU."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts"
        ctypes.CDLL(None).hollow_write(str(file).encode())
        lines = file.read_text().splitlines()
    counted = []
    for line in lines:
        kind, name, times, size = line.split("\t")
        counted.append(Counted(kind, name, int(times), int(size)))
    return counted


def times(counted: list[Counted], kind: str) -> int:
    """Return how often something of this kind happened."""
    return sum(entry.times for entry in counted if entry.kind == kind)


def names(counted: list[Counted], kind: str) -> dict[str, int]:
    """Return how often each name of this kind occurred, the most frequent first; kernels by readable names."""
    raw = [entry for entry in counted if entry.kind == kind]
    readable = (
        _demangled([entry.name for entry in raw])
        if kind in ("launch", "node", "concurrent")
        else [entry.name for entry in raw]
    )
    totals: Counter[str] = Counter()
    for entry, name in zip(raw, readable, strict=True):
        totals[name] += entry.times
    return dict(totals.most_common())


def _demangled(kernels: list[str]) -> list[str]:
    """Return the C++ names of kernels, by binutils' c++filt; the mangled ones if there is none."""
    try:
        done = subprocess.run(["c++filt"], input="\n".join(kernels), capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return kernels
    return done.stdout.splitlines()
