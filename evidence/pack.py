"""Pack the rows of a user's sweep as a pull request that adds them to the evidence. No torch."""

import csv
from pathlib import Path

from evidence.measurements import MeasuredRow, file_of_cluster, read_rows
from torchllm import __version__
from torchllm.tools.planner.calibration.rows import COLUMNS

DATA = Path(__file__).parent / "data"
"""measurements that come with torchllm; data/SOURCES.md says where from"""


README = """\
# {name}

{summary}

- Command: `python recipes/sweep ...`
- Machines (GPU and its power limit, network per node):
- Software (commit of torchllm, torch, CUDA, driver):
- What is unusual:

I measured these rows and publish them under the license of torchllm.

Line of SOURCES.md:

{line_of_sources}
"""


def published_measurements() -> list[str]:
    """Return the files of measurements that come with torchllm."""
    return [str(file) for file in sorted(DATA.glob("*.csv"))]


def pack_rows(source: str, folder: str) -> str:
    """Write the rows of a sweep as FOLDER/NAME.csv with a README.md. Return the next steps for the user.

    Layouts that were invalid are dropped. OSError or ValueError lists the faults of every row.
    """
    rows = [row for row in read_rows(source) if row.cells.get("status") != "invalid"]
    problems = []
    for number, row in enumerate(rows, start=1):
        for problem in row_problems(row):
            problems.append(f"{source}: row {number}: {problem}")
    if not rows:
        problems.append(f"{source}: no row was measured")
    if problems:
        raise ValueError("\n".join(problems))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    name = Path(source).stem
    if name == "results":  # the name that every sweep's table has
        name = Path(source).absolute().parent.name
    with open(target / f"{name}.csv", "w", newline="") as opened:
        writer = csv.DictWriter(opened, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(filled(row.cells, name) for row in rows)
    (target / "README.md").write_text(readme(name, rows), encoding="utf-8")
    return (
        f"{len(rows)} rows are in {target / name}.csv. Fill in {target / 'README.md'}, then open a pull request that "
        "adds the table to evidence/data, and its line to SOURCES.md there"
    )


def row_problems(row: MeasuredRow) -> list[str]:
    """Return why others could not use a row."""
    problems = []
    if row.problem:
        problems.append(row.problem)
    cluster = row.cells.get("cluster", "")
    status = row.cells.get("status", "")
    if not row.cells.get("gpu"):
        problems.append("gpu is missing")
    if not file_of_cluster(cluster):
        problems.append(f"cluster {cluster!r} has no file in train_configs/clusters: add yours to the pull request")
    if status not in ("ok", "oom"):
        problems.append(f"status {status!r}: only ok and oom say something about a layout")
    if status == "ok" and (row.seconds or 0) <= 0:
        problems.append("step_time_s is missing")
    return problems


def filled(cells: dict[str, str], name: str) -> dict[str, str]:
    """Return a row with the columns that all rows of the evidence have: data set, fold, software and source."""
    framework = cells.get("stack", "")
    model = cells.get("model", "")
    fold = f"{framework}/{model}".lower()
    defaults = {"dataset": name, "fold": fold, "software": __version__, "source": "recipes/sweep"}
    row = dict(cells)
    for column, value in defaults.items():
        row[column] = cells.get(column) or value
    if row["dataset"] == "sweep":  # the name that every sweep has
        row["dataset"] = name
    return row


def readme(name: str, rows: list[MeasuredRow]) -> str:
    """Return the text that goes with the rows, whose blanks the user fills in."""
    timed = sum(row.seconds is not None for row in rows)
    gpus = {f"{row.cells['gpus']} x {row.cells['gpu']}" for row in rows}
    machines = ", ".join(sorted(gpus))
    summary = f"{len(rows)} layouts, {timed} timed, the others out of memory, on {machines}."
    line_of_sources = f"| `{name}.csv` | {len(rows)} | measured for torchllm by ... | {__version__} | BSD-3-Clause |"
    return README.format(name=name, summary=summary, line_of_sources=line_of_sources)
