"""One HTML page of one or several runs: `torchllm report RUN [RUN ...] [-o FILE]`.

The page needs no network: curves are SVG in it, and the records themselves are in it as JSON. All figures come from the
run folders: metrics.jsonl, goodput.json, sources.txt, sample.txt, config.toml, checkpoints/, lease/. No torch.
"""

import argparse
import json
import math
import re
import time
import tomllib
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.config.errors import UserError
from torchllm.config.toml import toml_value
from torchllm.tools.config.by_key import values_by_key
from torchllm.tools.resources import run_folder
from torchllm.tools.watch.launches import Launch, account, read_launches
from torchllm.tools.watch.runs import State, state_of_run

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, BOTTOM = 56, 20, 24
"""pixels beside a chart and under it for the numbers of its axes"""
BEGIN, MANY = 0.1, 20
"""this share of the steps of a run that logged many does not set the scale of a chart that `leaves_out_begin`"""
SAMPLE = "sample.txt"
"""file of a run folder: the sample that run_train.sh has printed"""
NUMBER = re.compile(r"[\d,.]+( s|%)?")
NOT_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""characters that a model may write and a page may not have"""
COLORS = ("#2f6fbd", "#c8553d", "#3a8f5c", "#8a5fb0", "#b0872b", "#4a8f9c", "#a34c7c", "#6b6f76")


class Chart(NamedTuple):
    """Curves over the steps."""

    title: str
    keys: tuple[str, ...]
    """keys of metrics.jsonl; the second curve of a run is dashed"""
    unit: str = ""
    """%: the values are fractions"""
    leaves_out_begin: bool = False
    """the first values, which are far above all others, may be above the chart"""


CHARTS = (
    Chart("Loss; validation dashed", ("loss", "validation_loss"), "nats", leaves_out_begin=True),
    Chart("Learning rate", ("learning_rate",)),
    Chart("Gradient norm", ("grad_norm",), leaves_out_begin=True),
    Chart("Speed", ("tokens_per_second",), "tokens/s"),
    Chart("MFU; HFU dashed", ("mfu", "hfu"), "%"),
    Chart("Memory of rank 0", ("memory_gib",), "GiB"),
)
LATEST = {
    "step": ("step", ","),
    "tokens": ("tokens", ","),
    "loss": ("loss", ".4f"),
    "validation_loss": ("validation loss", ".4f"),
    "validation_bits_per_byte": ("bits per byte", ".4f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "memory_gib": ("GiB", ".2f"),
    "skipped_steps": ("skipped steps", ",.0f"),
}
"""key of metrics.jsonl -> name and format of its last value"""
STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; margin-top: 1.2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: currentColor; } svg .axis { stroke: var(--line); }
polyline { fill: none; stroke-width: 1.6; }
.scroll { overflow-x: auto; } .scroll + .scroll { margin-top: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .7rem; text-align: left; vertical-align: top; }
td.number { text-align: right; } code { font-size: .85rem; }
.key { display: inline-block; width: 1rem; height: .25rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
"""


class RunFolder(NamedTuple):
    """The parts of a run folder that a report shows."""

    name: str
    records: list[dict[str, Any]]
    """the last record of each logged step"""
    config: dict[str, Any]
    """the tables of config.toml"""
    launches: list[Launch]
    checkpoints: list[str]
    state: State
    sources: list[str]
    """a line per source, with its size (`notices.note_sources`)"""
    sample: str


