"""The README stays short, its example config is a valid run, and the sweep's figures are those of its rows.

Commands, quoted outputs and links are tested in tests/test_docs.py, with those of the other pages.
"""

import json
import re
from pathlib import Path

import pytest

from evidence.measurements import read_rows
from evidence.score import score_files, score_rows
from torchllm.tools.config.load import load_config
from torchllm.tools.planner.calibration.calibrate import calibrate_file
from torchllm.tools.planner.cluster import read_cluster

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SWEEP = (ROOT / "docs/measurements.md").read_text()
ROWS = str(ROOT / "docs/sweep/results.csv")


@pytest.mark.parametrize("page", ["README.md", "docs/configure.md"])
def test_example_config_is_valid(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), re.S)[0]
    file = tmp_path / "run.toml"
    file.write_text(example)
    monkeypatch.setenv("WORLD_SIZE", "64")
    config = load_config([str(file), "--run.folder=unused"])
    assert config.parallel.dp_replicate == 8
    assert len(README.splitlines()) <= 137


def place_of_the_measured_best(cluster: str) -> int:
    """Return where the planner ranks the layout of the sweep that was measured fastest, from 1."""
    scored = score_rows(row for row in read_rows(ROWS, cluster) if row.seconds)
    predicted_seconds = {}
    measured_seconds = {}
    for row in scored:
        layout = row.row.cells["layout"]
        measured_seconds[layout] = row.row.seconds or 0.0
        if row.prediction:
            predicted_seconds[layout] = row.prediction.step
    fastest = min(measured_seconds, key=lambda layout: measured_seconds[layout])
    ranking = sorted(predicted_seconds, key=lambda layout: predicted_seconds[layout])
    return ranking.index(fastest) + 1


@pytest.mark.exhaustive
def test_calibration_is_as_shown(tmp_path: Path) -> None:
    fitted = tmp_path / "fitted.toml"
    assert len(read_rows(ROWS)) == 72
    assert sum(row.seconds is not None for row in read_rows(ROWS)) == 52
    printed = calibrate_file(ROWS, str(fitted), "")
    shown = printed.replace(str(fitted), "docs/sweep/fitted.toml")
    assert " ".join(shown.split()) in " ".join(SWEEP.split())
    assert 'base = "clusters/this_cpu.toml"' in fitted.read_text()
    cluster_in_docs = read_cluster(str(ROOT / "docs/sweep/fitted.toml"), [])
    assert cluster_in_docs is not None
    assert cluster_in_docs == read_cluster(str(fitted), [])


def test_the_planners_errors_on_the_sweep_are_as_shown() -> None:
    fitted = str(ROOT / "docs/sweep/fitted.toml")
    default_score = json.loads(score_files([ROWS], True, ""))["sweep"]
    fitted_score = json.loads(score_files([ROWS], True, fitted))["sweep"]
    assert f"{fitted_score['spearman']:.2f} instead of {default_score['spearman']:.2f}" in SWEEP
    assert place_of_the_measured_best("") > 12
    assert place_of_the_measured_best(fitted) == 8
    regret = default_score["groups"]["sweep/s128/8"]["regret_seconds"]
    assert f"slower by {100 * regret:.0f} %" in SWEEP
