"""The checks of a machine before a long run on it, in stages of at most 8 minutes, and a page of results.

    python -m evidence.first_hour [CONFIG.toml] [--section.key=value ...]

On one process, which starts jobs on one GPU and on all. CONFIG.toml is the small run (train_configs/debug.toml).
"""

import os
import sys
from dataclasses import dataclass, field

from torchllm.tools.front.start import load_configs
from torchllm.tools.resources import resource

sys.path.insert(0, str(resource("recipes")))
from benchmark.settings import Benchmark, BenchmarkConfig


@dataclass(frozen=True)
class FirstHour(Benchmark):
    """How much is measured."""

    only: str = ""
    """names of the stages to run, also again, with commas between; empty: all that have no answer yet"""


@dataclass(frozen=True)
class FirstHourConfig(BenchmarkConfig):
    """The small run's config, and which stages to run."""

    benchmark: FirstHour = field(default_factory=FirstHour)


if __name__ == "__main__":
    from evidence.first_hour.first_hour import first_hour

    WORDS = sys.argv[1:]
    FILES = [word for word in WORDS if word.endswith(".toml")]
    FILE = FILES[0] if FILES else str(resource("train_configs/debug.toml"))
    os.environ.setdefault("WORLD_SIZE", "1")  # this process is no rank, whatever NPROC says
    CONFIG = load_configs(WORDS if FILES else [FILE, *WORDS], FirstHourConfig)[0]
    first_hour(CONFIG.run.folder, FILE, CONFIG.benchmark.only)
