"""Rows of made-up sweeps, for tests of calibration and of the evidence."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from torchllm.tools.planner.calibration.fit import with_constants
from torchllm.tools.planner.calibration.rows import read_row
from torchllm.tools.planner.predict import predict

ROW = {
    "dataset": "made up",
    "stack": "torchllm",
    "group": "one",
    "model": "llama",
    "layers": "16",
    "hidden": "2048",
    "heads": "16",
    "ffn": "5632",
    "vocab": "32000",
    "tied_emb": "0",
    "seq_len": "2048",
    "cluster": "dgx_a100",
    "gpu": "A100-80GB",
    "gpus": "8",
    "dp": "8",
    "tp": "1",
    "pp": "1",
    "micro_batch": "1",
    "global_batch_seqs": "64",
    "zero_stage": "3",
    "act_ckpt": "none",
    "attn_impl": "flash2",
    "precision": "bf16",
    "status": "ok",
}
LARGE = {"hidden": "5120", "heads": "40", "ffn": "13824"}
"""widths at which the device does not wait for the host, so that speeds and waits can be told"""


def made(
    cluster: str = "dgx_a100", gpu: str = "A100-80GB", read: Callable[[Any], Any] = read_row, **constants: float
) -> list[Any]:
    """A sweep whose times are those of other constants, as rows that `read` makes of cells."""
    rows = []
    for micro_batch, tp, mode in product((1, 2, 4), (1, 2, 4), ("none", "full")):
        cells = {**ROW, **LARGE, "cluster": cluster, "gpu": gpu}
        cells["micro_batch"] = str(micro_batch)
        cells["tp"] = str(tp)
        cells["dp"] = str(8 // tp)
        cells["act_ckpt"] = mode
        case = read(cells).case
        assert case is not None
        changed = replace(case.software.constants, **constants)
        prediction = predict(with_constants(case, changed))
        cells["step_time_s"] = repr(prediction.step)
        rows.append(read(cells))
    return rows


def write_cells(file: Path, rows: Sequence[Mapping[str, str]]) -> str:
    """Write a table with the columns of all rows, empty where a row has none; return the file's name."""
    columns: dict[str, None] = {}
    for cells in rows:
        columns |= dict.fromkeys(cells)
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(columns), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return str(file)
