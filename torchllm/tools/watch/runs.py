"""List runs: `torchllm runs [FOLDER]`, with the state, the step and the last loss of each. No torch."""

import argparse
import json
import os
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from torchllm.runtime.stop import STOPPED
from torchllm.tools.launch.lease import DONE, FOLDER, Timing, has_ended, newest_owner
from torchllm.tools.resources import RUN_CONFIG, run_folder

METRICS = "metrics.jsonl"
TAIL = 65_536
"""bytes at the end of metrics.jsonl that hold its last record"""

State = Literal["running", "finished", "stopped", "failed"]


def state_of_run(folder: Path) -> State:
    """Return the state of a run, as its folder says.

    running: its job owns the folder, and has given a sign of life within `Timing.limit` seconds. finished: its job has
    ended without an error. stopped: so it has, because it was asked to stop. failed: its job has ended with an error,
    or was killed. A folder without a lease, such as a copy, is finished if the last step was logged, else stopped.
    """
    owner = newest_owner(folder)
    if owner is None:
        summary = read_summary(folder)
        return "finished" if summary.step and summary.step == summary.steps else "stopped"
    if not has_ended(owner):
        counted = max(file.stat().st_mtime for file in (folder / FOLDER).iterdir())
        return "running" if time.time() - counted < Timing().limit else "failed"
    if owner.count != DONE:
        return "failed"
    return "stopped" if (folder / STOPPED).exists() else "finished"


class Summary(NamedTuple):
    """The figures of a run that a list shows; None: not known, or not yet."""

    step: int | None
    """the last that was logged"""
    steps: int | None
    """the steps to train"""
    loss: float | None


def read_summary(folder: Path) -> Summary:
    """Read the figures of a run. A file that is missing or damaged gives none."""
    steps = None
    with suppress(OSError, ValueError, LookupError, TypeError):
        steps = tomllib.loads((folder / RUN_CONFIG).read_text(encoding="utf-8"))["training"]["steps"]
    with suppress(OSError), (folder / METRICS).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError, LookupError, TypeError):  # the run is writing the last one
                record = json.loads(line)
                return Summary(record["step"], steps, record["loss"])
    return Summary(None, steps, None)


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield the run folders in a folder, at any depth, in the order of their names; also the folder itself."""
    for path, names, files in os.walk(folder):
        names.sort()
        if FOLDER in names or (METRICS in files and RUN_CONFIG in files):
            names.clear()  # a run holds no other run
            yield Path(path)


def main(arguments: list[str]) -> None:
    """Print the runs for the options of `torchllm runs`. SystemExit(2) if there is none."""
    parser = argparse.ArgumentParser(prog="torchllm runs", description="List runs, with their state and last loss.")
    parser.add_argument("folder", nargs="?", default="runs", type=run_folder, metavar="FOLDER", help="default: runs")
    folder: Path = parser.parse_args(arguments).folder
    rows = [("run", "state", "step", "loss")]
    try:
        for run in run_folders(folder):
            step, steps, loss = read_summary(run)
            shown_step = "–" if step is None else f"{step:,} of {steps or 0:,}"
            rows.append((str(run), state_of_run(run), shown_step, "–" if loss is None else f"{loss:.4f}"))
    except OSError as error:  # of another user
        parser.error(str(error))
    if len(rows) == 1:
        parser.error(f"{folder}: no run folder in it" if folder.is_dir() else f"{folder}: no such folder")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        name, state, shown_step, shown_loss = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"{name}  {state}  {shown_step}  {shown_loss}".rstrip())
