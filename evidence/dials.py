"""The loss of weights and moments in fewer bits, beside float32's. It needs matplotlib.

    python -m evidence.dials train evidence/dials.csv [PROCESSES]    about 5 hours of a CPU core
    python -m evidence.dials draw evidence/dials.csv docs/images/dials.svg    prints a table, too

`train` runs recipes/pretrain.py on the text of train_configs/debug.toml, and goes on where it was stopped.
"""

import csv
import json
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from threading import Lock
from typing import NamedTuple

SEEDS = (1, 2, 3)
MODELS = {
    "1.2 M": [],
    "1.2 M, ffn 448": ["--model.ffn=448"],  # its rows are multiples of 32, as int8 needs
    "5.1 M": [
        *("--model.layers=7", "--model.hidden=256", "--model.ffn=672", "--optimizer.learning_rate=1e-3"),
        "--training.global_batch_size=4",
    ],
}
TYPES = {
    "1.2 M": ("float32, float32", "float32, bfloat16", "bfloat16, bfloat16"),
    "1.2 M, ffn 448": ("float32, float32", "float32, int8"),
    "5.1 M": (
        *("float32, float32, 4", "float32, float32, 2"),
        *("float32, bfloat16, 4", "bfloat16, bfloat16, 4", "float32, int8, 4", "bfloat16, int8, 4"),
    ),
}
"""training.weights_dtype, optimizer.state_dtype and training.micro_batch_size of the trainings of a model. Two sizes of
micro batches train the same but for the order of sums: their losses differ as those of any two runs would"""
RUN = [
    *("train_configs/debug.toml", "--parallel.dp_shard=1", "--training.steps=1000", "--schedule.warmup_steps=50"),
    *("--evaluate.interval=1000", "--checkpoint.interval=100000", "--generate.after_training=false"),
]


class Trial(NamedTuple):
    """One training."""

    model: str
    types: str
    seed: int

    def arguments(self) -> list[str]:
        """Return the arguments of recipes/pretrain.py."""
        keys = ("training.weights_dtype", "optimizer.state_dtype", "training.micro_batch_size")
        types = [f"--{key}={value}" for key, value in zip(keys, self.types.split(", "), strict=False)]
        return [*RUN, *MODELS[self.model], *types, f"--run.seed={self.seed}"]


def train(table: Path, processes: int) -> None:
    done, lock = read(table) if table.exists() else {}, Lock()

    def run(trial: Trial) -> None:
        with TemporaryDirectory() as folder:
            words = [*trial.arguments(), f"--run.folder={folder}/run"]
            subprocess.run([sys.executable, "recipes/pretrain.py", *words], check=True, capture_output=True)
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        losses = [values["validation_loss"] for values in map(json.loads, lines) if "validation_loss" in values]
        with lock, table.open("a", newline="") as rows:
            csv.writer(rows, lineterminator="\n").writerow([*trial, f"{losses[-1]:.4f}"])

    trials = [Trial(model, types, seed) for model in MODELS for seed, types in product(SEEDS, TYPES[model])]
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run, (trial for trial in trials if trial not in done)))


def read(table: Path) -> dict[Trial, float]:
    with table.open(newline="") as rows:
        return {Trial(model, types, int(seed)): float(loss) for model, types, seed, loss in csv.reader(rows)}


def draw(table: Path, picture: Path) -> None:
    from matplotlib import pyplot, rcParams

    losses: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trial, loss in sorted(read(table).items()):
        losses[trial.model][trial.types].append(loss)
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dials"})
    widths = [len(TYPES[model]) for model in MODELS]
    figure, axes = pyplot.subplots(
        1, len(MODELS), figsize=(10, 3.2), layout="constrained", gridspec_kw={"width_ratios": widths}
    )
    for axis, model in zip(axes, MODELS, strict=True):
        names = [types.replace(", ", "\n") for types in TYPES[model]]
        for place, types in enumerate(TYPES[model]):
            of_seeds = losses[model][types]
            for seed, loss, marker in zip(SEEDS, of_seeds, "os^", strict=False):
                axis.plot(place, loss, marker, color="#4c78a8", fillstyle="none", label=f"seed {seed}")
            axis.plot(place, mean(of_seeds), "_", color="#f58518", markersize=24, label="mean")
            print(f"| {model} | {types} | {' | '.join(f'{loss:.4f}' for loss in of_seeds)} | {mean(of_seeds):.4f} |")
        axis.set_xticks(range(len(names)), names, fontsize=8)
        axis.set(title=model, xlim=(-0.5, len(names) - 0.5))
    axes[0].set(ylabel="validation loss, nats per byte")
    axes[0].legend(*(labels[: len(SEEDS) + 1] for labels in axes[0].get_legend_handles_labels()), fontsize=8)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    command, table, *last = sys.argv[1:]
    if command == "train":
        train(Path(table), int(last[0]) if last else 1)
    else:
        draw(Path(table), Path(last[0]))
