"""`torchllm pipeline FILE.toml`: run the stages of a pipeline one after another, and go on where it was stopped.

A stage is a command that a user could type; this only starts it, measures it and remembers that it is done.
"""

import argparse
import fcntl
import os
import re
import resource as usage
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.tools.config.degrees import resolve_degrees
from torchllm.tools.config.draft import read_draft
from torchllm.tools.pipeline.stages import (
    PipelineFile,
    Planned,
    Record,
    find_stages,
    read_pipeline,
    read_stage_records,
    set_aside,
    write_record,
)
from torchllm.tools.planner.search.auto import planned
from torchllm.tools.proof.recipe import schema_of_fork
from torchllm.tools.resources import resource

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(NamedTuple):
    status: int
    """its exit status; -N: ended by signal N"""
    stopped_by: int
    """signal that this process got while it ran; 0: none"""
    seconds: float
    cpu_seconds: float


def main(arguments: Sequence[str]) -> None:
    """Run or describe a pipeline.

    SystemExit with 2 for a wrong file, with 1 if a stage fails, with 128 + N if signal N stops it.
    """
    parser = argparse.ArgumentParser(prog="torchllm pipeline", description="Run the stages of a pipeline.")
    parser.add_argument("file", metavar="FILE.toml", help="such as train_configs/pipeline/laptop.toml")
    parser.add_argument("--check", action="store_true", help="start nothing: print the stages and their hours")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="STAGE.SECTION.KEY=VALUE",
        help="option of a stage's command, such as pretrain.training.steps=20; or folder=FOLDER, of all results",
    )
    options = parser.parse_args(arguments)
    try:
        pipeline = read_pipeline(options.file, options.set)
        for stage in {setting.partition(".")[0] for setting in options.set}:
            check_settings(pipeline, stage)
        stages = find_stages(pipeline)
        if options.check:
            print("\n".join(overview(pipeline, stages)))
            return
        with only_one(Path(pipeline.folder)):
            words = [options.file, *(word for setting in options.set for word in ("--set", setting))]
            run_stages(pipeline, stages, again=f"torchllm pipeline {shlex.join(words)}")
    except UserError as error:
        print(f"torchllm pipeline: {error}", file=sys.stderr)
        raise SystemExit(2) from error


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises UserError if another pipeline works there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another pipeline works in this folder") from None
        yield


def run_stages(pipeline: PipelineFile, stages: list[Planned], again: str) -> None:
    """Run the stages that are not done, and print the time of each. Stops at the first that fails or is stopped."""
    folder = Path(pipeline.folder)
    for number, planned_stage in enumerate(stages, 1):
        stage = planned_stage.stage
        place = f"stage {number} of {len(stages)}, {stage.name}"
        if stage.needs_terminal:
            continue
        if planned_stage.is_done:
            say(f"{place}: done earlier")
            continue
        record = planned_stage.record
        if planned_stage.goes_on and record is not None:
            say(f"{place}: goes on")
        else:
            kept = set_aside(planned_stage.folder)
            say(f"{place}: {planned_stage.state}" + (f"; what it had written is now {kept}" if kept else ""))
            record = Record(planned_stage.key, planned_stage.inputs)
        write_record(folder, stage.name, record)
        say(f"  $ {stage.run}")
        ended = run_stage_command(stage.run)
        record.seconds += ended.seconds
        record.cpu_seconds += ended.cpu_seconds
        record.is_done = ended.status == 0
        write_record(folder, stage.name, record)
        took = f"{clock(ended.seconds)}, {ended.cpu_seconds:,.0f} CPU seconds"
        if ended.stopped_by:
            where = "after" if record.is_done else "in"
            say(f"stopped {where} {place}, {took}; to go on: {again}")
            raise SystemExit(128 + ended.stopped_by)
        if not record.is_done:
            say(f"{place}: failed with exit status {ended.status}, {took}; after a correction: {again}")
            raise SystemExit(1)
        say(f"{place}: done, {took}")
    say("\n".join(["", *table(stages, read_stage_records(folder))]))
    for planned_stage in stages:
        if planned_stage.stage.needs_terminal:
            talk(planned_stage)


def talk(planned_stage: Planned) -> None:
    """Become a stage that talks to the user, or say how to start it where there is no terminal."""
    command = planned_stage.stage.run
    say(f"{planned_stage.stage.name}: {command}")
    if sys.stdin.isatty():
        words, environment = command_line(command)
        os.execvpe(words[0], words, environment)


