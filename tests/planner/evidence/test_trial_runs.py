"""Named runs are compared with random ones on rows that neither has seen."""

import csv
import json
from pathlib import Path

import pytest

from tests.planner.evidence.test_calibrate import made
from tests.planner.evidence.test_cross_validation import named
from torchllm.planner.evidence import trial_runs
from torchllm.planner.evidence.calibrate import mean_error, problem_of
from torchllm.planner.evidence.fit import Timed, log_error, timed_rows
from torchllm.planner.evidence.trial_runs import (
    FoldTrial,
    error_of_rest,
    named_runs,
    runs_at,
    score_first_runs,
    trial_lines,
    trial_of,
)


def slow_runs() -> list[Timed]:
    """Runs of one machine that is slower than the constants that are known."""
    return runs_at(timed_rows(named(made(speed=0.85, wait=2.9e-4), "ours/slow")), {"ours": 0.0})


def test_the_rest_is_predicted_from_the_chosen_runs() -> None:
    runs = slow_runs()
    assert error_of_rest(runs, [0, 4, 9]) < 0.05 < mean_error(log_error(run, problem_of(runs).middle) for run in runs)
    odd = [runs[0]._replace(seconds=10 * runs[0].seconds), *runs[1:]]
    assert error_of_rest(odd, [4, 9]) > 0.05  # the odd one is of the rest


def test_runs_are_named_before_any_is_measured() -> None:
    runs = slow_runs()
    unmeasured = [run._replace(seconds=1.0) for run in runs]
    assert named_runs(runs) == named_runs(unmeasured)
    assert len(set(named_runs(runs))) == trial_runs.RUNS


def test_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_runs, "RANDOM_CHOICES", 5)
    trial = trial_of("ours/slow", slow_runs())
    assert trial.rows == 18
    assert trial.uncalibrated > 0.1
    assert max(trial.named, trial.random) < 0.05
    assert trial.beaten in (0, 0.2, 0.4, 0.6, 0.8, 1)


def test_a_fold_that_is_not_better_is_said() -> None:
    better, worse = FoldTrial("a", 30, 0.2, 0.05, 0.1, 0.9), FoldTrial("b", 30, 0.2, 0.1, 0.05, 0.1)
    _, first, second, total = trial_lines([better, worse])
    assert first.split() == ["a", "30", "20.0", "5.0", "10.0", "90.0"]
    assert second.endswith("not better")
    assert total == "better on 1 of 2 folds; 1.000 of the random error, geometric mean"


def test_the_command_tries_folds_of_rows_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_runs, "RANDOM_CHOICES", 2)
    monkeypatch.setattr(trial_runs, "ENOUGH_ROWS", 18)
    rows = [*named(made(), "ours/large"), *named(made()[:5], "ours/small")]
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0].cells))
        writer.writeheader()
        writer.writerows(row.cells for row in rows)
    assert [trial["fold"] for trial in json.loads(score_first_runs([str(file)], as_json=True))] == ["ours/large"]
    assert "better on " in score_first_runs([str(file)], as_json=False)
