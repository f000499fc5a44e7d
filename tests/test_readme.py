"""The README stays short, its example config is a valid run, and the sweep's figures are those of its rows.

Commands, quoted outputs and links are tested in tests/test_docs.py, with those of the other pages.
"""

import json
import re
from pathlib import Path

import pytest

from torchllm.config import load_config
from torchllm.planner.evidence.calibrate import calibrate_file
from torchllm.planner.evidence.measurements import read_rows
from torchllm.planner.evidence.score import score_files, score_rows
from torchllm.spec.cluster import read_cluster

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SWEEP = (ROOT / "docs/sweep.md").read_text()
ROWS = str(ROOT / "docs/sweep/results.csv")


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 160


@pytest.mark.parametrize("page", ["README.md", "docs/configure.md"])
def test_example_config_is_valid(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), re.S)
    file = tmp_path / "run.toml"
    file.write_text(example)
    monkeypatch.setenv("WORLD_SIZE", "64")
    config = load_config([str(file), "--run.folder=unused"])
    assert config.parallel.dp_replicate == 8


def place_of_the_best(cluster: str) -> int:
    """Where the planner has the measured best of the sweep, from 1."""
    rows = score_rows(row for row in read_rows(ROWS, cluster) if row.seconds)
    expected = {row.row.cells["layout"]: row.prediction.step for row in rows if row.prediction}
    measured = {row.row.cells["layout"]: row.row.seconds or 0.0 for row in rows}
    return sorted(expected, key=expected.__getitem__).index(min(measured, key=measured.__getitem__)) + 1


def test_the_sweeps_figures_are_as_shown(tmp_path: Path) -> None:
    rows = read_rows(ROWS)
    assert [len(rows), sum(row.seconds is not None for row in rows)] == [72, 52]
    fitted = tmp_path / "fitted.toml"
    said = calibrate_file(ROWS, str(fitted), "")
    assert said.replace(str(fitted), "docs/sweep/fitted.toml") in SWEEP
    kept = read_cluster(str(ROOT / "docs/sweep/fitted.toml"), [])
    now = read_cluster(str(fitted), [])
    assert kept is not None
    assert kept == now
    before, after = (json.loads(score_files([ROWS], True, cluster))["sweep"] for cluster in ("", str(fitted)))
    assert f"{after['spearman']:.2f} instead of {before['spearman']:.2f}" in SWEEP
    ranks = [place_of_the_best(cluster) for cluster in ("", str(fitted))]
    assert ranks[0] > 12
    assert ranks[1] == 8
    assert f"slower by {before['groups']['sweep/s128/8']['regret_seconds']:.0%}".replace("%", " %") in SWEEP
