"""Constants are found again from times that they made; a written cluster file holds them."""

from pathlib import Path

import pytest

from tests.tools.planner.calibration.sweeps import ROW, made, write_cells
from torchllm.tools.planner.calibration.calibrate import calibrate, calibrate_file
from torchllm.tools.planner.calibration.fit import PRIORS
from torchllm.tools.planner.calibration.rows import read_row
from torchllm.tools.planner.cluster import read_cluster
from torchllm.tools.planner.predict import predict


def test_constants_are_found_again() -> None:
    calibrated = calibrate(made(speed=0.85, wait=2.5e-4))
    assert calibrated.rows == 18
    assert calibrated.uncalibrated > 0.13
    assert calibrated.left_out is not None
    assert calibrated.left_out < 0.01
    assert calibrated.constants.speed == pytest.approx(0.85, rel=0.02)
    assert calibrated.constants.wait == pytest.approx(2.5e-4, rel=0.1)


@pytest.mark.exhaustive
def test_a_cpus_waits_have_no_bounds() -> None:
    """They are milliseconds where a GPU's are microseconds, and this model takes minutes there."""
    rows = made(cluster="this_cpu", gpu="CPU", wait=2.0)
    calibrated = calibrate(rows)
    assert calibrated.left_out is not None
    assert calibrated.uncalibrated > 3 * calibrated.left_out
    assert calibrated.constants.wait > 10 * PRIORS["wait"].high


def test_peaks_move_the_allocator() -> None:
    row = made()[0]
    assert row.case is not None
    memory = predict(row.case).memory
    peak = (memory.live + 0.3 * memory.under_way) / 2**30
    calibrated = calibrate([read_row({**row.cells, "peak_memory_gib": repr(peak)})])
    assert calibrated.constants.allocator == pytest.approx(1.3)


def test_what_cannot_be_calibrated_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row has a step time"):
        calibrate([read_row(ROW)])
    with pytest.raises(ValueError, match="stack 'nemo': rows of other frameworks are for python -m evidence"):
        calibrate([read_row({**ROW, "stack": "nemo", "step_time_s": "1"})])
    sweep = write_cells(tmp_path / "sweep.csv", [ROW])
    with pytest.raises(ValueError, match=r'did you mean "dgx_a100"\?'):
        calibrate_file(sweep, str(tmp_path / "mine.toml"), "dgx_a10")


def test_the_file_is_a_cluster(tmp_path: Path) -> None:
    sweep = write_cells(tmp_path / "sweep.csv", [row.cells for row in made(speed=0.85)])
    target = tmp_path / "mine.toml"
    for cluster in ("dgx_a100", ""):  # the rows say so
        printed = calibrate_file(sweep, str(target), cluster)
        assert "before" in printed
    problems: list[str] = []
    hardware = read_cluster(str(target), problems)
    assert hardware is not None, problems
    assert hardware.constants.speed == pytest.approx(0.85, rel=0.02)
    assert hardware.gpu == "A100-SXM4-80GB"
    printed_again = calibrate_file(sweep, str(tmp_path / "again.toml"), str(target))
    error_before = printed_again.split()[7]
    assert float(error_before.rstrip("%")) < 1.0, printed_again  # what was after, as the file holds what was fitted
