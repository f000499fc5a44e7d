"""`torchllm report FOLDER` of a pipeline: its stages with their time and cost, scores and samples, in a Markdown file.

Each other folder is left to `tools/watch/report.py`. No torch.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchllm.config.errors import UserError
from torchllm.tools.pipeline.pipeline import clock
from torchllm.tools.pipeline.stages import DESCRIPTION, RECORDS, Record, read_stage_records
from torchllm.tools.watch.report import main as report_runs

FIGURES = "figures.json"
SAMPLES = ("conversation.txt", "sample.txt")
LATEST = ("step", "tokens", "loss", "validation_loss")
"""keys of metrics.jsonl whose last values are the scores of a run"""


@dataclass(frozen=True)
class Price:
    """What an hour of a pipeline costs."""

    gpus: int = 0
    dollars_per_gpu_hour: float = 0.0

    def of(self, seconds: float) -> str:
        """Return the price of a duration; "" if it is not known."""
        cost = seconds / 3600 * self.gpus * self.dollars_per_gpu_hour
        return f"${cost:,.2f}" if cost else ""


def main(arguments: list[str]) -> None:
    """Report the pipeline whose folder is among the arguments, or else runs. SystemExit(2) for a wrong folder."""
    folders = [word for word in arguments if (Path(word) / RECORDS).is_file()]
    if not folders:
        report_runs(arguments)
        return
    parser = argparse.ArgumentParser(prog="torchllm report", description="Write a text about a pipeline.")
    parser.add_argument("folder", metavar="PIPELINE_FOLDER")
    parser.add_argument("-o", "--output", default="", metavar="FILE", help="default: report.md in the folder")
    options = parser.parse_args(arguments)
    output = Path(options.output or Path(options.folder) / "report.md")
    try:
        text = report_text(Path(options.folder))
        output.write_text(text, "utf-8")
    except (UserError, OSError) as error:
        parser.error(str(error))
    print(f"{text}\nwrote {output}")


def report_text(folder: Path) -> str:
    """Return the text. Raises UserError if a file of the pipeline is damaged."""
    records = read_stage_records(folder)
    pipeline = read_json(folder / DESCRIPTION)  # not there if an earlier version made the folder
    price = Price(pipeline.get("gpus", 0), pipeline.get("dollars_per_gpu_hour", 0.0))
    commands = [stage for stage in pipeline.get("stages", []) if not stage["needs_terminal"]]
    names = [stage["name"] for stage in commands] or list(records)
    done = sum(name in records and records[name].is_done for name in names)
    lines = [f"# {folder.resolve().name}: {done} of {len(names)} stages are done", ""]
    lines += stage_table({name: records.get(name) for name in names}, price)
    sections = [(name, folder / name) for name in names]
    for title, find in (("Scores", scores), ("Samples", samples)):
        found = [(name, text) for name, path in sections for text in find(path)]
        if found:
            lines += ["", f"## {title}"]
        for name, text in found:
            lines += ["", f"{name}:", "", *(f"    {line}" for line in text.splitlines())]
    return "\n".join(lines) + "\n"


def stage_table(records: dict[str, Record | None], price: Price) -> list[str]:
    """Return a row per stage, and their sum."""
    rows = [("stage", "state", "time", "CPU seconds", "cost")]
    for name, record in records.items():
        if record is None:
            rows.append((name, "to do", "", "", ""))
            continue
        state = "done" if record.is_done else "interrupted"
        cost = price.of(record.seconds)
        rows.append((name, state, clock(record.seconds), f"{record.cpu_seconds:,.0f}", cost))
    known = [record for record in records.values() if record is not None]
    seconds, cpu_seconds = sum(one.seconds for one in known), sum(one.cpu_seconds for one in known)
    rows.append(("in all", "", clock(seconds), f"{cpu_seconds:,.0f}", price.of(seconds)))
    columns = 5 if price.of(1.0) else 4
    lines = [f"| {' | '.join(row[:columns])} |" for row in rows]
    return [lines[0], "|---|---|" + "--:|" * (columns - 2), *lines[1:]]


def scores(folder: Path) -> Iterator[str]:
    """Yield what a stage has measured: of a run its last values, its tasks, and figures.json."""
    if latest := latest_values(folder / "metrics.jsonl"):
        yield in_words({key: latest[key] for key in LATEST if key in latest})
    for file in sorted((folder / "evaluations").glob("step-*.json"))[-1:]:
        for task, values in read_json(file).get("results", {}).items():
            yield f"{task}: {in_words(values)}"
    if figures := read_json(folder / FIGURES):
        yield in_words(figures)


def samples(folder: Path) -> Iterator[str]:
    """Yield the texts that a model has written in a stage."""
    for name in SAMPLES:
        if (folder / name).is_file():
            yield (folder / name).read_text("utf-8", errors="replace")


def in_words(values: dict[str, Any]) -> str:
    """Return the numbers among some values in words."""
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float) and math.isfinite(value)}
    words = {key: f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for key, value in numbers.items()}
    return ", ".join(f"{key.replace('_', ' ')} {word}" for key, word in words.items())


def latest_values(file: Path) -> dict[str, Any]:
    """Return the last value of each key of metrics.jsonl; nothing without the file."""
    latest: dict[str, Any] = {}
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        try:
            latest |= json.loads(line)
        except ValueError:  # the run is writing it
            continue
    return latest


def read_json(file: Path) -> dict[str, Any]:
    """Return the table in a file; an empty one without the file. Raises UserError if it is damaged."""
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
