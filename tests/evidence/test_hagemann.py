"""Sheets in the format of Hagemann et al. 2023, made up: theirs may not be passed on."""

import zipfile
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from evidence.hagemann import convert_hagemann, read_sheet
from evidence.measurements import read_rows
from tests.evidence.tables import case_of, read_table
from torchllm.facts.flops import parameter_count

ALL_RUNS = "llama_13B_bfloat16_64_GPUs_all_runs.xlsx"
TITLES = [
    "Trial ID",
    "World Size",
    "Average Step Time",
    "Average Step Time * World size",
    "Average TFlops Megatron",
    "Average TFlops Aleph Alpha",
    "Average MFU",
    "activation_checkpointing_type",
    "kernel",
    "micro_batch_size",
    "model_parallel_size",
    "pipe_parallel_size",
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
            reference = f"{letter}{number}"
            if not text:
                cells += f'<c r="{reference}"/>'
            elif text.replace(".", "").isdigit():
                cells += f'<c r="{reference}"><v>{text}</v></c>'
            else:
                cells += f'<c r="{reference}" t="s"><v>{len(strings)}</v></c>'
                strings.append(text)
        rows += f'<row r="{number}">{cells}</row>'
    items = "".join(f"<si><t>{escape(text)}</t></si>" for text in strings)
    shared_strings = f"<sst {NAMESPACE}>{items}</sst>"
    sheet = f"<worksheet {NAMESPACE}><sheetData>{rows}</sheetData></worksheet>"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("xl/sharedStrings.xml", shared_strings)
        archive.writestr("xl/worksheets/sheet1.xml", sheet)


def convert(folder: Path) -> list[dict[str, str]]:
    target = folder / "rows.csv"
    printed = convert_hagemann(str(folder), str(target))
    assert "CC BY-NC-SA" in printed
    return read_table(target)


def column(rows: list[dict[str, str]], name: str) -> list[str]:
    return [row[name] for row in rows]


def test_a_sheet_becomes_rows_that_are_scored(tmp_path: Path) -> None:
    runs = [run("10.5"), run("OOM Error", "torch"), run("Kernel not available", "fused", "every_layer")]
    write_sheet(tmp_path / ALL_RUNS, [["a title"], TITLES, *runs])
    rows = convert(tmp_path)
    assert column(rows, "status") == ["ok", "oom", "kernel_unavailable"]
    assert column(rows, "attn_impl") == ["flash2", "eager", "fused_softmax"]
    assert column(rows, "rmsnorm_kernel") == ["1", "0", "0"]
    assert column(rows, "act_ckpt") == ["none", "none", "full"]
    first = rows[0]
    assert first["step_time_s"] == "10.5"
    assert first["mfu_pct"] == "50.00"
    assert first["seq_parallel"] == "0"
    assert first["group"] == "hagemann2023/LLAMA-13B/s2048/64xA100-80GB/main"
    row, *_ = read_rows(str(tmp_path / "rows.csv"))
    case = case_of(row)
    assert row.assumed == []
    assert (case.ranks, case.parallel.dp_shard, case.training.global_batch_size) == (64, 8, 2048)
    assert parameter_count(case.model) == pytest.approx(14.0e9, rel=1e-3)


def test_long_sequences_and_sequence_parallelism(tmp_path: Path) -> None:
    folder = tmp_path / "seqpara"
    folder.mkdir()
    name = "llama_30B_8k_seq_length_bfloat16_64_GPUs_sequence_parallelism.xlsx"
    titles = [*TITLES, "sequence_parallel"]
    runs = [[*run("10.5"), "1"], [*run("9.5"), "0"]]
    write_sheet(folder / name, [["a title"], titles, *runs])
    rows = convert(tmp_path)
    assert column(rows, "seq_parallel") == ["1", "0"]
    assert column(rows, "seq_len") == ["8192"] * 2
    assert column(rows, "global_batch_seqs") == ["512"] * 2
    assert column(rows, "layers") == ["60"] * 2
    assert rows[0]["group"] == "hagemann2023/LLAMA-30B/s8192/64xA100-80GB/seq_parallel"


def test_what_is_no_such_sheet_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sheet"):
        convert(tmp_path)
    file = tmp_path / ALL_RUNS
    write_sheet(file, [["a title"], TITLES, run("10.5", "magic")])
    with pytest.raises(ValueError, match="trial 1: kernel 'magic' is unknown"):
        convert(tmp_path)
    file.write_text("no zip")
    with pytest.raises(ValueError, match=r"no \.xlsx sheet"):
        read_sheet(file)
    file.rename(tmp_path / "budget.xlsx")
    with pytest.raises(ValueError, match="its name is not that of a sheet"):
        convert(tmp_path)
