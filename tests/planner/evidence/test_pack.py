"""Rows of a sweep, packed for a pull request; and the rows that come with torchllm."""

import csv
import re
from pathlib import Path

import pytest

import torchllm
from tests.planner.evidence.test_score import ROW, row
from torchllm.planner.evidence.cells import COLUMNS
from torchllm.planner.evidence.measurements import read_rows
from torchllm.planner.evidence.pack import DATA, own_measurements, pack_rows
from torchllm.planner.evidence.score import score_rows

SWEPT = {**ROW, "dataset": "sweep", "source": "", "layout": "--parallel.tp=1"}
INVALID = {**SWEPT, "status": "invalid"}


def swept(file: Path, *rows: dict[str, str]) -> str:
    """Write rows as a sweep does: every column, empty where there is nothing."""
    with open(file, "w", newline="") as opened:
        writer = csv.DictWriter(opened, [*COLUMNS, "layout"], restval="")
        writer.writeheader()
        writer.writerows(rows)
    return str(file)


def packed(folder: Path, name: str) -> list[dict[str, str]]:
    with open(folder / f"{name}.csv", newline="") as opened:
        return list(csv.DictReader(opened))


def test_a_sweep_is_packed(tmp_path: Path) -> None:
    source = swept(tmp_path / "mine.csv", row(1.0, dataset="sweep").cells, row(None).cells, INVALID)
    printed = pack_rows(source, str(tmp_path / "out"))
    first, second = packed(tmp_path / "out", "mine")
    assert list(first) == list(COLUMNS)
    assert (first["dataset"], second["dataset"], first["source"]) == ("mine", "made up", "recipes/sweep")
    assert (first["software"], first["fold"]) == (torchllm.__version__, "torchllm/llama 1b")
    assert second["status"] == "oom"
    text = (tmp_path / "out" / "README.md").read_text()
    assert "2 layouts, 1 timed, the others out of memory, on 8 x A100-80GB." in text
    assert f"| `mine.csv` | 2 | measured for torchllm by ... | {torchllm.__version__} |" in text
    assert "2 rows are in" in printed


def test_a_sweep_is_named_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "h100").mkdir()
    pack_rows(swept(tmp_path / "h100" / "results.csv", row(1.0).cells), str(tmp_path / "out"))
    assert len(packed(tmp_path / "out", "h100")) == 1


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpu": "", "step_time_s": "1"}, "gpu is missing"),
        ({"step_time_s": ""}, "step_time_s is missing"),
        ({"step_time_s": "1", "cluster": "mine.toml"}, "has no file in train_configs/clusters"),
        ({"status": "crash"}, "status 'crash': only ok and oom say something"),
        ({"step_time_s": "1", "heads": ""}, "heads is missing"),
    ],
)
def test_rows_that_others_cannot_use_are_refused(tmp_path: Path, cells: dict[str, str], reason: str) -> None:
    source = swept(tmp_path / "mine.csv", row(1.0).cells, {**SWEPT, **cells})
    with pytest.raises(ValueError, match=f"row 2: .*{re.escape(reason)}"):
        pack_rows(source, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_sweep_without_a_measured_row_is_refused(tmp_path: Path) -> None:
    source = swept(tmp_path / "mine.csv", INVALID)
    with pytest.raises(ValueError, match="no row was measured"):
        pack_rows(source, str(tmp_path / "out"))


def test_every_file_that_comes_with_torchllm_has_its_source_and_its_rows() -> None:
    text = (DATA / "SOURCES.md").read_text()
    counts = {name: int(rows) for name, rows in re.findall(r"^\| `(\w+\.csv)` \| (\d+) \|", text, re.MULTILINE)}
    assert counts == {Path(file).name: len(read_rows(file)) for file in own_measurements()}


def test_every_row_that_comes_with_torchllm_names_its_source() -> None:
    for file in own_measurements():
        for packed in read_rows(file):
            assert packed.cells["source"], file
            assert packed.cells["fold"], file
            assert set(packed.cells) <= {*COLUMNS, "layer_fwd_ms", "layer_bwd_ms"}, file
            assert "hagemann" not in packed.cells["dataset"].lower(), file  # CC BY-NC-SA


def test_four_of_five_timed_rows_are_scored() -> None:
    timed = [
        packed
        for file in own_measurements()
        for packed in score_rows(read_rows(file))
        if packed.row.seconds is not None
    ]
    assert len(timed) > 1000
    unscored = [packed for packed in timed if packed.row_class == "unscored"]
    assert len(unscored) <= 0.2 * len(timed)


def test_licences_that_ask_for_their_text_are_there() -> None:
    text = (DATA / "SOURCES.md").read_text()
    names = {file.stem for file in (DATA / "licenses").glob("*.txt")}
    for licence in ("Apache-2.0", "MIT_vTrain", "MIT_KempnerForge", "MIT_dgxc-benchmarking", "BSD-3-Clause_torchtitan"):
        assert licence in names
        assert licence.partition("_")[0] in text
