"""Train a ladder of sizes, fit their loss over compute, predict the next size, and measure how far off it was.

    python recipes/ladder LADDER.toml [--output=FOLDER] [--dry-run]

LADDER.toml names a run and sizes in parameters (train_configs/ladders has an example). Shape, steps, batch and learning
rate of each size are those of `torchllm size`; `overrides` go on top of them. The sizes are trained one after the other
by run_train.sh, each to its end. Then one law is fitted over the validation losses, and FOLDER/prediction.json has the
loss that it predicts for the last size, `ladder.next`; only then is this size trained.

FOLDER/results.csv has a row per size, results.md the table, the law and its error. The same command continues a ladder
that was ended. --dry-run lists the sizes and their compute.
"""

import argparse
import csv
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from sweep.job import resolve_layout, run_job
from sweep.sweep import read_study

from torchllm.config import Config, Count, Natural, Positive, Run
from torchllm.config.errors import UserError
from torchllm.config.write import dump_toml
from torchllm.facts.flops import flops_per_token, parameter_count
from torchllm.tools.planner.search.size import amount, sized_config, with_batch
from torchllm.tools.resources import find_config

from .fit import LEAST, MOST, Interval, Point, PowerLaw

SIZED = {
    "model": ("layers", "hidden", "heads", "kv_heads", "ffn", "tied_embeddings"),
    "training": ("steps", "global_batch_size"),
    "optimizer": ("learning_rate",),
    "schedule": ("warmup_steps", "final_fraction"),
}
"""keys that a size has by `torchllm size`"""


@dataclass(frozen=True)
class Ladder:
    """The sizes to train."""

    config: str = ""
    """the run's TOML, relative to this file"""
    sizes: tuple[str, ...] = ()
    """parameters, such as 100K or 1.5M; the law is fitted over them"""
    next: str = ""
    """the size whose loss is predicted, then measured"""
    tokens_per_parameter: Positive = 20.0
    """tokens of a run over its size"""
    global_batch_size: Natural = 0
    """sequences of a step of every size; 0: by `torchllm size`"""
    overrides: tuple[str, ...] = ()
    """of every size, as on the command line: --model.base_width=64"""
    processes: Count = 1
    """ranks of every run, all on this node if there is no launcher"""
    launcher: str = ""
    """command that starts run_train.sh on the nodes of a job, which share the results' folder: srun --nodes=8"""


@dataclass(frozen=True)
class LadderFile:
    """The whole file."""

    ladder: Ladder = field(default_factory=Ladder)


class Rung(NamedTuple):
    """One size."""

    name: str
    """as in LADDER.toml"""
    overrides: tuple[str, ...]
    steps: int
    parameters: int
    tokens: int
    compute: float
    """in FLOPs"""


class Measured(NamedTuple):
    """A row of results.csv."""

    size: str
    parameters: int
    tokens: int
    compute: float
    """in FLOPs"""
    loss: float
    """validation after the last step, in nats per token"""


def read_ladder(file: str) -> Ladder:
    """Read a ladder's TOML. SystemExit(2) after one line for everything that is wrong."""
    errors: list[str] = []
    ladder = read_study(LadderFile, file, errors).ladder
    if not errors and not (ladder.config and (Path(file).parent / ladder.config).is_file()):
        errors.append(f"{file}: ladder.config: {ladder.config!r}: no such file in {Path(file).parent}")
    if not errors and not LEAST <= len(ladder.sizes) <= MOST:
        errors.append(f"{file}: ladder.sizes: a law takes {LEAST} to {MOST} sizes, not {len(ladder.sizes)}")
    for size in (*ladder.sizes, ladder.next):
        try:
            amount(size)
        except argparse.ArgumentTypeError as error:
            errors.append(f"{file}: ladder.sizes and ladder.next: {error}")
    if not errors and len(set(map(amount, (*ladder.sizes, ladder.next)))) <= len(ladder.sizes):
        errors.append(f"{file}: ladder.sizes and ladder.next: a size is there twice")
    if errors:
        print("\n".join(errors), file=sys.stderr)
        raise SystemExit(2)
    return ladder


