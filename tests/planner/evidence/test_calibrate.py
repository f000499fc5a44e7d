"""Constants are found again from times that they made; a written cluster file holds them."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.evidence.test_score import ROW, row
from torchllm.planner.evidence.calibrate import calibrate, calibrate_file
from torchllm.planner.evidence.measurements import MeasuredRow, read_row
from torchllm.planner.evidence.score import score_files
from torchllm.planner.predict import predict
from torchllm.spec.cluster import read_cluster


def made(**constants: float) -> list[MeasuredRow]:
    """A sweep whose times are those of other constants."""
    rows = []
    for micro in (1, 2, 4):
        for tp in (1, 2, 4):
            for mode in ("none", "full"):
                cells = {**ROW, "micro_batch": str(micro), "tp": str(tp), "dp": str(8 // tp), "act_ckpt": mode}
                plain = read_row(cells)
                assert plain.case
                software = plain.case.software
                other = replace(software, constants=replace(software.constants, **constants))
                step = predict(replace(plain.case, software=other)).step
                rows.append(read_row({**cells, "step_time_s": repr(step)}))
    return rows


def test_constants_are_found_again() -> None:
    fitted, before, after = calibrate(made(launch=2.5e-5, wait=3e-4))
    assert before > 0.05
    assert after < 0.01
    assert fitted.launch == pytest.approx(2.5e-5, rel=0.15)


def test_a_wait_of_another_order_of_magnitude_is_found() -> None:
    fitted, before, after = calibrate(made(wait=5e-3))
    assert before > 0.5
    assert after < 0.01
    assert fitted.wait == pytest.approx(5e-3, rel=0.05)


def test_errors_are_those_of_score() -> None:
    _, before, _ = calibrate([row(0.5)])
    assert before == pytest.approx(1.0)


def test_what_fits_is_left_alone() -> None:
    rows = made()
    fitted, before, after = calibrate(rows)
    assert before < 1e-9
    assert after < 1e-9
    assert rows[0].case is not None
    assert fitted == rows[0].case.software.constants


def test_peaks_move_the_allocator() -> None:
    plain = row(1.0)
    assert plain.case
    memory = predict(plain.case).memory
    peak = (memory.live + 0.3 * memory.under_way) / 2**30
    fitted, _, _ = calibrate([row(1.0, peak_memory_gib=repr(peak))])
    assert fitted.allocator == pytest.approx(1.3)


def test_nothing_timed_is_an_error() -> None:
    with pytest.raises(ValueError, match="no row has a step time"):
        calibrate([read_row(ROW)])


def test_the_file_is_a_cluster(tmp_path: Path) -> None:
    rows = made(launch=2.5e-5)
    with open(tmp_path / "sweep.csv", "w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0].cells))
        writer.writeheader()
        writer.writerows(one.cells for one in rows)
    target = tmp_path / "mine.toml"
    for cluster in ("dgx_a100", ""):  # the rows say so
        said = calibrate_file(str(tmp_path / "sweep.csv"), str(target), cluster)
        assert "before" in said
    found: list[str] = []
    hardware = read_cluster(str(target), found)
    assert hardware is not None, found
    assert hardware.constants.launch == pytest.approx(2.5e-5, rel=0.2)
    assert hardware.gpu == "A100-SXM4-80GB"
    again = calibrate_file(str(tmp_path / "sweep.csv"), str(tmp_path / "again.toml"), str(target))
    assert float(again.split()[5].rstrip("%")) < 1.0, again  # with the fitted file, before is what was after
    scored = json.loads(score_files([str(tmp_path / "sweep.csv")], True, str(target)))
    assert [summary["mean"] < 0.01 for summary in scored.values()] == [True]


def test_a_cluster_that_there_is_not_is_an_error(tmp_path: Path) -> None:
    (only,) = [row(1.0)]
    with open(tmp_path / "sweep.csv", "w", newline="") as opened:
        writer = csv.DictWriter(opened, list(only.cells))
        writer.writeheader()
        writer.writerow(only.cells)
    with pytest.raises(ValueError, match=r'did you mean "dgx_a100"\?'):
        calibrate_file(str(tmp_path / "sweep.csv"), str(tmp_path / "mine.toml"), "dgx_a10")
