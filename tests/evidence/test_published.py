"""The tables of published figures that come with torchllm: the errors on them are those that docs/planner.md prints."""

import functools
import itertools
import json
import re
from typing import Any

from evidence.measurements import MeasuredRow, read_rows
from evidence.pack import DATA, published_measurements
from evidence.score import score_files
from tests.evidence.tables import case_of
from tests.tiny_run import ROOT
from torchllm.tools.planner.predict import predict


@functools.cache
def scores() -> dict[str, Any]:
    """Return the scores of all tables, by data set."""
    scores_of_sets: dict[str, Any] = json.loads(score_files(published_measurements(), as_json=True))
    return scores_of_sets


def printed_errors() -> dict[str, list[str]]:
    """Return the cells of the table of docs/planner.md behind the name of a data set."""
    text = (ROOT / "docs/planner.md").read_text()
    table = text.partition("| set | rows | timed and scored |")[2].partition("\n\n")[0]
    errors = {}
    for line in table.splitlines()[2:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        errors[re.split("[, ]", name)[0]] = cells
    return errors


def test_errors_are_those_that_the_page_prints() -> None:
    """Of step times, or of layers where no step is timed, and of peaks of memory; in percent, to one decimal.

    Whoever changes the planner prints the table again: python -m evidence score.
    """
    printed = printed_errors()
    for name, summary in scores().items():
        if name == "megatron_bridge_skills":  # peaks alone
            continue
        rows, _, _, median, mean, ninth, bias, correlation, peak, right = printed[name]
        errors = summary if "mean" in summary else summary["layers"]
        assert summary["rows"] == int(rows), name
        shares = [errors[key] for key in ("median", "mean", "p90", "bias")]
        assert [f"{100 * share:.1f}" for share in shares] == [median, mean, ninth, bias], name
        assert f"{100 * summary['out_of_memory']['right']:.1f}" == right, name
        if correlation != "–":
            assert f"{summary['spearman']:.3f}" == correlation, name
        if peak != "–":
            assert f"{100 * summary['memory']['mean']:.1f}" == peak, name


def test_four_of_five_timed_rows_are_scored() -> None:
    timed_and_scored = sum(summary["timed"] for summary in scores().values())
    timed = sum(row.seconds is not None for file in published_measurements() for row in read_rows(file))
    assert timed > 1000
    assert timed_and_scored >= 0.8 * timed


def job_of(row: MeasuredRow) -> tuple[str, str]:
    """Return what the schedules that are compared with each other have in common."""
    return row.cells["group"], row.cells["grad_accum"]


def test_pipeline_schedules_come_in_their_measured_order() -> None:
    """Of every pair whose measured times differ by over 8 %, the faster is predicted faster (arXiv 2401.10241)."""
    rows = read_rows(str(DATA / "zero_bubble.csv"))
    compared = 0
    for fast, slow in itertools.permutations(rows, 2):
        assert fast.seconds
        assert slow.seconds
        if job_of(fast) == job_of(slow) and fast.seconds < 0.92 * slow.seconds:
            assert predict(case_of(fast)).step < predict(case_of(slow)).step, (fast.cells, slow.cells)
            compared += 1
    assert compared > 10