def main(arguments: list[str]) -> None:
    """Write the page for the options of `torchllm report`. SystemExit(2) if a folder is no run."""
    parser = argparse.ArgumentParser(prog="torchllm report", description="Write one HTML page about runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", type=run_folder, help="run folder")
    parser.add_argument(
        "-o", "--output", default="", metavar="FILE", help="default: report.html in the first run folder"
    )
    options = parser.parse_args(arguments)
    output = Path(options.output or options.runs[0] / "report.html")
    try:
        runs = [read_run_folder(folder) for folder in options.runs]
        if len({run.name for run in runs}) < len(runs):
            runs = [run._replace(name=str(folder)) for run, folder in zip(runs, options.runs, strict=True)]
        text = page(runs)
        output.write_text(text, encoding="utf-8")
    except (UserError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {output}")


def read_run_folder(folder: Path) -> RunFolder:
    """Read a run folder. UserError if its metrics or its config are missing or damaged."""
    records: dict[int, dict[str, Any]] = {}
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder}: no run folder: it has no {Path(error.filename).name}") from None
    except ValueError as error:  # no TOML, or no text
        raise UserError(f"{folder}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line, parse_constant=lambda _: None)  # the page has JSON, which has no NaN
            step = int(record["step"])
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                continue  # the run is writing it
            raise UserError(f"{folder}/metrics.jsonl:{number}: not the record of a step") from None
        while records and next(reversed(records)) >= step + ("loss" not in record):
            records.popitem()  # it was rolled back
        records[step] = records.get(step, {}) | record  # a step that was profiled has a record of its own
    if not records:
        raise UserError(f"{folder}/metrics.jsonl: no step was logged yet")
    checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    return RunFolder(
        folder.resolve().name,
        list(records.values()),
        config,
        read_launches(folder / "goodput.json"),
        checkpoints,
        state_of_run(folder),
        _read_text(folder / "sources.txt").splitlines(),
        NOT_XML.sub("\ufffd", _read_text(folder / SAMPLE)),
    )


def _read_text(file: Path) -> str:
    """Return the text of a file that a run may have; "" without it."""
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def page(runs: list[RunFolder]) -> str:
    """Return the page; it is XML too."""
    title = " and ".join(run.name for run in runs)
    records = json.dumps({run.name: run.records for run in runs}).replace("<", "\\u003c").replace("&", "\\u0026")
    sections = [
        f"<h1>{escape(title)}</h1>",
        _latest(runs),
        '<div class="charts">' + "".join(_figure(chart, runs) for chart in CHARTS) + "</div>",
        "<p>Upright lines: the run was started again.</p>" if any(run.launches[1:] for run in runs) else "",
        "".join(
            f"<h2>A sample of {escape(run.name)}</h2><pre>{escape(run.sample)}</pre>" for run in runs if run.sample
        ),
        "<h2>Where the time went</h2>" + "".join(_time(run) + _step_time(run) for run in runs),
        "<h2>Events</h2>" + "".join(_events(run) for run in runs),
        "<h2>Data</h2>" + "".join(_data(run) for run in runs),
        "<h2>Config</h2>" + _config(runs),
    ]
    head = f'<meta charset="utf-8"/><meta name="viewport" content="width=device-width"/><title>{escape(title)}</title>'
    data = f'<script type="application/json" id="records">{records}</script>'
    body = "\n".join([*sections, data])
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml">'
        f"<head>{head}<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def shown_number(value: Any) -> str:
    """Return a figure as the tables and axes of the page have it."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return "–" if value is None else str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _latest(runs: list[RunFolder]) -> str:
    """Return the state of each run, and the last values of those keys that one has."""
    head = [""]
    for index, run in enumerate(runs):
        head.append(f'<span class="key" style="background:{COLORS[index % len(COLORS)]}"></span> {escape(run.name)}')
    states = [run.state for run in runs]
    steps = [shown_number(run.config.get("training", {}).get("steps")) for run in runs]
    rows = [["state", *states], ["steps asked for", *steps]]
    for key, (name, form) in LATEST.items():
        last = [_last(run, key) for run in runs]
        if any(value is not None for value in last):
            rows.append([name, *("–" if value is None else format(value, form) for value in last)])
    return _table(head, rows)


def _last(run: RunFolder, key: str) -> Any:
    """Return the last value of a key of metrics.jsonl; None if the run has none."""
    return next((record[key] for record in reversed(run.records) if _is_number(record.get(key))), None)


def _table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table; cells are HTML."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = ""
    for row in rows:
        cells = ""
        for cell in row:
            kind = ' class="number"' if NUMBER.fullmatch(cell) else ""
            cells += f"<td{kind}>{cell}</td>"
        body += f"<tr>{cells}</tr>"
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


class Curve(NamedTuple):
    """Points of one key of one run."""

    color: str
    dashes: str
    points: list[tuple[float, float]]
    restarts: list[int]
    """steps after which the run was started again"""

    def top(self, leaves_out_begin: bool) -> float:
        """Return the highest value that its chart shows."""
        steps = [step for step, _ in self.points]
        first = steps[0]
        if leaves_out_begin and len(steps) >= MANY:
            first += BEGIN * (steps[-1] - first)
        return max(value for step, value in self.points if step >= first)


def _figure(chart: Chart, runs: list[RunFolder]) -> str:
    curves = []
    factor = 100 if chart.unit == "%" else 1
    for index, run in enumerate(runs):
        restarts = [launch.first for launch in run.launches[1:]]
        for dashes, key in zip(("", "4 3"), chart.keys, strict=False):
            points = [(record["step"], factor * record[key]) for record in run.records if _is_number(record.get(key))]
            curves.append(Curve(COLORS[index % len(COLORS)], dashes, points, restarts))
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    top = max(curve.top(chart.leaves_out_begin) for curve in curves)
    highest = max(curve.top(leaves_out_begin=False) for curve in curves)
    title = chart.title + (f" [{chart.unit}]" if chart.unit else "")
    if highest > top:
        title += f"; above the chart at first, up to {shown_number(highest)}"
    return f"<figure><figcaption>{escape(title)}</figcaption>{_svg(curves, top)}</figure>"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _svg(curves: list[Curve], top: float) -> str:
    """Return a chart of the points up to `top`."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points if y <= top]
    right = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = _scale(min(ys), max(ys), HEIGHT - BOTTOM, 8)
    parts = []
    for y in _ticks(min(ys), max(ys)):
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{shown_number(y)}</text>')
    parts.append(f'<text x="{LEFT - 6}" y="{HEIGHT - 6}" text-anchor="end">step</text>')
    for x in _ticks(min(xs), max(xs)):
        if x == int(x):
            parts.append(f'<text x="{right(x):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{x:,.0f}</text>')
    for curve in curves:
        for x in (right(step) for step in curve.restarts if min(xs) <= step <= max(xs)):
            line = f'x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{HEIGHT - BOTTOM}"'
            parts.append(f'<line stroke="{curve.color}" stroke-dasharray="1 3" {line}/>')
        points = " ".join(f"{right(x):.1f},{up(y):.1f}" for x, y in curve.points if y <= top)
        parts.append(f'<polyline stroke="{curve.color}" stroke-dasharray="{curve.dashes}" points="{points}"/>')
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg>'


def _scale(least: float, most: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * ((value - least) / (most - least) if most > least else 0.5)


def _ticks(least: float, most: float) -> list[float]:
    """Return up to six round numbers from `least` to `most`."""
    if most <= least:
        return [least]
    step = 10 ** math.floor(math.log10((most - least) / 3))
    step *= next(factor for factor in (1, 2, 5, 10) if (most - least) / (factor * step) <= 5)
    return [number * step for number in range(math.ceil(least / step), math.floor(most / step) + 1)] or [least, most]


def _time(run: RunFolder) -> str:
    """Return the account of goodput.json."""
    total, lost = account(run.launches) if run.launches else (0.0, {})
    times = {"training": max(0.0, total - sum(lost.values()))} | lost
    rows = [[escape(name), f"{spent:,.1f} s", f"{spent / total:.1%}"] for name, spent in times.items() if spent > 0]
    return _table([escape(run.name), "time", "share"], rows)


def _step_time(run: RunFolder) -> str:
    """Return the parts of a step's time, the mean over the profiled steps; nothing without any."""
    profiled = [record for record in run.records if any(key.startswith("breakdown/") for key in record)]
    shares: dict[str, float] = {}
    for record in profiled:
        for key, share in record.items():
            if key.startswith("breakdown/") and _is_number(share):
                part = key.removeprefix("breakdown/")
                shares[part] = shares.get(part, 0.0) + share / len(profiled)
    largest_first = sorted(shares.items(), key=lambda part: -part[1])
    rows = [[escape(part), f"{share:.1%}"] for part, share in largest_first if share >= 0.0005]
    return _table([f"a step of {escape(run.name)}", "share"], rows) if rows else ""


def _events(run: RunFolder) -> str:
    rows = []
    for launch in run.launches:
        started = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(launch.started))
        what = f"started from step {launch.first:,}, logged up to step {launch.step:,}"
        rows.append([started, what])
    skipped = max((record.get("skipped_steps") or 0 for record in run.records), default=0)
    if skipped:
        rows.append(["", f"{skipped:,} steps were not finite and not applied"])
    rows.append(["", f"checkpoints: {', '.join(run.checkpoints) or 'none'}"])
    return _table([escape(run.name), ""], [[escape(cell) for cell in row] for row in rows])


def _data(run: RunFolder) -> str:
    """Return the sources with their sizes and weights: of the run, or of each [[data.stage]]."""
    data = run.config.get("data", {})
    sources, stages = data.get("sources", []), data.get("stage", [])
    head = [f"weight up to step {stage['until']:,}" if stage.get("until") else "weight to the end" for stage in stages]
    rows = []
    for index, source in enumerate(sources):
        weights = [stage["weights"][index] for stage in stages] or [source.get("weight", 1.0)]
        name = f"data.sources.{index} ("
        size = next((line.partition("): ")[2] for line in run.sources if line.startswith(name)), "")
        cells = [f"{source.get('kind')} {source.get('path') or ''}".strip(), size, *map(shown_number, weights)]
        rows.append([escape(cell) for cell in cells])
    return _table([escape(run.name), "size", *(head or ["weight"])], rows)


def _config(runs: list[RunFolder]) -> str:
    """Return all keys of one run; of several, the keys that differ first."""
    configs = [values_by_key(run.config) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = [[escape(key), *(_code(config.get(key)) for config in configs)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    head = ["key", *(escape(run.name) for run in runs)]
    shown = "<p>All of its keys are equal.</p>" if len(runs) > 1 and not differing else ""
    if differing:
        shown = "<p>Keys that differ:</p>" + _table(head, differing)
    return f"{shown}<details><summary>all keys</summary>{_table(head, rows)}</details>"


def _code(value: Any) -> str:
    if value is None:
        return ""
    return f"<code>{escape(toml_value(value))}</code>"
