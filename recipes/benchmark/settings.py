"""Measure this machine: torchllm against plain PyTorch, both sides in one run, and the device's peak.

    python recipes/benchmark NAME [CONFIG.toml] [--section.key=value ...]
    python -P -m torchllm.tools.launch.launch --nproc-per-node=2 recipes/benchmark NAME ...      on several ranks

NAME is one of

    matmul       rate of matrix products by size, and of this config's own matrices (HFU by size)
    step         a whole training step against a bare loop of the same model and kernels; tokens/s, MFU, HFU, memory

The default config is train_configs/debug.toml. The two sides of a comparison take turns for `benchmark.rounds` rounds,
so that other work on the machine slows both; figures are medians. --benchmark.json=true prints one JSON object.
"""

import os
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from torchllm.config import Config, Count, Positive, Run
from torchllm.tools.config.help import print_help
from torchllm.tools.front.start import load_configs
from torchllm.tools.resources import resource

NAMES = ("matmul", "step")
"""each is a function (config, runtime) of this name in the file NAME.py of this folder"""


class Request(NamedTuple):
    """The command line."""

    name: str
    config: "BenchmarkConfig"


@dataclass(frozen=True)
class Place(Run):
    """Where the benchmark may write."""

    folder: str = "runs/benchmark"
    """only its folder `scratch` is written to, and deleted"""


@dataclass(frozen=True)
class Benchmark:
    """How much is measured, and how it is printed."""

    rounds: Count = 7
    """times that each side of a comparison has its turn"""
    steps: Count = 5
    """training steps in one turn"""
    warmup: Count = 3
    """training steps before the measurement, while torch compiles and allocates"""
    seconds: Positive = 1.0
    """matmul: time for one size; squares that would take longer are skipped"""
    json: bool = False
    """print one JSON object instead of tables"""


@dataclass(frozen=True)
class BenchmarkConfig(Config):
    """A run's config and how to measure it."""

    run: Place = field(default_factory=Place)
    benchmark: Benchmark = field(default_factory=Benchmark)


def read_arguments(arguments: list[str], names: tuple[str, ...] = NAMES, usage: str = __doc__) -> Request:
    """Parse the command line. SystemExit(2) if there is no benchmark of this name."""
    name, *rest = arguments or [""]
    if name in ("--help", "-h"):
        print_help(BenchmarkConfig, f"{usage}\n")
        raise SystemExit(0)
    if name not in names:
        print(f"benchmark: the first argument is one of {', '.join(names)}, not {name!r}", file=sys.stderr)
        raise SystemExit(2)
    files = [word for word in rest if word.endswith(".toml")]
    files = files or [str(resource("train_configs/debug.toml"))]
    if files[0] not in rest:
        rest.insert(0, files[0])
    os.environ.setdefault("WORLD_SIZE", "1")  # without torchrun this process is the only rank, whatever NPROC says
    return Request(name, load_configs(rest, BenchmarkConfig)[0])
