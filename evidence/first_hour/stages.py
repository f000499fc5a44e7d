"""The stages of the first hour: each answers one question, and knows a wrong answer.

A stage's `measure` starts jobs and returns their figures; its `problems` judges these, without a machine, so that each
judgment can be tested with a planted fault. A stage whose jobs fail raises StageFailed.
"""

import csv
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from evidence.first_hour.jobs import MOST_RANKS, Figures, Jobs, Machine
from torchllm.tools.resources import resource

STEPS = 40
"""of the runs whose losses are compared"""
EXACT_STEPS = 10
"""first steps, whose float32 losses must agree; later ones drift apart, because each step enlarges rounding errors"""
FLOAT32_DIFFERENCE = 1e-3
"""of losses in float32, relative: products are in tf32 on a GPU; a wrong gradient changes them by 1e-1"""
BFLOAT16_DIFFERENCE = 3e-2
"""of losses in bfloat16 from those in float32, relative, over all steps; 1.3e-2 on a CPU, at the steepest step"""
BARE_LOOP_SPEED = 0.97
"""speed of a step that is enough, of a bare loop's"""
TORCHTITAN_TIME = 1.03
"""of torchtitan's step that a step may take"""
SHARE_OF_PEAK = 0.70
"""of the data sheet's FLOP/s that the largest bfloat16 products must reach: an H100 reaches 0.80"""
MEMORY_DIFFERENCE = 0.05
"""of the peak of a step from that on the hollow GPU, relative; the dry run is within 1.1 % of that one"""
HOLLOW_PEAKS = Path(__file__).with_name("peaks.csv")
"""peaks of the same steps on the hollow GPU (docs/hollow_gpu.md), by tests/hollow/first_hour_peaks.py"""
MEMORY_MODES = ("none", "full")
"""of recomputation, whose peaks are compared"""
ASYNCHRONOUS_SHARE = 0.05
"""of a synchronous save's time that an asynchronous one may take from training"""
OWN_DATA = ("--data.tokenizer=bytes", "--data.sources.0.kind=stdlib", "--data.sources.0.path=")
"""overrides: the standard library as bytes, which needs no network, whatever data the config names"""
ONE_GPU_CONFIG = "train_configs/llama_1b_1gpu.toml"
NODE_CONFIG = "train_configs/llama3_8b_8gpu.toml"


class FirstHourStage(NamedTuple):
    """One question."""

    name: str
    question: str
    measure: Callable[[Jobs], Figures]
    problems: Callable[[Figures], list[str]]
    """returns the faults, a sentence each"""
    gpus: int = 0
    """that it needs at least"""
    package: str = ""
    """that it needs: name and version, as pip has them"""

    def obstacle(self, machine: Machine) -> str:
        """Return why this machine cannot answer; "" if it can."""
        if len(machine.gpus) < self.gpus:
            return f"needs {self.gpus} GPUs, and there are {len(machine.gpus)}"
        if self.package and find_spec(self.package.split("==")[0]) is None:
            return f"needs another package: pip install {self.package}"
        return ""


def measure_losses(jobs: Jobs) -> Figures:
    """Train the small model on this device in both types, and on a CPU in float32."""
    steps = [f"--training.steps={STEPS}", "--schedule.warmup_steps=5", "--checkpoint.interval=0"]
    return {
        "bfloat16": jobs.losses("bfloat16", *steps, "--training.dtype=bfloat16"),
        "float32": jobs.losses("float32", *steps, "--training.dtype=float32"),
        "float32 on a CPU": jobs.losses("cpu", *steps, "--training.dtype=float32", "--run.device=cpu"),
    }


def loss_problems(figures: Figures) -> list[str]:
    """Compare the three curves step by step."""
    expected = figures["float32 on a CPU"]
    problems = difference_problems("float32", figures["float32"][:EXACT_STEPS], expected, FLOAT32_DIFFERENCE)
    return problems + difference_problems("bfloat16", figures["bfloat16"], expected, BFLOAT16_DIFFERENCE)


def difference_problems(name: str, losses: Sequence[float], expected: Sequence[float], limit: float) -> list[str]:
    """Return a sentence for the first loss that is further off than `limit`, relative."""
    for step, (loss, expected_loss) in enumerate(zip(losses, expected, strict=False), start=1):
        difference = abs(loss / expected_loss - 1)
        if not difference <= limit:  # not `>`: nan is a problem too
            return [f"{name}: the loss of step {step} is {loss:.4f}, on a CPU {expected_loss:.4f}: over {limit:g} off"]
    return []


