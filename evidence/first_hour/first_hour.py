"""The checks of a machine before a long run on it, the most valuable first.

It needs no network. Each stage (stages.py) answers one question about this machine, with jobs on one
GPU and on all; without a GPU it is a rehearsal on two CPU processes with a tiny model. The result of a stage is one
line of RUN_FOLDER/first_hour.jsonl. The same command continues after an interruption, and tries failed stages again;
--benchmark.only=losses,resume takes these stages alone, also again.

At the end RUN_FOLDER/first_hour.md is a page of all results. Exit status 1: a stage ended with FAIL or error.
"""

import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.tools import format_cell, format_table

from evidence.first_hour.jobs import Figures, Jobs, Machine, StageFailed
from evidence.first_hour.stages import STAGES, FirstHourStage
from torchllm.config.errors import UserError
from torchllm.runtime.error_report import report_errors

STAGE_SECONDS = 480
"""after which a stage is ended"""
PASSED, FAILED, ERROR, SKIPPED = "pass", "FAIL", "error", "not tried"
Record = dict[str, Any]
"""one line of first_hour.jsonl: stage, outcome, problems, figures, seconds, date, machine"""

PROBE = """
import json, torch
gpus = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
print(json.dumps({"gpus": gpus, "torch": torch.__version__, "cuda": torch.version.cuda}))
"""
"""asks torch for this machine's GPUs in another process: this one must not take memory on any"""


def first_hour(run_folder: str, config_file: str, only: str) -> None:
    """Run the stages that are due, or `only` these, one after the other.

    SystemExit(1) if one ended with FAIL or error.
    """
    report_errors()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the running job is ended too
    os.environ.pop("WORLD_SIZE", None)  # this process is not a rank; the jobs have their own
    folder = Path(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "first_hour.jsonl"
    records = read_records(results)
    machine = find_machine()
    stages = chosen_stages(only)
    if not only:
        stages = due_stages(stages, records, machine)
    print(f"{machine.describe()}\n{len(stages)} stages to go; results in {results}", flush=True)
    for stage in stages:
        record = run_stage(stage, machine, config_file, folder)
        records.append(record)
        write_records(results, records)
        print(f"{stage.name}: {record['outcome']} ({record['seconds']:.0f} s)", flush=True)
        for problem in record["problems"]:
            print(f"  {problem}", flush=True)
    records = latest_records(records)
    page = folder / "first_hour.md"
    page.write_text(format_page(records))
    print(page)
    if any(record["outcome"] in (FAILED, ERROR) for record in records):
        raise SystemExit(1)


def find_machine() -> Machine:
    """Return this machine's hardware, from torch and, if there is one, the driver."""
    answer = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    facts = json.loads(answer.stdout)
    driver = ""
    if facts["gpus"] and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]
    return Machine(tuple(facts["gpus"]), facts["torch"], facts["cuda"] or "", driver)


def chosen_stages(only: str) -> list[FirstHourStage]:
    """Return the stages that `benchmark.only` names; all if it is empty. Raises UserError for a wrong name."""
    if not only:
        return list(STAGES)
    names = [name.strip() for name in only.split(",")]
    known = [stage.name for stage in STAGES]
    for name in names:
        if name not in known:
            raise UserError(f"benchmark.only: there is no stage {name!r}; the stages are {', '.join(known)}")
    return [stage for stage in STAGES if stage.name in names]


def due_stages(stages: Sequence[FirstHourStage], records: Sequence[Record], machine: Machine) -> list[FirstHourStage]:
    """Return the stages that have no answer of this machine yet."""
    answered = set()
    for record in records:
        if record["outcome"] in (PASSED, FAILED) and machine_of(record) == machine:
            answered.add(record["stage"])
    return [stage for stage in stages if stage.name not in answered]


def machine_of(record: Record) -> Machine:
    """Return the machine of a record."""
    facts = dict(record["machine"])
    return Machine(**facts | {"gpus": tuple(facts["gpus"])})  # JSON has lists only


def run_stage(stage: FirstHourStage, machine: Machine, config_file: str, folder: Path) -> Record:
    """Run a stage and return its record."""
    started = time.monotonic()
    record: Record = {"stage": stage.name, "date": datetime.date.today().isoformat(), "machine": machine._asdict()}
    figures: Figures = {}
    if reason := stage.obstacle(machine):
        outcome, problems = SKIPPED, [reason]
    else:
        jobs = Jobs(machine, config_file, folder / "scratch", started + STAGE_SECONDS)
        try:
            figures = stage.measure(jobs)
            problems = stage.problems(figures)
            outcome = FAILED if problems else PASSED
        except StageFailed as failure:
            outcome, problems = ERROR, [str(failure)]
        finally:
            jobs.clean_up()
    return record | {
        "outcome": outcome,
        "problems": problems,
        "figures": figures,
        "seconds": round(time.monotonic() - started, 1),
    }


def read_records(results: Path) -> list[Record]:
    """Return the lines of first_hour.jsonl; none if there is no file."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def write_records(results: Path, records: Sequence[Record]) -> None:
    """Replace the whole file, so that a kill leaves no half line."""
    lines = [json.dumps(record) + "\n" for record in records]
    temporary = results.with_suffix(".tmp")
    temporary.write_text("".join(lines))
    temporary.replace(results)


def latest_records(records: Sequence[Record]) -> list[Record]:
    """Return the last record of each stage, in the order of the stages."""
    latest = {record["stage"]: record for record in records}
    return [latest[stage.name] for stage in STAGES if stage.name in latest]


def format_page(records: Sequence[Record]) -> str:
    """Return the page, in Markdown: a summary, then the figures of each stage."""
    questions = {stage.name: stage.question for stage in STAGES}
    rows = []
    for record in records:
        problems = "; ".join(record["problems"])
        outcome = f"{record['outcome']}: {problems}" if problems else record["outcome"]
        rows.append({"stage": record["stage"], "question": questions[record["stage"]], "outcome": outcome})
    parts = ["# The first hour", "", "`python -m evidence.first_hour`", "", format_table(rows)]
    for record in records:
        heading = f"{machine_of(record).describe()}, {record['date']}, {record['seconds']:,.0f} s."
        parts += ["", f"## {record['stage']}", "", questions[record["stage"]], "", heading]
        for title, figure in record["figures"].items():
            parts += ["", *format_figure(title, figure)]
    return "\n".join(parts) + "\n"


def format_figure(title: str, figure: Any) -> list[str]:
    """Return the lines of one figure: a table of rows, a list of numbers, or a single value."""
    if isinstance(figure, list) and figure and isinstance(figure[0], dict):
        return [f"{title}:", "", format_table(figure)]
    if isinstance(figure, list):
        return [f"{title}: {', '.join(format_cell(value) for value in figure)}"]
    return [f"{title}: {format_cell(figure)}"]
