"""Sums up the results of the lattice's layouts as the table of docs/measurements.md: what composes with what.

python -m tests.lattice draw --count=all-meshes --report=report.jsonl   # appends one line per layout
python -m tests.lattice_report report.jsonl [...]   # sums up into tests/lattice_results.json, and prints
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.lattice import COMPILED_SPACE, Layout

RESULTS = Path(__file__).with_name("lattice_results.json")
PAGE = Path(__file__).parent.parent / "docs/measurements.md"
BEGIN, END = "<!-- lattice -->\n", "<!-- /lattice -->\n"

PIPELINES = ["no pipeline", "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"]
PIPELINES += ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
SHARING = ["DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3", "HSDP", "ring", "Ulysses", "TP", "TP + SP"]
REST = ["full", "segment", "every_k", "ffn", "selective", "tied", "GPT", "documents"]


def features(layout: Layout) -> list[str]:
    """Return the rows and columns of the table that a layout counts in."""
    names = [layout.get("parallel.schedule", "no pipeline"), layout["recompute.mode"]]
    has_replicas = layout["parallel.dp_replicate"] > 1
    zero_stage = layout.get("parallel.zero_stage", 0)
    if zero_stage > 0:
        names.append(f"ZeRO {zero_stage}")
        if has_replicas:
            names.append("HSDP")
    elif has_replicas or "parallel.zero_stage" in layout:
        names.append("DDP")
    if layout["parallel.cp"] > 1:
        names.append({"ring": "ring", "ulysses": "Ulysses"}[layout["parallel.cp_method"]])
    if layout["parallel.tp"] > 1:
        names.append("TP + SP" if layout["parallel.sequence_parallel"] else "TP")
    if layout["model.tied_embeddings"]:
        names.append("tied")
    if layout["model.family"] == "gpt":
        names.append("GPT")
    if layout["data.document_mask"]:
        names.append("documents")
    return names


def read(report: str) -> list[dict[str, Any]]:
    """Return the last record of each layout of a report file, without those that the config has come to refuse."""
    if not Path(report).is_file():
        return []
    last_record = {}
    for line in Path(report).read_text().splitlines():
        record = json.loads(line)
        last_record[json.dumps(record["layout"], sort_keys=True)] = record
    return [record for record in last_record.values() if COMPILED_SPACE.is_valid(record["layout"])]


def sum_up(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sum up records {layout, error or failed, seconds, torch}, one per layout.

    "together": how many layouts have both features of a pair.
    """
    records = list(records)
    passed = [record for record in records if "error" in record]
    together: Counter[str] = Counter()
    for record in passed:
        for pair in itertools.combinations(features(record["layout"]), 2):
            together[" & ".join(sorted(pair))] += 1
    return {
        "layouts": len(passed),
        "failed": len(records) - len(passed),
        "worst_gradient_error": max(record["error"] for record in passed),
        "seconds": round(sum(record["seconds"] for record in records)),
        "torch": sorted({record["torch"] for record in records}),
        "together": dict(sorted(together.items())),
    }


def markdown_table(results: dict[str, Any]) -> str:
    """Return the page's table of what `sum_up` returned: how many layouts have both features, – where none can."""
    columns = SHARING + REST
    lines = [["", *columns], ["---"] + ["--:"] * len(columns)]
    for row in PIPELINES + SHARING:
        cells = [row]
        for column in columns:
            pair = " & ".join(sorted((row, column)))
            cells.append(str(results["together"].get(pair, "–")))
        lines.append(cells)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(reports: Iterable[str]) -> None:
    results = sum_up(record for report in reports for record in read(report))
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print({key: value for key, value in results.items() if key != "together"})
    print(BEGIN + markdown_table(results) + END)


if __name__ == "__main__":
    main(sys.argv[1:])
