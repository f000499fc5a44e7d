"""Writes the true peaks of `memory.csv` as rows of measurements, which `python -m evidence residuals` reads.

    python -m tests.hollow.evidence

A layout's peak is what the allocator had reserved on the fuller of its measured ranks.
"""

import csv
from pathlib import Path

from tests.hollow.memory import TABLE, Choice
from torchllm.tools.config.load import load_config
from torchllm.tools.planner.calibration.rows import measurement_of

PEAKS = Path(__file__).parent / "evidence" / "peaks.csv"
CLUSTER = "dgx_h100"
"""the hollow GPU stands in for any: no time is measured"""


def main() -> None:
    """Write `PEAKS`."""
    peaks: dict[Choice, float] = {}
    with TABLE.open(newline="") as opened:
        for cells in csv.DictReader(opened):
            choice = Choice(*(cells[name] for name in Choice._fields))
            peaks[choice] = max(peaks.get(choice, 0.0), float(cells["reserved"]))
    rows = [row_of(choice, reserved) for choice, reserved in peaks.items()]
    PEAKS.parent.mkdir(exist_ok=True)
    with PEAKS.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def row_of(choice: Choice, reserved: float) -> dict[str, str]:
    """Return one row; `reserved` in GiB."""
    config = load_config([*choice.arguments, f"--cluster.name={CLUSTER}", "--run.dry_run=true"])
    row = measurement_of(config, config.parallel.ranks)
    row["rmsnorm_kernel"] = "1"  # torch has one for GPUs, compiled or not
    return {**row, "dataset": "hollow", "fold": f"torchllm/{choice.model}", "peak_memory_gib": f"{reserved:.2f}"}


if __name__ == "__main__":
    main()
