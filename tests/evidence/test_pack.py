"""Rows of a sweep, packed for a pull request; and the rows that come with torchllm."""

import re
from pathlib import Path

import pytest

import torchllm
from evidence.measurements import read_rows
from evidence.pack import DATA, pack_rows, published_measurements
from tests.evidence.tables import read_table
from tests.evidence.test_score import row
from tests.tools.planner.calibration.sweeps import ROW, write_cells
from torchllm.tools.planner.calibration.rows import COLUMNS

SWEPT = {**ROW, "dataset": "sweep", "source": "", "layout": "--parallel.tp=1"}
INVALID = {**SWEPT, "status": "invalid"}


def swept(file: Path, *rows: dict[str, str]) -> str:
    """Write rows as a sweep does: every column, empty where there is nothing."""
    empty = dict.fromkeys([*COLUMNS, "layout"], "")
    return write_cells(file, [empty | cells for cells in rows])


def test_a_sweep_is_packed(tmp_path: Path) -> None:
    timed, lost = row(1.0, dataset="sweep"), row(None)
    source = swept(tmp_path / "mine.csv", timed.cells, lost.cells, INVALID)
    folder = tmp_path / "out"
    printed = pack_rows(source, str(folder))
    first, second = read_table(folder / "mine.csv")
    assert list(first) == list(COLUMNS)
    assert first["dataset"] == "mine"
    assert first["source"] == "recipes/sweep"
    assert first["software"] == torchllm.__version__
    assert first["fold"] == "torchllm/llama"
    assert second["dataset"] == "made up"
    assert second["status"] == "oom"
    text = (folder / "README.md").read_text()
    assert "2 layouts, 1 timed, the others out of memory, on 8 x A100-80GB." in text
    assert f"| `mine.csv` | 2 | measured for torchllm by ... | {torchllm.__version__} |" in text
    assert "2 rows are in" in printed
    (tmp_path / "h100").mkdir()
    pack_rows(swept(tmp_path / "h100" / "results.csv", timed.cells), str(tmp_path / "of a folder"))
    assert len(read_table(tmp_path / "of a folder" / "h100.csv")) == 1


def test_rows_that_others_cannot_use_are_refused(tmp_path: Path) -> None:
    for number, (cells, reason) in enumerate(
        [
            ({"gpu": "", "step_time_s": "1"}, "gpu is missing"),
            ({"step_time_s": ""}, "step_time_s is missing"),
            ({"step_time_s": "1", "cluster": "mine.toml"}, "has no file in train_configs/clusters"),
            ({"status": "crash"}, "status 'crash': only ok and oom say something"),
            ({"step_time_s": "1", "heads": ""}, "heads is missing"),
        ]
    ):
        place = tmp_path / str(number)
        place.mkdir()
        source = swept(place / "mine.csv", row(1.0).cells, SWEPT | cells)
        folder = place / "out"
        with pytest.raises(ValueError, match=f"row 2: .*{re.escape(reason)}"):
            pack_rows(source, str(folder))
        assert not folder.exists(), cells
    with pytest.raises(ValueError, match="no row was measured"):
        pack_rows(swept(tmp_path / "mine.csv", INVALID), str(tmp_path / "out"))


def test_every_file_that_comes_with_torchllm_has_its_source_and_its_rows() -> None:
    text = (DATA / "SOURCES.md").read_text()
    written_counts = dict(re.findall(r"^\| `(\w+\.csv)` \| (\d+) \|", text, re.MULTILINE))
    columns = {*COLUMNS, "layer_fwd_ms", "layer_bwd_ms"}
    counts = {}
    for file in published_measurements():
        rows = read_rows(file)
        counts[Path(file).name] = str(len(rows))
        for packed in rows:
            cells = packed.cells
            assert cells["source"], file
            assert cells["fold"], file
            assert set(cells) <= columns, file
            assert "hagemann" not in cells["dataset"].lower(), file  # CC BY-NC-SA
    assert written_counts == counts
    licenses = {file.stem for file in (DATA / "licenses").glob("*.txt")}
    for license in ("Apache-2.0", "MIT_vTrain", "MIT_KempnerForge", "MIT_dgxc-benchmarking", "BSD-3-Clause_torchtitan"):
        assert license in licenses
        assert license.partition("_")[0] in text