def rung_of(size: str, ladder: Ladder, config: str) -> Rung:
    """Return a size with the overrides that make it of the ladder's run. Raises UserError if the run cannot be it."""
    base = _resolved(config, ladder.overrides, ladder.processes)
    if base.data.changes_size:
        raise UserError(
            "data.stage: the sizes of a ladder have one batch and one length each: set --data.stage=[] in the overrides"
        )
    tokens = ladder.tokens_per_parameter * amount(size)
    sized = sized_config(amount(size), tokens, base.model.vocab, base.training.sequence_length)
    if ladder.global_batch_size:
        sized = with_batch(sized, ladder.global_batch_size, tokens)
    values = {f"--{section}.{key}": _text(sized, section, key) for section, keys in SIZED.items() for key in keys}
    steps = sized.training.steps
    values |= {"--evaluate.interval": str(steps), "--metrics.log_interval": str(max(1, steps // 100))}
    values |= {"--generate.after_training": "false"}
    values |= {"--checkpoint.remote": "", "--checkpoint.resume": "auto"}  # or a size would go on from the one before
    given = [override.partition("=")[0] for override in ladder.overrides]
    overrides = (*[f"{key}={value}" for key, value in values.items() if key not in given], *ladder.overrides)
    run = _resolved(config, overrides, ladder.processes)
    trained = run.training.steps * run.training.global_batch_size * run.training.sequence_length
    compute = trained * flops_per_token(run.model, run.training.sequence_length)
    return Rung(size, overrides, run.training.steps, parameter_count(run.model), trained, compute)


def _text(config: Config, section: str, key: str) -> str:
    value = getattr(getattr(config, section), key)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _resolved(config: str, overrides: tuple[str, ...], processes: int) -> Config:
    resolved = resolve_layout(config, overrides, processes)
    if resolved.config is None:
        raise UserError(resolved.problem)
    return resolved.config


def main(arguments: list[str]) -> None:
    """Train the sizes that are not in results.csv yet, predict the next one, train it, and write the summary."""
    options = ladder_parser().parse_args(arguments)
    ladder_file = find_config(options.ladder)
    ladder = read_ladder(ladder_file)
    config = os.path.normpath(Path(ladder_file).parent / ladder.config)
    folder = Path(options.output or f"runs/ladder-{Path(ladder_file).stem}")
    try:
        *rungs, last = [rung_of(size, ladder, config) for size in (*ladder.sizes, ladder.next)]
        base = _resolved(config, ladder.overrides, ladder.processes)
    except UserError as error:
        print(f"{ladder_file}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if options.dry_run:
        for rung in (*rungs, last):
            print(f"{rung.name:>6s}  {rung.parameters:,} parameters, {rung.tokens:,} tokens, {rung.compute:.2e} FLOPs")
        return
    folder.mkdir(parents=True, exist_ok=True)
    refuse_other_ladder(ladder, base, folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the running job is ended too
    try:
        run_ladder(ladder, rungs, last, config, folder)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def run_ladder(ladder: Ladder, rungs: Sequence[Rung], last: Rung, config: str, folder: Path) -> None:
    """Train the sizes, predict the last one, train it, and write the summary."""
    points = [train_size(rung, ladder, config, folder) for rung in rungs]
    law = PowerLaw([Point(point.compute, point.loss) for point in points])
    predicted = law.predict(last.compute)
    (folder / "prediction.json").write_text(json.dumps({"size": last.name, **predicted._asdict(), "law": str(law)}))
    print(f"predicted for {last.name}: {interval_text(predicted)}", flush=True)
    measured = train_size(last, ladder, config, folder)
    (folder / "results.md").write_text(summary(points, law, measured))
    print(folder / "results.md")


def ladder_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ladder", metavar="LADDER.toml")
    parser.add_argument("--output", default="", metavar="FOLDER", help="results (default: runs/ladder-NAME)")
    parser.add_argument("--dry-run", action="store_true", help="list the sizes and their compute")
    return parser


def refuse_other_ladder(ladder: Ladder, base: Config, folder: Path) -> None:
    """Write the ladder into its folder. SystemExit(2) if the folder has another one: its runs would not compare.

    base: the run, which the sizes are made of.
    """
    file = folder / "ladder.json"
    content = json.dumps(asdict(ladder) | {"run": dump_toml(replace(base, run=Run()))}, indent=1)
    if file.exists() and file.read_text() != content:
        print(f"{file}: the sizes there are of another ladder, or run: choose another --output", file=sys.stderr)
        raise SystemExit(2)
    file.write_text(content)


def train_size(rung: Rung, ladder: Ladder, config: str, folder: Path) -> Measured:
    """Return the row of a size, after training it if results.csv has none.

    SystemExit(1) if its run fails, or ends before its last step or without a validation loss.
    """
    results = folder / "results.csv"
    for row in read_sizes(results):
        if row.size == rung.name:
            return row
    run_folder = folder / rung.name
    log = folder / f"{rung.name}.log"
    print(f"{rung.name}: {rung.parameters:,} parameters, {rung.tokens:,} tokens; {log}", flush=True)
    arguments = [config, *rung.overrides, f"--run.folder={run_folder}"]
    status = run_job(arguments, ladder.processes, None, log, ladder.launcher)
    if status != 0:
        print(f"{rung.name}: its run ended with status {status}: {log}", file=sys.stderr)
        raise SystemExit(1)
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["step"] == rung.steps]
    loss = next((record["validation_loss"] for record in records if record.get("validation_loss") is not None), None)
    if loss is None:
        print(f"{rung.name}: no validation loss of step {rung.steps}, its last: {log}", file=sys.stderr)
        raise SystemExit(1)
    row = Measured(rung.name, rung.parameters, rung.tokens, rung.compute, loss)
    write_sizes(results, [*read_sizes(results), row])
    return row


def read_sizes(file: Path) -> list[Measured]:
    """Return the rows of a ladder; none if there is no file."""
    if not file.is_file():
        return []
    with file.open(newline="") as opened:
        rows = [row for row in csv.reader(opened) if row][1:]
    try:
        return [Measured(size, int(n), int(d), float(compute), float(loss)) for size, n, d, compute, loss in rows]
    except ValueError as error:
        raise UserError(f"{file}: {error}: remove the row, and its size is trained again") from error


def write_sizes(file: Path, rows: Sequence[Measured]) -> None:
    """Replace the whole file, so that no reader sees half a row."""
    temporary = file.with_suffix(".tmp")
    with temporary.open("w", newline="") as opened:
        csv.writer(opened, lineterminator="\n").writerows([Measured._fields, *rows])
    temporary.replace(file)


def interval_text(interval: Interval) -> str:
    low, high = interval.loss - interval.half_width, interval.loss + interval.half_width
    return f"{interval.loss:.4f} nats per token ({low:.4f} to {high:.4f} in 90 of 100 cases)"


def summary(points: Sequence[Measured], law: PowerLaw, measured: Measured) -> str:
    """Return the table of the sizes, the law, and the error of its prediction."""
    lines = ["| size | parameters | tokens | FLOPs | loss | law |", "|---|--:|--:|--:|--:|--:|"]
    for row in (*points, measured):
        numbers = f"{row.parameters:,} | {row.tokens:,} | {row.compute:.2e} | {row.loss:.4f}"
        lines.append(f"| {row.size} | {numbers} | {law.predict(row.compute).loss:.4f} |")
    predicted = law.predict(measured.compute)
    error = measured.loss - predicted.loss
    lines += [
        "",
        f"loss = {law}, in nats per token, fitted over all but the last size.",
        f"Predicted for {measured.size}: {interval_text(predicted)}; measured: {measured.loss:.4f}.",
        f"Off by {error:+.4f} nats, {abs(error) / predicted.half_width:.2f} of the interval's half width.",
    ]
    return "\n".join(lines) + "\n"
