"""Sheets in the format of Hagemann et al. 2023, made up: theirs may not be passed on."""

import csv
import zipfile
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from torchllm.planner.evidence.hagemann import convert_hagemann, read_sheet
from torchllm.planner.evidence.measurements import read_rows
from torchllm.spec.flops import parameter_count

TITLES = [
    *("Trial ID", "World Size", "Average Step Time", "Average Step Time * World size", "Average TFlops Megatron"),
    *("Average TFlops Aleph Alpha", "Average MFU", "activation_checkpointing_type", "kernel", "micro_batch_size"),
    *("model_parallel_size", "pipe_parallel_size"),
]
NAMESPACE = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'


def run(seconds: str, kernel: str = "flash_attention2 + RMS kernel", recompute: str = "disabled") -> list[str]:
    """One line of a sheet: 64 GPUs, micro batch 2, tp 2, pp 4."""
    return ["1", "64", seconds, "", "", "", "0.5", recompute, kernel, "2", "2", "4"]


def write_sheet(file: Path, lines: list[list[str]]) -> None:
    """Numbers are in the sheet, texts in a table that it points to, as spreadsheet programs write them."""
    strings: list[str] = []
    rows = ""
    for number, line in enumerate(lines, start=1):
        cells = ""
        for letter, text in zip("ABCDEFGHIJKLM", line, strict=False):
            if not text:
                cells += f'<c r="{letter}{number}"/>'
            elif text.replace(".", "").isdigit():
                cells += f'<c r="{letter}{number}"><v>{text}</v></c>'
            else:
                strings.append(text)
                cells += f'<c r="{letter}{number}" t="s"><v>{len(strings) - 1}</v></c>'
        rows += f'<row r="{number}">{cells}</row>'
    shared = "".join(f"<si><t>{escape(text)}</t></si>" for text in strings)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("xl/sharedStrings.xml", f"<sst {NAMESPACE}>{shared}</sst>")
        archive.writestr(
            "xl/worksheets/sheet1.xml", f"<worksheet {NAMESPACE}><sheetData>{rows}</sheetData></worksheet>"
        )


def convert(folder: Path) -> list[dict[str, str]]:
    assert "CC BY-NC-SA" in convert_hagemann(str(folder), str(folder / "rows.csv"))
    with open(folder / "rows.csv", newline="") as opened:
        return list(csv.DictReader(opened))


def test_a_sheet_becomes_rows_that_are_scored(tmp_path: Path) -> None:
    runs = [run("10.5"), run("OOM Error", "torch"), run("Kernel not available", "fused", "every_layer")]
    write_sheet(tmp_path / "llama_13B_bfloat16_64_GPUs_all_runs.xlsx", [["a title"], TITLES, *runs])
    rows = convert(tmp_path)
    assert [row["status"] for row in rows] == ["ok", "oom", "kernel_unavailable"]
    assert [row["attn_impl"] for row in rows] == ["flash2", "eager", "fused_softmax"]
    assert [row["rmsnorm_kernel"] for row in rows] == ["1", "0", "0"]
    assert [row["act_ckpt"] for row in rows] == ["none", "none", "full"]
    assert (rows[0]["step_time_s"], rows[0]["mfu_pct"], rows[0]["seq_parallel"]) == ("10.5", "50.00", "0")
    assert rows[0]["group"] == "hagemann2023/LLAMA-13B/s2048/64xA100-80GB/main"
    first, *_ = read_rows(str(tmp_path / "rows.csv"))
    assert first.case is not None, first.problem
    assert (first.assumed, first.case.ranks, first.case.parallel.dp_shard) == ([], 64, 8)
    assert first.case.training.global_batch_size == 2048
    assert parameter_count(first.case.model) == pytest.approx(14.0e9, rel=1e-3)


def test_long_sequences_and_sequence_parallelism(tmp_path: Path) -> None:
    folder = tmp_path / "seqpara"
    folder.mkdir()
    name = "llama_30B_8k_seq_length_bfloat16_64_GPUs_sequence_parallelism.xlsx"
    write_sheet(folder / name, [["a title"], [*TITLES, "sequence_parallel"], [*run("10.5"), "1"], [*run("9.5"), "0"]])
    rows = convert(tmp_path)
    assert [row["seq_parallel"] for row in rows] == ["1", "0"]
    assert {(row["seq_len"], row["global_batch_seqs"], row["layers"]) for row in rows} == {("8192", "512", "60")}
    assert rows[0]["group"] == "hagemann2023/LLAMA-30B/s8192/64xA100-80GB/seq_parallel"


def test_what_is_no_such_sheet_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sheet"):
        convert(tmp_path)
    name = tmp_path / "llama_13B_bfloat16_64_GPUs_all_runs.xlsx"
    write_sheet(name, [["a title"], TITLES, run("10.5", "magic")])
    with pytest.raises(ValueError, match="trial 1: kernel 'magic' is unknown"):
        convert(tmp_path)
    name.write_text("no zip")
    with pytest.raises(ValueError, match=r"no \.xlsx sheet"):
        read_sheet(name)
    name.rename(tmp_path / "budget.xlsx")
    with pytest.raises(ValueError, match="its name is not that of a sheet"):
        convert(tmp_path)
