"""Train tiny models for a long time and fail if memory, descriptors, threads or process groups grow.

    python tests/soak/run.py --minutes 30                     all scenarios, 30 minutes together
    python tests/soak/run.py --minutes 5 --only fsdp rebuilds

Each scenario is a run of recipes/pretrain.py (`probed.py`) that is told to stop when its share of the time is over. The
slopes of what each rank holds are printed per 1,000 steps, with their standard error (`slopes.py`). Exit status 1 if a
slope is over its limit and over its noise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # Python put this folder there

from tests.soak.slopes import BLOCKS, Sample, Slope, fit_slope
from tests.tiny_run import DEBUG, ROOT, SMALL, changed
from torchllm.runtime.process import STOP

LIMITS = {"memory_kib": 200.0, "workers_kib": 200.0, "descriptors": 1.0, "threads": 1.0, "groups": 0.5}
"""what each quantity may grow by per 1,000 steps: less is not told from noise in runs of minutes"""
LEAST = {"memory_kib": 1024.0, "workers_kib": 1024.0, "descriptors": 1.0, "threads": 1.0, "groups": 1.0}
"""growth over the settled part of a run that is none: an allocator takes memory in pieces"""
STEPS = 100_000_000
"""more than any scenario takes"""
RECORDS = 100
"""of the flight recorder: its default, 5,000, fills for half an hour, which looks like a leak"""
PATIENCE = 60.0
"""seconds that a run may take to stop"""


class Scenario(NamedTuple):
    ranks: int
    settings: Sequence[str]
    every: int = 10
    """steps between two samples"""
    rebuilds: bool = False
    """build everything anew at each checkpoint"""
    profiles: bool = False
    """profile at every interval: with the limit on its cost there would be a handful of profiles"""


SCENARIOS = {
    "plain": Scenario(1, ["--data.workers=0"]),
    "fsdp": Scenario(2, ["--data.workers=0", "--parallel.zero_stage=3"]),
    "pipeline": Scenario(2, ["--data.workers=0", "--parallel.pp=2"]),
    "workers": Scenario(1, ["--data.workers=2", "--data.document_mask=true"]),
    "saves": Scenario(
        1, ["--data.workers=0", "--checkpoint.interval=20", "--checkpoint.keep=2", "--checkpoint.asynchronous=true"]
    ),
    "evaluation": Scenario(1, ["--data.workers=0", "--evaluate.interval=10"]),
    "profiling": Scenario(1, ["--data.workers=0", "--metrics.breakdown_interval=10"], profiles=True),
    "rebuilds": Scenario(2, ["--data.workers=1", "--checkpoint.interval=25", "--checkpoint.keep=2"], 5, rebuilds=True),
}
QUIET = [
    f"--training.steps={STEPS}",
    "--metrics.log_interval=100",
    "--metrics.tensorboard=false",
    "--metrics.breakdown_interval=0",
    "--checkpoint.interval=0",
    "--evaluate.interval=0",
    "--generate.after_training=false",
]
"""nothing but steps, before a scenario's own settings"""


class Failure(Exception):
    """A scenario that did not run."""


def soak(name: str, scenario: Scenario, seconds: float, folder: Path) -> dict[str, dict[str, Slope]]:
    """Run a scenario and return the slope of each quantity, by rank and quantity. Raises Failure if it does not run."""
    samples = folder / "samples"
    samples.mkdir(parents=True)
    command = [sys.executable]
    if scenario.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={scenario.ranks}"]
    settings = changed(SMALL, *QUIET, *scenario.settings, f"--run.folder={folder / 'run'}")
    command += [str(Path(__file__).with_name("probed.py")), str(ROOT / DEBUG), *settings]
    variables = {
        "NPROC": str(scenario.ranks),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_FR_BUFFER_SIZE": str(RECORDS),
        "SOAK_SAMPLES": str(samples),
        "SOAK_EVERY": str(scenario.every),
        "SOAK_REBUILD": "1" if scenario.rebuilds else "",
        "SOAK_PROFILE": "1" if scenario.profiles else "",
    }
    with (folder / "log.txt").open("w") as log:
        run = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=log, stderr=log)
        try:
            run.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            (folder / "run" / STOP).touch()  # asks it to save and end
            try:
                run.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                run.terminate()
                run.wait()
    if run.returncode != 0:
        text = (folder / "log.txt").read_text()
        raise Failure(f"{name} ended with {run.returncode}:\n{text[-3000:]}")
    return {file.stem: slopes_of(file) for file in sorted(samples.iterdir())}


def slopes_of(file: Path) -> dict[str, Slope]:
    notes = [json.loads(line) for line in file.read_text().splitlines()]
    if len(notes) < 3 * BLOCKS:
        raise Failure(f"{file.stem} noted only {len(notes)} samples, a slope needs {3 * BLOCKS}: give it more minutes")
    slopes = {}
    for quantity in LIMITS:
        slopes[quantity] = fit_slope([Sample(note["step"], note[quantity]) for note in notes])
    return slopes


def growing(slopes: Mapping[str, Slope]) -> list[str]:
    return [name for name, slope in slopes.items() if slope.exceeds(LIMITS[name], LEAST[name])]


def print_slopes(name: str, rank: str, slopes: Mapping[str, Slope]) -> None:
    cells = [f"{slope.growth:.3g} ± {slope.error:.2g}" for slope in slopes.values()]
    verdict = "GROWS: " + ", ".join(growing(slopes)) if growing(slopes) else "flat"
    print(f"| {name} | {rank} | {' | '.join(cells)} | {verdict} |", flush=True)


def main() -> int:
    """Run the scenarios that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of all scenarios together")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--folder", type=Path, help="keeps runs, logs and samples; by default they are deleted")
    arguments = parser.parse_args()
    failed = False
    print(f"| scenario | rank | {' | '.join(f'{quantity} per 1,000 steps' for quantity in LIMITS)} | verdict |")
    print("|" + " --- |" * (len(LIMITS) + 3))
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.folder or Path(temporary)
        for name in arguments.only:
            folder = root / f"{name}-{time.time():.0f}"
            try:
                ranks = soak(name, SCENARIOS[name], 60 * arguments.minutes / len(arguments.only), folder)
            except Failure as failure:
                print(failure, flush=True)
                failed = True
                continue
            for rank, slopes in ranks.items():
                print_slopes(name, rank, slopes)
                failed = failed or bool(growing(slopes))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
