"""Scores of made-up rows, whose errors are known."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchllm.planner.evidence.measurements import MeasuredRow, read_row
from torchllm.planner.evidence.score import predict_file, regret, score_files, score_rows, spearman
from torchllm.planner.memory import counted
from torchllm.planner.predict import predict

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
    plain = read_row({**ROW, **cells})
    assert plain.case is not None, plain.problem
    if factor is None:
        return read_row({**ROW, **cells, "status": "oom"})
    return read_row({**ROW, **cells, "step_time_s": repr(predict(plain.case).step * factor)})


def table(file: Path, rows: list[MeasuredRow], extra: tuple[dict[str, str], ...] = ()) -> str:
    names = list(dict.fromkeys(name for scored_row in rows for name in scored_row.cells))
    with open(file, "w", newline="") as opened:
        writer = csv.DictWriter(opened, names, restval="")
        writer.writeheader()
        writer.writerows([*(scored_row.cells for scored_row in rows), *extra])
    return str(file)


def scored(tmp_path: Path, rows: list[MeasuredRow], extra: tuple[dict[str, str], ...] = ()) -> Any:
    return json.loads(score_files([table(tmp_path / "rows.csv", rows, extra)], as_json=True))


def test_errors_raw_and_after_one_factor(tmp_path: Path) -> None:
    rows = [row(factor, micro_batch=str(micro)) for factor, micro in ((1.25, 1), (1.25, 2), (1.0, 4))]
    summary = scored(tmp_path, rows)["made up"]
    assert (summary["rows"], summary["timed"], summary["unscored"]) == (3, 3, 0)
    assert summary["mean"] == pytest.approx((0.2 + 0.2 + 0.0) / 3)
    assert summary["median"] == pytest.approx(0.2)
    assert summary["p90"] == pytest.approx(0.2)
    assert summary["bias"] == pytest.approx(-0.4 / 3)
    assert summary["scaled"]["factor"] == pytest.approx(1.25)
    assert summary["scaled"]["mean"] == pytest.approx(0.25 / 3)


def test_a_row_that_cannot_be_read_is_named_and_the_rest_is_scored(tmp_path: Path) -> None:
    bad = {**ROW, "micro_batch": "many"}
    file = table(tmp_path / "rows.csv", [row(1.0), row(1.0, micro_batch="2")], (bad,))
    text = score_files([file], as_json=False)
    assert "unscored: micro_batch = 'many' is not a number (1 rows)" in text
    summary = json.loads(score_files([file], as_json=True))["made up"]
    assert (summary["rows"], summary["timed"], summary["unscored"]) == (3, 2, 1)


def test_each_row_is_of_one_class_and_every_line_counts_them(tmp_path: Path) -> None:
    crashed = {**ROW, "status": "crashed_or_oom"}
    nameless = {**ROW, "stack": "Abacus", "step_time_s": "1"}
    rows = [row(1.0), row(2.0, micro_batch="2", assumed="act_ckpt=none"), row(0.5, vocab="")]
    file = table(tmp_path / "rows.csv", rows, (crashed, nameless))
    summary = json.loads(score_files([file], as_json=True))["made up"]
    assert [summary[key] for key in ("rows", "scored", "assumed", "unscored", "timed")] == [5, 1, 2, 2, 3]
    assert summary["classes"]["nothing assumed"]["mean"] == pytest.approx(0.0)
    assert summary["classes"]["under a stated assumption"]["mean"] == pytest.approx((0.5 + 1.0) / 2)
    text = score_files([file], as_json=False)
    assert [line.split()[2:7] for line in text.splitlines() if line.startswith("made up")] == [
        ["5", "1", "2", "2", "3"]
    ]
    assert "75.0% of the 4 timed rows are scored: 1, and 2 under a stated assumption; 1 are not" in text
    assert "unscored: status 'crashed_or_oom' tells neither a time nor a lack of memory (1 rows)" in text
    assert "assumed: act_ckpt = none (1 rows)" in text


def test_a_table_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("one,two\n1,2\n")
    with pytest.raises(ValueError, match="not a table of layouts"):
        score_files([str(tmp_path / "a.csv")], as_json=False)


def test_ties_count_at_their_worst() -> None:
    slow, fast = row(2.0), row(1.0)
    for order in ([slow, fast], [fast, slow]):
        assert regret(score_rows(order))["regret_seconds"] == pytest.approx(1.0)


def test_regret_is_of_the_layout_that_would_be_chosen() -> None:
    """Micro batch 2 is predicted faster than 1 with full recomputation; measured, it is slower."""
    chosen, second_row = row(3.0, micro_batch="2"), row(1.0, act_ckpt="full")
    assert chosen.case
    assert second_row.case
    slow, fast = 3 * predict(chosen.case).step, predict(second_row.case).step
    assert predict(chosen.case).step < fast < slow
    assert regret(score_rows([chosen, second_row]))["regret_seconds"] == pytest.approx(slow / fast - 1)


def test_a_choice_that_ran_out_of_memory_is_said() -> None:
    rows = [row(None, micro_batch="2"), row(1.0, act_ckpt="full"), row(1.1, act_ckpt="full", micro_batch="2")]
    assert regret(score_rows(rows)) == {"chosen_ran_out_of_memory": True}


def test_out_of_memory_is_counted_both_ways(tmp_path: Path) -> None:
    huge = {"micro_batch": "64", "global_batch_seqs": "512"}
    rows = [row(1.0), row(None), row(1.0, **huge), row(None, **huge)]
    counts = scored(tmp_path, rows)["made up"]["out_of_memory"]
    assert counts == {"fits_ok": 1, "fits_oom": 1, "refused_ok": 1, "refused_oom": 1, "right": 0.5}


def test_memory_is_compared_with_the_measured_peak(tmp_path: Path) -> None:
    plain = row(1.0)
    assert plain.case
    peak = counted(predict(plain.case).memory, plain.case.software) / 2**30 / 1.1
    summary = scored(tmp_path, [row(1.0, peak_memory_gib=repr(peak))])
    assert summary["made up"]["memory"]["mean"] == pytest.approx(0.1)


def test_predictions_are_written_beside_what_was_there(tmp_path: Path) -> None:
    source = table(tmp_path / "in.csv", [row(1.0, mystery="kept")], ({**ROW, "heads": ""},))
    printed = predict_file(source, str(tmp_path / "out.csv"))
    with open(tmp_path / "out.csv", newline="") as opened:
        first, second = csv.DictReader(opened)
    assert first["mystery"] == "kept"
    assert float(first["predicted_step_time_s"]) == pytest.approx(float(first["step_time_s"]), rel=1e-5)
    assert 0 < float(first["predicted_mfu_pct"]) < 100
    assert float(first["predicted_memory_gib"]) > 0
    assert (first["predicted_fits"], first["predicted_verdict"]) == ("1", "fits")
    assert float(first["predicted_low_s"]) < float(first["predicted_step_time_s"]) < float(first["predicted_high_s"])
    assert "(torchllm is not measured on A100" in first["predicted_note"]
    assert second["predicted_step_time_s"] == ""
    assert second["predicted_note"] == "heads is missing"
    assert "unscored: heads is missing (1 rows)" in printed


def test_spearman() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1.0)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)  # scipy.stats.spearmanr
    assert spearman([1, 2], [1, 2]) is None


def test_layers_are_timed_alone(tmp_path: Path) -> None:
    plain = read_row({**ROW, "grad_accum": ""})
    assert plain.case
    from torchllm.planner.evidence.layer import layer_seconds

    forward, backward = layer_seconds(plain.case)
    cells = {"layer_fwd_ms": repr(1e3 * forward / 1.1), "layer_bwd_ms": repr(1e3 * backward)}
    summary = scored(tmp_path, [read_row({**ROW, **cells})])["made up"]
    assert summary["layers"]["mean"] == pytest.approx(0.05)
    assert replace(plain.case).ranks == 8


def test_what_a_sweep_found_to_be_no_layout_is_left_out(tmp_path: Path) -> None:
    empty = dict.fromkeys(ROW, "") | {"status": "invalid"}
    file = table(tmp_path / "sweep.csv", [row(1.0)], (empty,))
    scored = json.loads(score_files([file], True))
    assert list(scored) == ["made up"]
    assert scored["made up"]["rows"] == 1
