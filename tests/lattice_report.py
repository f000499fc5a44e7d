"""What composes with what: results of the lattice's layouts, summed up as the table of docs/prove.md.

pytest -m lattice --count=all-meshes --report=report.jsonl        # adds one line a layout
python -m tests.lattice_report report.jsonl [...]                 # sums up into tests/lattice_results.json, and prints
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.lattice import Layout, is_valid

RESULTS = Path(__file__).with_name("lattice_results.json")
PAGE = Path(__file__).parent.parent / "docs/prove.md"
BEGIN, END = "<!-- lattice -->\n", "<!-- /lattice -->\n"

PIPELINES = ["no pipeline", "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"]
PIPELINES += ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
SHARING = ["DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3", "HSDP", "ring", "Ulysses", "TP", "TP + SP"]
REST = ["full", "segment", "every_k", "ffn", "selective", "tied", "GPT", "documents"]


def features(layout: Layout) -> list[str]:
    """The rows and columns of the table that a layout counts in."""
    found = [layout.get("parallel.schedule", "no pipeline"), layout["recompute.mode"]]
    replicas, stage = layout["parallel.dp_replicate"] > 1, layout.get("parallel.zero_stage", 0)
    if stage > 0:
        found += [f"ZeRO {stage}"] + ["HSDP"] * replicas
    elif replicas or "parallel.zero_stage" in layout:
        found.append("DDP")
    if layout["parallel.cp"] > 1:
        found.append({"ring": "ring", "ulysses": "Ulysses"}[layout["parallel.cp_method"]])
    if layout["parallel.tp"] > 1:
        found.append("TP + SP" if layout["parallel.sequence_parallel"] else "TP")
    found += ["tied"] * layout["model.tied_embeddings"] + ["GPT"] * (layout["model.family"] == "gpt")
    return found + ["documents"] * layout["data.document_mask"]


def read(report: str) -> list[dict[str, Any]]:
    """The last record of each layout of a report file; not of those that the config refuses by now."""
    lines = Path(report).read_text().splitlines() if Path(report).is_file() else []
    last = {json.dumps(record["layout"], sort_keys=True): record for record in map(json.loads, lines)}
    return [record for record in last.values() if is_valid(record["layout"])]


def sum_up(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of records {layout, error or failed, seconds, torch}, one a layout: figures, and how many have both of a pair."""
    records = list(records)
    passed = [record for record in records if "error" in record]
    together: Counter[str] = Counter()
    for record in passed:
        together.update(" & ".join(sorted(pair)) for pair in itertools.combinations(features(record["layout"]), 2))
    return {
        "layouts": len(passed),
        "failed": len(records) - len(passed),
        "worst_gradient_error": max(record["error"] for record in passed),
        "seconds": round(sum(record["seconds"] for record in records)),
        "torch": sorted({record["torch"] for record in records}),
        "together": dict(sorted(together.items())),
    }


def table(results: dict[str, Any]) -> str:
    """The page's lines, of what `sum_up` returned: how many layouts had both, – where there is none to have."""
    columns = SHARING + REST
    lines = [["", *columns], ["---"] + ["--:"] * len(columns)]
    for row in PIPELINES + SHARING:
        cells = [str(results["together"].get(" & ".join(sorted((row, column))), "–")) for column in columns]
        lines.append([row, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(reports: Iterable[str]) -> None:
    """Sum up report files."""
    results = sum_up(record for report in reports for record in read(report))
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print({key: value for key, value in results.items() if key != "together"})
    print(BEGIN + table(results) + END)


if __name__ == "__main__":
    main(sys.argv[1:])