def measure_resume(jobs: Jobs) -> Figures:
    """Train 20 steps, lose the last checkpoint, and train again from the one of step 10."""
    options = ["--run.deterministic=true", "--training.steps=20", "--checkpoint.interval=10"]
    ranks = jobs.machine.ranks
    whole = jobs.losses("resume", *options, ranks=ranks)
    shutil.rmtree(jobs.folder / "resume" / "checkpoints" / "step-00000020")
    resumed = jobs.losses("resume", *options, ranks=ranks)
    return {"ranks": ranks, "at once": whole, "resumed": resumed}


def resume_problems(figures: Figures) -> list[str]:
    """Compare the curves bit by bit."""
    whole, parts = figures["at once"], figures["resumed"]
    if len(set(whole)) == 1:
        return [f"the loss is {whole[0]!r} at every step: nothing was trained"]
    if len(parts) != len(whole):
        return [f"the resumed run logged {len(parts)} steps, the other {len(whole)}"]
    for step, (loss, expected) in enumerate(zip(parts, whole, strict=True), start=1):
        if loss != expected:
            return [f"the loss of step {step} is {loss!r}, without a resume {expected!r}: not the same bits"]
    return []


def measure_matmul(jobs: Jobs) -> Figures:
    """Measure products of growing size."""
    return dict(jobs.benchmark("matmul", *large_config(jobs, jobs.machine.ranks), "--benchmark.seconds=0.5"))


def matmul_problems(figures: Figures) -> list[str]:
    """Compare the best bfloat16 product with the data sheet."""
    shares = []
    for row in figures["matrix products"]:
        if row["dtype"] == "bfloat16" and row["share_of_peak"] is not None:
            shares.append(row["share_of_peak"])
    if shares and max(shares) < SHARE_OF_PEAK:
        best = f"{max(shares):.0%} of the data sheet's FLOP/s"
        return [f"the fastest bfloat16 product reaches {best}: look at the GPU's clock, power limit and temperature"]
    return []


def measure_step(jobs: Jobs) -> Figures:
    """Time a step against a bare loop of the same model and kernels, alone and on all GPUs."""
    options = ["--training.global_batch_size=16", "--benchmark.rounds=3"]
    if jobs.machine.gpus:
        options += ["--training.micro_batch_size=2", "--compile.block=true", "--compile.loss=true"]
    figures: Figures = {}
    for ranks in sorted({1, jobs.machine.ranks}):
        config = large_config(jobs, ranks)
        tables = jobs.benchmark("step", *config, *options, "--parallel.dp_shard=-1", ranks=ranks)
        for title, rows in tables.items():
            figures[f"{title}, ranks {ranks}"] = rows
    return figures


def step_problems(figures: Figures) -> list[str]:
    """Compare the library's speed with the bare loop's."""
    problems = []
    for title, rows in figures.items():
        for row in rows:
            if "ratio" in row and not 1 / row["ratio"] >= BARE_LOOP_SPEED:
                problems.append(
                    f"{title}: {1 / row['ratio']:.3f} of the bare loop's speed, less than {BARE_LOOP_SPEED}"
                )
    return problems


def measure_torchtitan(jobs: Jobs) -> Figures:
    """Time a step against torchtitan's of the same model, on all GPUs."""
    options = ["--model.tied_embeddings=false", "--training.loss_chunk=0", "--recompute.mode=full"]
    options += ["--parallel.dp_shard=-1", "--training.micro_batch_size=1", "--training.global_batch_size=16"]
    options += ["--compile.block=true", "--compile.loss=true", "--benchmark.rounds=3"]
    ranks = jobs.machine.ranks
    return dict(jobs.benchmark("titan", *large_config(jobs, ranks), *options, ranks=ranks))


def torchtitan_problems(figures: Figures) -> list[str]:
    """Compare the times of a step."""
    [row] = figures["step time"]
    if not row["ratio"] <= TORCHTITAN_TIME:
        return [f"a step takes {row['ratio']:.3f} times as long as torchtitan's, more than {TORCHTITAN_TIME}"]
    return []


