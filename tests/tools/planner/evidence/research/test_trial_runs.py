"""Named runs are compared with random ones on rows that neither has seen."""

import json
from pathlib import Path

import pytest

from tests.tools.planner.evidence.research.test_cross_validation import named
from tests.tools.planner.evidence.tables import write_rows
from tests.tools.planner.evidence.test_calibrate import made
from torchllm.tools.planner.evidence.calibrate import mean_error, problem_of
from torchllm.tools.planner.evidence.fit import Timed, log_error, timed_rows
from torchllm.tools.planner.evidence.research import trial_runs
from torchllm.tools.planner.evidence.research.trial_runs import (
    FoldTrial,
    error_of_rest,
    named_runs,
    runs_at,
    score_first_runs,
    trial_lines,
)


def slow_runs() -> list[Timed]:
    """Runs of one machine that is slower than the constants that are known."""
    rows = named(made(speed=0.85, wait=2.9e-4), "ours/slow")
    return runs_at(timed_rows(rows), {"ours": 0.0})


def test_the_rest_is_predicted_from_the_chosen_runs() -> None:
    runs = slow_runs()
    start = problem_of(runs).middle
    uncalibrated = mean_error(log_error(run, start) for run in runs)
    assert uncalibrated > 0.05
    assert error_of_rest(runs, [0, 4, 9]) < 0.05
    first, *usual = runs
    odd = first._replace(seconds=10 * first.seconds)
    assert error_of_rest([odd, *usual], [4, 9]) > 0.05  # the odd one is of the rest


def test_runs_are_named_before_any_is_measured() -> None:
    runs = slow_runs()
    unmeasured = [run._replace(seconds=1.0) for run in runs]
    assert named_runs(runs) == named_runs(unmeasured)
    assert len(set(named_runs(runs))) == trial_runs.RUNS


def test_a_fold_that_is_not_better_is_said() -> None:
    better = FoldTrial("a", 30, uncalibrated=0.2, named=0.05, random=0.1, beaten=0.9)
    worse = FoldTrial("b", 30, uncalibrated=0.2, named=0.1, random=0.05, beaten=0.1)
    _, first, second, total = trial_lines([better, worse])
    assert first.split() == ["a", "30", "20.0", "5.0", "10.0", "90.0"]
    assert second.endswith("not better")
    assert total == "better on 1 of 2 folds; 1.000 of the random error, geometric mean"


def test_the_command_tries_folds_of_rows_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_runs, "RANDOM_CHOICES", 2)
    monkeypatch.setattr(trial_runs, "ENOUGH_ROWS", 18)
    large = named(made(), "ours/large")
    small = named(made()[:5], "ours/small")
    file = write_rows(tmp_path / "rows.csv", large + small)
    (trial,) = json.loads(score_first_runs([file], as_json=True))
    assert trial["fold"] == "ours/large"
    assert "better on " in score_first_runs([file], as_json=False)
