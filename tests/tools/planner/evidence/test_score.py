"""Scores of made-up rows, whose errors are known."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.planner.evidence.tables import case_of, read_table, write_cells
from torchllm.tools.planner.evidence.measurements import MeasuredRow, read_row
from torchllm.tools.planner.evidence.score import predict_file, regret, score_files, score_rows
from torchllm.tools.planner.predict import predict

ROW = {
    "dataset": "made up",
    "stack": "torchllm",
    "group": "one",
    "model": "Llama 1B",
    "layers": "16",
    "hidden": "2048",
    "heads": "16",
    "ffn": "5632",
    "vocab": "32000",
    "tied_emb": "0",
    "seq_len": "2048",
    "cluster": "dgx_a100",
    "gpu": "A100-80GB",
    "gpus": "8",
    "dp": "8",
    "tp": "1",
    "pp": "1",
    "micro_batch": "1",
    "global_batch_seqs": "64",
    "zero_stage": "3",
    "act_ckpt": "none",
    "attn_impl": "flash2",
    "precision": "bf16",
    "status": "ok",
}


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


def test_predictions_are_written_beside_what_was_there(tmp_path: Path) -> None:
    source = table(tmp_path / "in.csv", [row(1.0, mystery="kept")], ({**ROW, "heads": ""},))
    target = tmp_path / "out.csv"
    printed = predict_file(source, str(target))
    first, second = read_table(target)
    assert first["mystery"] == "kept"
    seconds = float(first["predicted_step_time_s"])
    assert seconds == pytest.approx(float(first["step_time_s"]), rel=1e-5)
    assert float(first["predicted_low_s"]) < seconds
    assert seconds < float(first["predicted_high_s"])
    assert 0 < float(first["predicted_mfu_pct"]) < 100
    assert float(first["predicted_memory_gib"]) > 0
    assert first["predicted_fits"] == "1"
    assert first["predicted_verdict"] == "fits"
    assert "(torchllm is not measured on A100" in first["predicted_note"]
    assert second["predicted_step_time_s"] == ""
    assert second["predicted_note"] == "heads is missing"
    assert "unscored: heads is missing (1 rows)" in printed