def memory_layout(jobs: Jobs, mode: str) -> list[str]:
    """Return the config of stage `memory` and overrides: nothing is compiled, a rank has one sequence or two."""
    ranks = jobs.machine.ranks
    per_rank = 1 if ranks == MOST_RANKS else 2
    return [
        *large_config(jobs, ranks),
        f"--training.micro_batch_size={per_rank}",
        f"--training.global_batch_size={per_rank * ranks}",
        "--parallel.dp_shard=-1",
        "--compile.block=false",
        "--compile.loss=false",
        f"--recompute.mode={mode}",
    ]


def measure_memory(jobs: Jobs) -> Figures:
    """Compare the peak of a step with that on the hollow GPU, for two recompute modes."""
    ranks = jobs.machine.ranks
    rows = []
    for mode in MEMORY_MODES:
        config, *overrides = memory_layout(jobs, mode)
        measured = jobs.measure(config, tuple(overrides), steps=3, ranks=ranks)
        peak = measured["live_memory_gib"]  # as the hollow GPU counts it
        rows.append(
            {
                "recompute": mode,
                "status": measured["status"],
                "peak_gib": float(peak) if peak else None,
                "hollow_gib": hollow_peak(ranks, mode),
                "note": measured["note"],
            }
        )
    return {"memory": rows}


def hollow_peak(ranks: int, mode: str) -> float:
    """Return the peak in GiB that a step of stage `memory` has on the hollow GPU."""
    with HOLLOW_PEAKS.open(newline="") as file:
        peaks = {(row["ranks"], row["recompute"]): float(row["peak_gib"]) for row in csv.DictReader(file)}
    return peaks[str(ranks), mode]


def memory_problems(figures: Figures) -> list[str]:
    """Compare each peak with the reference; a step that fails has none."""
    problems = []
    for row in figures["memory"]:
        if row["peak_gib"] is None:
            problems.append(f"recompute {row['recompute']}: {row['status']}: {row['note']}")
        elif not abs(row["peak_gib"] / row["hollow_gib"] - 1) <= MEMORY_DIFFERENCE:
            problems.append(
                f"recompute {row['recompute']}: the peak is {row['peak_gib']:.1f} GiB, on the hollow GPU it is "
                f"{row['hollow_gib']:.1f}: over {MEMORY_DIFFERENCE:.0%} off"
            )
    return problems


def measure_saves(jobs: Jobs) -> Figures:
    """Time a synchronous save, and the time that an asynchronous one takes from training."""
    options = ["--training.global_batch_size=2", "--training.micro_batch_size=2", "--benchmark.rounds=3"]
    return dict(jobs.benchmark("checkpoint", *large_config(jobs, ranks=1), *options))


def save_problems(figures: Figures) -> list[str]:
    """Compare the asynchronous save with the synchronous one."""
    for row in figures["time taken from training"]:
        if row["what"] == "asynchronous / synchronous" and row["ratio"] > ASYNCHRONOUS_SHARE:
            share = f"{row['ratio']:.3f} of a synchronous save's time"
            return [f"an asynchronous save takes {share} from training, more than {ASYNCHRONOUS_SHARE}"]
    return []


def large_config(jobs: Jobs, ranks: int) -> list[str]:
    """Return the config of the largest model that has a run on this number of GPUs, and overrides."""
    if not jobs.machine.gpus:
        return [jobs.config]
    config = NODE_CONFIG if ranks == MOST_RANKS else ONE_GPU_CONFIG
    return [str(resource(config)), *OWN_DATA]


STAGES: tuple[FirstHourStage, ...] = (
    FirstHourStage("losses", "Does this device train the model that a CPU trains?", measure_losses, loss_problems),
    FirstHourStage("resume", "Is a resumed run bitwise the uninterrupted one?", measure_resume, resume_problems),
    FirstHourStage("step", "How much slower is the library than a bare loop?", measure_step, step_problems),
    FirstHourStage("matmul", "How fast are matrix products, of the data sheet?", measure_matmul, matmul_problems),
    FirstHourStage("memory", "Does a step take the memory it should?", measure_memory, memory_problems, gpus=1),
    FirstHourStage(
        "torchtitan",
        "How fast is torchtitan with the same model?",
        measure_torchtitan,
        torchtitan_problems,
        gpus=1,
        package="torchtitan==0.3.0",
    ),
    FirstHourStage(
        "saves", "How much time does an asynchronous save take from training?", measure_saves, save_problems
    ),
)
"""the most valuable first"""
