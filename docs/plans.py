"""Plan models of 8B to 1T parameters on eight clusters, dry-run each plan, and write the table of docs/plans.md.

    python docs/plans.py FOLDER        FOLDER gets the plans; those that it has are not made again

It takes an hour on two cores, and needs no GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.tools.planner.search.advice import WIDEST
from torchllm.tools.planner.search.layouts import Layout

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/plans.md"
BEGIN = "<!-- written by docs/plans.py -->\n"


class Question(NamedTuple):
    """A model, the number of GPUs, and its batch."""

    model: str
    gpus: int
    sequence_length: int
    global_batch_size: int


QUESTIONS = (
    Question("llama3_8b", 64, 8192, 512),
    Question("qwen3_30b_a3b", 64, 4096, 1024),
    Question("llama3_70b", 256, 8192, 1024),
    Question("qwen3_235b_a22b", 256, 4096, 2048),
    Question("llama3_405b", 2048, 8192, 2048),
    Question("gpt_1t", 3072, 2048, 3072),
)
CLUSTERS = (
    "dgx_a100",
    "dgx_h100",
    "hgx_h200",
    "mi300x",
    "hgx_b200",
    "hgx_b300",
    "gb200_nvl72",
    "gb300_nvl72",
)
HEAD = """\
| cluster | layout | tokens/s | MFU | s per step, 9 of 10 cases | GiB planned | GiB dry run | hours per 100B tokens |
|---|---|--:|--:|--:|--:|--:|--:|
"""


def main(folder: Path) -> None:
    """Make the plans that are missing, and write the page."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for question in QUESTIONS:
        title = (
            f"## {question.model} on {question.gpus:,} GPUs\n\n"
            f"{question.global_batch_size:,} sequences of {question.sequence_length:,} tokens per step.\n\n"
        )
        sections.append(title + HEAD + "".join(row(question, cluster, folder) for cluster in CLUSTERS))
    begin = PAGE.read_text().partition(BEGIN)[0]
    PAGE.write_text(begin + BEGIN + "\n" + "\n".join(sections))


def row(question: Question, cluster: str, folder: Path) -> str:
    """Return the row of a cluster."""
    name = f"{question.model}-{cluster}"
    command = f"recipes/plan.py rank --model {question.model} --cluster {cluster} --gpus {question.gpus} --tokens 1e11"
    command += f" --sequence-length {question.sequence_length} --global-batch-size {question.global_batch_size} --json"
    run = folder / f"{name}.toml"
    planned = output_of([sys.executable, *command.split(), "--write", str(run)], folder / f"{name}.plan.json")
    if planned is None:
        return f"| {cluster} | no layout fits | | | | | | |\n"
    nodes = {"NNODES": str(question.gpus // 8), "NPROC": "8"}
    traced = output_of(
        [str(ROOT / "run_train.sh"), str(run), "--run.dry_run=true", "--json"], run.with_suffix(".json"), nodes
    )
    pick = planned[0]["picks"][0]
    low, high = pick["seconds"]
    cells = [
        cluster,
        Layout(**pick["layout"]).text(),
        f"{float(format(pick['tokens_per_second'], '.3g')):,.0f}",
        f"{pick['mfu']:.0%}",
        f"{low:.3g} to {high:.3g}" + ("" if high <= WIDEST * low else ": not known"),
        f"{pick['memory_gib']:.0f}",
        f"{max(kind['peak'] for kind in traced['kinds']) / 2**30:.0f}" if traced else "refused",
        f"{24 * pick['days']:.3g}",
    ]
    return f"| {' | '.join(cells)} |\n"


def output_of(command: list[str], file: Path, variables: dict[str, str] | None = None) -> Any:
    """Return the JSON that a command prints, from `file` if it is there; None if the command fails."""
    if not file.exists():
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | (variables or {})
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        file.write_text(done.stdout if done.returncode == 0 else "null")
    return json.loads(file.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
