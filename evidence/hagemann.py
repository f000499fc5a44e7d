"""Convert the sheets of Hagemann et al. 2023 (arXiv 2311.05610), which their license keeps out of here. No torch.

They are in the folder data of github.com/Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts, under
CC BY-NC-SA 4.0. A file's name says model, length and GPUs; its first line is a title, its second the columns.
"""

import csv
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from torchllm.tools.planner.calibration.rows import COLUMNS

SHEET = re.compile(r"llama_(\d+B)_(.*_)?\d+_GPUs_.+")
"""name of a file, without its ending: the model, and whether sequences are long"""
LONG = "8k_seq_length"
"""part of the name of the sheets of sequences of 8,192 tokens; others have 2,048"""
KERNELS = {
    "torch": "eager",
    "fused": "fused_softmax",
    "flash_attention": "flash1",
    "flash_attentionv1.0.8": "flash1",
    "flash_attention2": "flash2",
}
"""their attention kernels, and the words of the columns"""
RMS_KERNEL = " + RMS kernel"
"""suffix of their kernel's name where RMSNorm is one kernel too"""
TAG = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
"""namespace of the elements of a sheet (ECMA-376)"""


class Shape(NamedTuple):
    """Sizes of a model (appendix A of the work, and the checkpoints of LLaMA)."""

    layers: int
    hidden: int
    heads: int
    ffn: int


SHAPES = {"13B": Shape(40, 5120, 40, 13824), "30B": Shape(60, 6656, 52, 17888), "65B": Shape(80, 8192, 64, 22016)}
VOCABULARY = 128000
BATCH_TOKENS = 2048 * 2048
"""tokens of every step: 2,048 sequences of 2,048 tokens, or 512 of 8,192"""


def convert_hagemann(folder: str, target: str) -> str:
    """Write all sheets of a folder as one table of layouts. Return a line on it. ValueError if there is none."""
    rows = []
    files = sorted(Path(folder).rglob("*.xlsx"))
    for file in files:
        rows += list(rows_of_sheet(file))
    if not rows:
        raise ValueError(f"{folder}: no sheet (*.xlsx) of Hagemann et al. 2023")
    with open(target, "w", newline="") as opened:
        writer = csv.DictWriter(opened, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return (
        f"{len(rows)} rows of {len(files)} sheets are in {target}. They are under the license of the sheets, "
        "CC BY-NC-SA 4.0: publish aggregate errors only"
    )


def rows_of_sheet(file: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a sheet in the columns of a table of layouts. ValueError if it is another sheet."""
    named = SHEET.fullmatch(file.stem)
    if named is None or named[1] not in SHAPES:
        raise ValueError(f"{file}: its name is not that of a sheet of Hagemann et al. 2023")
    of_model = _model_cells(named[1], 8192 if LONG in file.stem else 2048)
    _, header, *lines = read_sheet(file)
    kind = "seq_parallel" if "sequence_parallel" in header.values() else "main"
    for line in lines:
        cells = {}
        for letter, title in header.items():
            cells[title] = line.get(letter, "")
        if not cells.get("World Size"):
            continue
        try:
            of_layout = _layout_cells(cells)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{file}: trial {cells.get('Trial ID')}: {error}") from None
        group = f"{of_model['group']}/{of_layout['gpus']}xA100-80GB/{kind}"
        yield {**of_model, **of_layout, "group": group}


def _model_cells(name: str, length: int) -> dict[str, str]:
    """Return the cells that all rows of a sheet share."""
    shape = SHAPES[name]
    cells = {
        "dataset": "hagemann2023",
        "group": f"hagemann2023/LLAMA-{name}/s{length}",
        "stack": "aleph-alpha-megatron-2023",
        "fold": f"aleph-alpha-megatron-2023/llama-{name.lower()}",
        "model": f"LLAMA-{name}",
        "kv_heads": shape.heads,
        "vocab": VOCABULARY,
        "tied_emb": 0,
        "seq_len": length,
        "cluster": "dgx_a100",
        "gpu": "A100-80GB",
        "cp": 1,
        "schedule": "1F1B",
        "global_batch_seqs": BATCH_TOKENS // length,
        "zero_stage": 1,
        "precision": "bf16",
        "source": "Hagemann et al. 2023, arXiv 2311.05610, the authors' sheets (CC BY-NC-SA 4.0)",
        **shape._asdict(),
    }
    return {column: str(value) for column, value in cells.items()}


def _layout_cells(cells: dict[str, str]) -> dict[str, str]:
    """Return the cells of one run. ValueError or KeyError if it is not understood."""
    gpus, tp, pp = (int(cells[column]) for column in ("World Size", "model_parallel_size", "pipe_parallel_size"))
    kernel = cells["kernel"].removesuffix(RMS_KERNEL)
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r} is unknown ({', '.join(KERNELS)})")
    layout = {
        "gpus": str(gpus),
        "dp": str(gpus // (tp * pp)),
        "tp": str(tp),
        "pp": str(pp),
        "micro_batch": cells["micro_batch_size"],
        "seq_parallel": cells.get("sequence_parallel") or "0",
        "act_ckpt": "full" if cells["activation_checkpointing_type"] == "every_layer" else "none",
        "attn_impl": KERNELS[kernel],
        "rmsnorm_kernel": str(int(cells["kernel"].endswith(RMS_KERNEL))),
    }
    return layout | _outcome(cells["Average Step Time"], cells["Average MFU"])


def _outcome(step_time: str, mfu: str) -> dict[str, str]:
    """Return status, step time and MFU of a run: the step time is a number, or the text of an error."""
    try:
        seconds = float(step_time)
    except ValueError:
        return {"status": "oom" if step_time.startswith("OOM") else "kernel_unavailable", "note": step_time}
    return {"status": "ok", "step_time_s": f"{seconds:.6g}", "mfu_pct": f"{100 * float(mfu):.2f}"}


def read_sheet(file: Path) -> list[dict[str, str]]:
    """Return the first sheet of an .xlsx file, line by line: texts by their column's letters. Empty lines are missing.

    ValueError if it is no such file.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            strings = ElementTree.fromstring(archive.read("xl/sharedStrings.xml"))
            sheet = ElementTree.fromstring(archive.read("xl/worksheets/sheet1.xml"))
    except (zipfile.BadZipFile, KeyError, ElementTree.ParseError) as error:
        raise ValueError(f"{file}: no .xlsx sheet: {error}") from None
    shared = []
    for entry in strings:
        shared.append("".join(text.text or "" for text in entry.iter(f"{TAG}t")))
    lines = []
    for row in sheet.iter(f"{TAG}row"):
        line = {}
        for cell in row.iter(f"{TAG}c"):
            text = cell.findtext(f"{TAG}v")
            if text is not None:
                letter = cell.get("r", "").rstrip("0123456789")
                line[letter] = shared[int(text)] if cell.get("t") == "s" else text
        if line:
            lines.append(line)
    return lines
