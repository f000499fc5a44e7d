"""Scores of made-up rows, whose errors are known."""

import json
from pathlib import Path
from typing import Any

import pytest

from evidence.measurements import MeasuredRow, read_row
from evidence.score import regret, score_files, score_rows
from tests.evidence.tables import case_of
from tests.tools.planner.calibration.sweeps import ROW, write_cells
from torchllm.config.errors import UserError
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.question import Restrictions


def row(factor: float | None, **cells: str) -> MeasuredRow:
    """A row whose measured time is `factor` of the predicted one; None: it ran out of memory."""
    cells = ROW | cells
    plain = read_row(cells)
    step = predict(case_of(plain)).step
    if factor is None:
        return read_row({**cells, "status": "oom"})
    return read_row({**cells, "step_time_s": repr(step * factor)})


def table(file: Path, rows: list[MeasuredRow], unread: tuple[dict[str, str], ...] = ()) -> str:
    """Write a table of these rows, and of others by their cells; return the file's name."""
    cells = [measured.cells for measured in rows]
    return write_cells(file, [*cells, *unread])


def summary_of(file: str) -> Any:
    """Return the scores of the data set of these rows, the only one."""
    scores = json.loads(score_files([file], as_json=True))
    assert list(scores) == ["made up"]
    return scores["made up"]


@pytest.fixture
def three_classes(tmp_path: Path) -> str:
    """One row that is scored, two under an assumption, and two that are not scored."""
    assumed = row(2.0, micro_batch="2", assumed="act_ckpt=none")
    without_vocab = row(0.5, vocab="")
    crashed = {**ROW, "status": "crashed_or_oom"}
    nameless = {**ROW, "stack": "Abacus", "step_time_s": "1"}
    no_layout = dict.fromkeys(ROW, "") | {"status": "invalid"}  # of a sweep: not counted
    return table(tmp_path / "rows.csv", [row(1.0), assumed, without_vocab], (crashed, nameless, no_layout))


def test_each_row_is_of_one_class(three_classes: str) -> None:
    summary = summary_of(three_classes)
    assert summary["rows"] == 5
    assert summary["scored"] == 1
    assert summary["assumed"] == 2
    assert summary["unscored"] == 2
    assert summary["timed"] == 3
    classes = summary["classes"]
    assert classes["nothing assumed"]["mean"] == pytest.approx(0.0)
    assert classes["under a stated assumption"]["mean"] == pytest.approx((0.5 + 1.0) / 2)
    text = score_files([three_classes], as_json=False)
    (line,) = [line for line in text.splitlines() if line.startswith("made up")]
    assert line.split()[2:7] == ["5", "1", "2", "2", "3"]
    assert "75.0% of the 4 timed rows are scored: 1, and 2 under a stated assumption; 1 are not" in text
    assert "unscored: status 'crashed_or_oom' tells neither a time nor a lack of memory (1 rows)" in text
    assert "assumed: act_ckpt = none (1 rows)" in text


def test_rows_are_chosen_by_keys(tmp_path: Path) -> None:
    file = table(tmp_path / "rows.csv", [row(1.0), row(1.0, tp="2", dp="4"), row(1.0, tp="4", dp="2")])
    for words, most, rows in [(["--parallel.tp=2"], [], 1), ([], ["parallel.tp=2"], 2)]:
        scores = json.loads(score_files([file], True, "", Restrictions.parse(words, most)))
        assert scores["made up"]["rows"] == rows
    with pytest.raises(UserError, match="rows are chosen by keys of model"):
        score_files([file], True, "", Restrictions.parse(["--run.seed=1"], []))


def test_regret_is_of_the_layout_that_would_be_chosen() -> None:
    """Micro batch 2 is predicted faster than 1 with full recomputation; measured, it is slower."""
    chosen = row(3.0, micro_batch="2")
    recomputes = row(1.0, act_ckpt="full")
    predicted = predict(case_of(chosen)).step
    fast = predict(case_of(recomputes)).step
    slow = 3 * predicted
    assert predicted < fast < slow
    result = regret(score_rows([chosen, recomputes]))
    assert result["regret_seconds"] == pytest.approx(slow / fast - 1)


def test_a_choice_that_ran_out_of_memory_is_said() -> None:
    chosen = row(None, micro_batch="2")
    slower = row(1.0, act_ckpt="full")
    slowest = row(1.1, act_ckpt="full", micro_batch="2")
    assert regret(score_rows([chosen, slower, slowest])) == {"chosen_ran_out_of_memory": True}