def run_stage_command(command: str) -> Ended:
    """Run a command to its end; signals that ask this process to stop are handed to all of the command's processes.

    Raises UserError if there is no such program.
    """
    words, environment = command_line(command)
    stopped_by = []
    before, start = usage.getrusage(usage.RUSAGE_CHILDREN), time.monotonic()
    try:
        # A process group: a terminal's Ctrl-C reaches this process alone, which hands it on once.
        child = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        raise UserError(f"{words[0]}: {error.strerror}") from error

    def hand_on(number: int, frame: FrameType | None) -> None:
        stopped_by.append(number)
        if child.returncode is None:
            os.killpg(child.pid, number)

    asked = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]  # nohup, a shell's background
    handlers = [signal.signal(number, hand_on) for number in asked]
    try:
        status = child.wait()
    finally:
        for number, handler in zip(asked, handlers, strict=True):
            signal.signal(number, handler)
    after = usage.getrusage(usage.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ended(status, stopped_by[0] if stopped_by else 0, time.monotonic() - start, cpu_seconds)


def check_settings(pipeline: PipelineFile, name: str) -> None:
    """Raise UserError if the command of a stage refuses its settings, as far as that is known before it is started."""
    for stage in pipeline.stages:
        if stage.name == name and {"tokenizer", "prepare", "train"} & set(shlex.split(stage.run)):
            words, environment = command_line(stage.run)
            environment.setdefault("NPROC", str(pipeline.gpus or 2))
            checked = subprocess.run(
                [*words, "--check", "--run.dry_run=true"], env=environment, capture_output=True, text=True
            )
            if checked.returncode:
                raise UserError(f"stage {name}: {(checked.stderr or checked.stdout).strip()}")


def command_line(command: str) -> tuple[list[str], dict[str, str]]:
    """Return the words and the environment of a command: with this Python, and the recipes that come with torchllm."""
    words = shlex.split(command)
    environment = dict(os.environ)
    while words and re.match("[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = shipped(value)
    if not words:
        raise UserError(f"{command}: no command")
    python = [sys.executable, "-P"]
    if words[0] == "torchllm":
        words = [*python, "-m", *words]
    elif words[0] == "python":
        words = [*python, *map(shipped, words[1:])]
    return words, environment


def shipped(word: str) -> str:
    """Return the path of a recipe or script that comes with torchllm, if a word names one that is not here."""
    is_shipped = re.match(r"(recipes|train_configs)/.*\.py$", word) and not Path(word).exists()
    return str(resource(word)) if is_shipped else word


def overview(pipeline: PipelineFile, stages: list[Planned]) -> list[str]:
    """Return lines on every stage: state, time and command."""
    hours = 0.0
    lines = [f"{len(stages)} stages, in {pipeline.folder}"]
    for number, planned_stage in enumerate(stages, 1):
        stage = planned_stage.stage
        seconds = planned_seconds(pipeline, planned_stage)
        source = "planned, not measured"
        if seconds is None:
            seconds, source = stage.seconds, f"on {pipeline.machine}"
        hours += seconds / 3600
        time_of = f"{clock(seconds)} {source}" if seconds else "time not known"
        lines.append(f"{number} {stage.name}: {planned_stage.state}; {time_of}\n    {stage.run}")
    total = f"in all {hours:.2f} hours of the stages whose time is known"
    if pipeline.gpus and pipeline.dollars_per_gpu_hour:
        rate = pipeline.gpus * pipeline.dollars_per_gpu_hour
        total += f": ${hours * rate:,.0f} at ${rate:g} per hour of {pipeline.gpus} GPUs, planned, not measured"
    return [*lines, total]


def planned_seconds(pipeline: PipelineFile, planned_stage: Planned) -> float | None:
    """Return the planner's time for a stage that trains on GPUs; None for another one.

    Raises UserError if its config is wrong.
    """
    words, environment = command_line(planned_stage.stage.run)
    if not pipeline.gpus or "train" not in words:
        return None
    arguments = words[words.index("train") + 1 :]
    draft = read_draft([*arguments, "--run.dry_run=true"], schema_of_fork(Config, environment))
    parallel, unfit = resolve_degrees(draft.config.parallel, pipeline.gpus)
    for problem in unfit:
        draft.report(problem.path, problem.message)
    if draft.errors:
        raise UserError("\n".join([f"stage {planned_stage.stage.name}:", *draft.errors]))
    prediction = planned(replace(draft.config, parallel=parallel))
    return None if prediction is None else prediction.step * draft.config.training.steps


def table(stages: list[Planned], records: dict[str, Record]) -> list[str]:
    """Return the time of each stage that is done."""
    lines = [f"{'stage':12} {'time':>8} {'CPU seconds':>12}"]
    rows = [(one.stage.name, records[one.stage.name]) for one in stages if one.stage.name in records]
    for name, record in rows:
        lines.append(f"{name:12} {clock(record.seconds):>8} {record.cpu_seconds:12,.0f}")
    seconds, cpu_seconds = sum(row.seconds for _, row in rows), sum(row.cpu_seconds for _, row in rows)
    return [*lines, f"{'in all':12} {clock(seconds):>8} {cpu_seconds:12,.0f}"]


def clock(seconds: float) -> str:
    """Return a duration as M:SS, or H:MM:SS from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def say(text: str) -> None:
    """Print at once: the output of a stage follows."""
    print(text, flush=True)
