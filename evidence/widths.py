"""The best learning rate of several widths, with and without `model.base_width`. It needs matplotlib.

    python -m evidence.widths train evidence/widths.csv    about 5 minutes of a CPU core
    python -m evidence.widths draw evidence/widths.csv docs/images/widths.svg    prints a table, too

`train` runs recipes/minimal.py on the text of train_configs/debug.toml, and goes on where it was stopped.
"""

import csv
import runpy
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import mean
from typing import NamedTuple

BASE, WIDTHS, SEEDS = 64, (64, 128, 256), (0, 1, 2)
RATES = tuple(0.0005 * 2**power for power in range(7))
STEPS, LAST = 150, 30  # the mean loss of the last ones counts


class Trial(NamedTuple):
    """One training."""

    base_width: int
    width: int
    rate: float
    seed: int

    def arguments(self) -> list[str]:
        """Return the arguments of recipes/minimal.py. Only the width of a head does not grow."""
        return f"""train_configs/debug.toml --run.seed={self.seed} --optimizer.learning_rate={self.rate}
            --data.workers=0 --model.layers=2 --model.hidden={self.width} --model.ffn={self.width} --model.kv_heads=0
            --model.heads={self.width // 16} --model.initial_std=0.08 --model.base_width={self.base_width}
            --training.sequence_length=32 --training.steps={STEPS} --training.global_batch_size=8
            --training.micro_batch_size=8""".split()


def train(table: Path) -> None:
    from torchllm.recipe import load_config

    main = runpy.run_path("recipes/minimal.py")["main"]
    done = read(table) if table.exists() else {}
    for trial in (Trial(base, width, *rest) for width, *rest, base in product(WIDTHS, RATES, SEEDS, (BASE, 0))):
        if trial not in done and (trial.width != BASE or trial.base_width):  # the base trains once: both are the same
            losses = main(load_config(trial.arguments(), one_device=True))
            with table.open("a", newline="") as rows:
                csv.writer(rows).writerow([*trial, f"{mean(losses[-LAST:]):.4f}"])


def read(table: Path) -> dict[Trial, float]:
    with table.open(newline="") as rows:
        return {Trial(int(b), int(w), float(r), int(s)): float(loss) for b, w, r, s, loss in csv.reader(rows)}


def draw(table: Path, picture: Path) -> None:
    from matplotlib import pyplot, rcParams

    losses: dict[tuple[int, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trial, loss in sorted(read(table).items()):
        for base in (0, BASE) if trial.width == BASE else (trial.base_width,):
            losses[base, trial.width][trial.rate].append(loss)
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "widths"})
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for axis, base in zip(axes, (0, BASE), strict=True):
        for width in sorted({width for _, width in losses}):
            means = {rate: mean(of_seeds) for rate, of_seeds in losses[base, width].items()}
            (line,) = axis.plot(list(means), list(means.values()), label=f"width {width}")
            for rate, of_seeds in losses[base, width].items():
                axis.plot([rate] * len(of_seeds), of_seeds, ".", color=line.get_color())
            print(f"| {base} | {width} | {min(means, key=means.__getitem__):g} | {min(means.values()):.3f} |")
        axis.set(xscale="log", xlabel="learning rate", title=f"model.base_width = {base}")
    axes[0].set(ylabel="loss, nats per byte")
    axes[0].legend()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    train(Path(sys.argv[2])) if sys.argv[1] == "train" else draw(Path(sys.argv[2]), Path(sys.argv[3]))
