"""Ask which layout of each published group would be picked, with constants not fitted to its fold. No torch.

A group is the layouts of one job. Of the layouts that `rank` may pick, one is predicted fastest: its regret is
its additional time over the fastest measured layout.
"""

import json
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from evidence.folds import fold_of, framework_of_fold, joint_problem, timed_rows
from evidence.measurements import MeasuredRow, read_rows
from evidence.score import Scored, regret
from torchllm.tools.planner.calibration.fit import Point, constants_at, fit, left_out_points, with_constants
from torchllm.tools.planner.predict import predict


class GroupPick(NamedTuple):
    """The pick of a group."""

    group: str
    rows: int
    error: float | None
    """mean error of the step; None: no row is timed"""
    told_right: int
    """rows that fit, or ran out of memory, as predicted"""
    comparable: int
    """rows with a prediction that are known to fit or to run out of memory"""
    ran_out_of_memory: bool
    """whether the pick did"""
    regret: float | None
    """relative slowdown of the pick against the fastest; None if it ran out of memory"""


def picks(rows: Sequence[MeasuredRow]) -> list[GroupPick]:
    """Return the picks of all groups whose layouts can be compared."""
    timed = timed_rows(rows)
    problem = joint_problem(timed)
    near = fit(problem)
    points = left_out_points(problem, near, [row.fold for row in timed])
    groups: dict[str, list[Scored]] = {}
    for row in rows:
        if row.case is not None:
            group = row.cells.get("group") or fold_of(row)
            groups.setdefault(group, []).append(scored_at(points.get(fold_of(row), near.point), row))
    results = []
    for group, scored in groups.items():
        pick = pick_of(group, scored)
        if pick is not None:
            results.append(pick)
    return results


def scored_at(point: Point, row: MeasuredRow) -> Scored:
    """Return a row with its prediction, with the constants of a point."""
    assert row.case is not None
    framework = framework_of_fold(fold_of(row))
    case = with_constants(row.case, constants_at(point, framework, row.case.software.constants))
    return Scored(row, predict(case))


def pick_of(group: str, scored: Sequence[Scored]) -> GroupPick | None:
    """Return the pick of a group; None if there is nothing to choose from."""
    chosen = regret(scored)
    if not chosen:
        return None
    errors = [abs(member.error) for member in scored if member.error is not None]
    tried = [member for member in scored if member.row.out_of_memory is not None and member.prediction is not None]
    told_right = 0
    for member in tried:
        assert member.prediction is not None
        told_right += member.prediction.fits != member.row.out_of_memory
    return GroupPick(
        group,
        len(scored),
        mean(errors) if errors else None,
        told_right,
        len(tried),
        chosen["chosen_ran_out_of_memory"],
        chosen.get("regret_seconds"),
    )


HEADER = f"{'group':54s}{'rows':>6s}{'error':>8s}{'oom told right':>16s}{'regret':>8s}"
LEGEND = (
    "each group's fold left out of the fit; error: mean of the step, in %; oom told right: % of rows; regret: % that",
    "the pick is slower than the fastest one measured, OOM if it ran out of memory",
)


def regret_lines(results: Sequence[GroupPick]) -> list[str]:
    """Return one line of text for each group, and one of all."""
    lines = [HEADER]
    for pick in results:
        error = "-" if pick.error is None else f"{100 * pick.error:.1f}"
        cost = "OOM" if pick.regret is None else f"{100 * pick.regret:.1f}"
        verdicts = f"{100 * pick.told_right / pick.comparable:.1f}"
        lines.append(f"{pick.group:54s}{pick.rows:6d}{error:>8s}{verdicts:>16s}{cost:>8s}")
    if not results:
        return lines
    comparable = sum(pick.comparable for pick in results)
    told_right = sum(pick.told_right for pick in results)
    regrets = [pick.regret for pick in results if pick.regret is not None]
    ran_out = sum(pick.ran_out_of_memory for pick in results)
    share = f"{100 * told_right / comparable:.1f}% of {comparable} rows"
    line = f"{len(results)} picks, {ran_out} out of memory; {share} told right"
    if regrets:
        line += f"; regret mean {100 * mean(regrets):.1f}%, worst {100 * max(regrets):.1f}%"
    return [*lines, line]


def score_picks(files: Sequence[str], as_json: bool) -> str:
    """Return the picks of the groups in some files, as text; takes minutes. Errors as `read_rows`."""
    rows: list[MeasuredRow] = []
    for file in files:
        rows += read_rows(file)
    results = picks(rows)
    if as_json:
        return json.dumps([pick._asdict() for pick in results], indent=1)
    return "\n".join([*regret_lines(results), "", *LEGEND])
