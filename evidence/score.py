"""Compare predictions with measurements: errors, rank correlation, regret, out of memory. No torch.

An error is predicted over measured step time, minus one; `scaled` errors are after dividing by the data set's median
ratio. Among layouts with equal predictions, the one measured slowest counts as chosen. Each row is of one class,
and every line counts all three: scored, scored under a stated assumption, unscored with the reason.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from statistics import mean, median
from typing import Any, Literal, NamedTuple

from evidence.layer import layer_seconds
from evidence.measurements import MeasuredRow, read_rows
from evidence.peak import counted
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.tools.config.draft import override
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.config.toml_files import Layer
from torchllm.tools.planner.calibration.fit import UNITS
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.predict import Prediction, predict
from torchllm.tools.planner.search.question import BOUNDED, Restrictions
from torchllm.tools.planner.software import Constants
from torchllm.tools.planner.validity import memory_limit

RowClass = Literal["scored", "assumed", "unscored"]
"""scored; scored under a stated assumption; unscored, with the reason"""
MEASURED = ("model", "training", "parallel", "recompute")
"""sections of a config that a measurement has"""
CLASSES: tuple[RowClass, ...] = ("scored", "assumed", "unscored")
UNDER = {"scored": "nothing assumed", "assumed": "under a stated assumption"}
"""names of the lines that have the errors of one class alone"""


class Scored(NamedTuple):
    """A row and its prediction."""

    row: MeasuredRow
    prediction: Prediction | None

    @property
    def error(self) -> float | None:
        """Relative error of the step time; None if the row is not timed or not predicted."""
        if self.prediction is None or self.row.seconds is None:
            return None
        return self.prediction.step / self.row.seconds - 1

    @property
    def unscored(self) -> str:
        """Why the row is not scored; "" if it is."""
        cells = self.row.cells
        if self.row.problem:
            return self.row.problem
        if self.row.seconds is None and self.row.out_of_memory is None:
            return f"status {cells.get('status')!r} tells neither a time nor a lack of memory"
        return ""

    @property
    def row_class(self) -> RowClass:
        """The class of the row."""
        if self.unscored:
            return "unscored"
        return "assumed" if self.row.assumed else "scored"


def score_rows(rows: Iterable[MeasuredRow]) -> list[Scored]:
    """Predict each row."""
    return [Scored(row, None if row.case is None else predict(row.case)) for row in rows]


def admitted(restrictions: Restrictions) -> Callable[[Case], bool]:
    """Return a function that tells whether a measured run has the values of some keys, and keeps the bounds of others.

    UserError for a key that a measurement does not say.
    """
    layer = Layer({}, {})
    problems: list[str] = []
    for key, text in restrictions.overrides.items():
        section, *names = key.split(".")
        if section not in MEASURED or len(names) != 1:
            problems.append(f"--{key}: rows are chosen by keys of {', '.join(MEASURED)}: section.key")
        else:
            override(layer, Config, (section, *names), text, problems)
    faults: list[ConfigError] = []
    read_table(Config, layer.table, faults)
    problems += [f"--{fault.key}: {fault.message}" for fault in faults]
    if problems:
        raise UserError("\n".join(problems))
    wanted = {(section, key): value for section, keys in layer.table.items() for key, value in keys.items()}

    def admits(case: Case) -> bool:
        has_values = all(_value(case, *path) == value for path, value in wanted.items())
        return has_values and all(
            _value(case, *BOUNDED[name].split(".")) <= most for name, most in restrictions.most.items()
        )

    return admits


def _value(case: Case, section: str, key: str) -> Any:
    """Return the value of a key in a measured run."""
    return getattr(getattr(case, section), key)


def score_files(
    files: Sequence[str], as_json: bool, cluster: str = "", restrictions: Restrictions | None = None
) -> str:
    """Return the errors of every data set and every group in it, as text. Errors as `read_rows`.

    cluster: replaces the cluster of all rows. Layouts that a sweep found invalid are ignored, and those outside of
    the restrictions.
    """
    admit = admitted(restrictions or Restrictions())
    rows = []
    for file in files:
        rows += [row for row in read_rows(file, cluster) if row.cells.get("status") != "invalid"]
    rows = [row for row in rows if row.case is None or admit(row.case)]
    scored = score_rows(rows)
    sets = {}
    for name, of_set in _by(scored, "dataset").items():
        sets[name] = _summary(of_set) | _parts(of_set)
    if as_json:
        return json.dumps(sets, indent=1)
    lines = [_HEADER]
    for name, summary in sets.items():
        lines.append(_line(name, summary))
        for part in ("classes", "groups"):
            for title, part_summary in summary[part].items():
                lines.append(_line(f"  {title}", part_summary))
    lines += ["", *LEGEND]
    lines += ["", _share(scored)]
    lines += ["", *_constants(scored)]
    lines += ["", *_remarks(scored)]
    return "\n".join(lines)


def _share(scored: Sequence[Scored]) -> str:
    """Return a line that says how many of the timed rows are scored."""
    timed = [row for row in scored if row.row.seconds is not None]
    if not timed:
        return "no row is timed"
    counts = Counter(row.row_class for row in timed)
    unscored = counts["unscored"]
    share = 1 - unscored / len(timed)
    sentence = f"{share:.1%} of the {len(timed):,} timed rows are scored"
    classes = f"{counts['scored']:,}, and {counts['assumed']:,} under a stated assumption"
    return f"{sentence}: {classes}; {unscored:,} are not"


def _constants(scored: Sequence[Scored]) -> list[str]:
    """Return lines with the fitted constants of every framework in these rows."""
    constants = {}
    for row in scored:
        case = row.row.case
        if case is not None:
            stack = row.row.cells.get("stack", "")
            constants[stack or "-"] = case.software.constants
    titles = {}
    for field in fields(Constants):
        titles[field.name] = f"  {field.name}, {UNITS[field.name]}"
    lines = [f"{'constants':34s}" + "".join(titles.values())]
    for stack, values in constants.items():
        line = f"{stack:34s}"
        for name, title in titles.items():
            value = getattr(values, name)
            line += f"{value:{len(title)}.3g}"
        lines.append(line)
    return lines


def _remarks(scored: Sequence[Scored]) -> list[str]:
    """Return why rows are unscored, and the assumptions, each once with its number of rows."""
    counts: Counter[str] = Counter()
    for row in scored:
        if row.unscored:
            counts[f"unscored: {row.unscored}"] += 1
        else:
            counts.update(f"assumed: {assumption}" for assumption in row.row.assumed)
    return [f"{line} ({count} rows)" for line, count in counts.items()]


def _by(scored: Iterable[Scored], column: str) -> dict[str, list[Scored]]:
    groups: dict[str, list[Scored]] = {}
    for row in scored:
        name = row.row.cells.get(column, "") or "-"
        groups.setdefault(name, []).append(row)
    return groups


def _summary(scored: Sequence[Scored]) -> dict[str, Any]:
    """Return counts and errors of some rows; figures that none of them measured are missing."""
    counts = Counter(row.row_class for row in scored)
    timed = [row for row in scored if row.error is not None]
    summary: dict[str, Any] = {"rows": len(scored)}
    for row_class in CLASSES:
        summary[row_class] = counts[row_class]
    summary["timed"] = len(timed)
    if timed:
        summary |= _time_errors(timed)
    layer_errors: list[float] = []
    memory_errors: list[float] = []
    for row in scored:
        layer_errors += _layer_errors(row)
        memory_errors += _memory_errors(row)
    if layer_errors:
        summary["layers"] = _errors(layer_errors)
    if memory_errors:
        summary["memory"] = _errors(memory_errors)
    verdicts = _memory_verdicts(scored)
    if verdicts:
        summary["out_of_memory"] = verdicts
    return summary


def _parts(scored: Sequence[Scored]) -> dict[str, dict[str, Any]]:
    """Return the summaries of a data set's classes, if it has two that are scored, and of its groups."""
    of_class = _by_class(scored)
    classes = {}
    if of_class["scored"] and of_class["assumed"]:
        for row_class, title in UNDER.items():
            classes[title] = _summary(of_class[row_class])
    groups = {}
    for name, rows in _by(scored, "group").items():
        groups[name] = _summary(rows) | regret(rows)
    return {"classes": classes, "groups": groups}


def _by_class(scored: Iterable[Scored]) -> dict[str, list[Scored]]:
    groups: dict[str, list[Scored]] = {row_class: [] for row_class in CLASSES}
    for row in scored:
        groups[row.row_class].append(row)
    return groups


def _time_errors(timed: Sequence[Scored]) -> dict[str, Any]:
    """Return the errors of the step time: raw, after one factor for all rows, and of the order."""
    predicted, measured, ratios = [], [], []
    for row in timed:
        assert row.prediction is not None
        assert row.row.seconds is not None
        step, seconds = row.prediction.step, row.row.seconds
        predicted.append(step)
        measured.append(seconds)
        ratios.append(step / seconds)
    middle = median(ratios)
    summary: dict[str, Any] = _errors([ratio - 1 for ratio in ratios])
    scaled = _errors([ratio / middle - 1 for ratio in ratios])
    summary["scaled"] = {"factor": 1 / middle, **scaled}
    summary["spearman"] = spearman(predicted, measured)
    return summary


def _memory_errors(scored: Scored) -> list[float]:
    """Return the error of a row's peak of memory, if it has one."""
    peak = scored.row.cells.get("peak_memory_gib")
    if not peak or scored.prediction is None or scored.row.case is None:
        return []
    predicted = counted(scored.prediction.memory, scored.row.case.software)
    return [predicted / 2**30 / float(peak) - 1]


def _memory_verdicts(scored: Sequence[Scored]) -> dict[str, float]:
    """Count which rows were predicted to fit, and which ran out of memory; empty if no row tells."""
    verdicts = {"fits_ok": 0, "fits_oom": 0, "refused_ok": 0, "refused_oom": 0}
    for row in scored:
        if row.prediction is None or row.row.out_of_memory is None:
            continue
        admitted = "fits" if row.prediction.fits else "refused"
        outcome = "oom" if row.row.out_of_memory else "ok"
        verdicts[f"{admitted}_{outcome}"] += 1
    comparable = sum(verdicts.values())
    if not comparable:
        return {}
    right = verdicts["fits_ok"] + verdicts["refused_oom"]
    return {**verdicts, "right": right / comparable}


def _layer_errors(scored: Scored) -> list[float]:
    """Return the errors, forward and backward, of a row that times one layer (Korthikanti et al. 2022)."""
    cells = scored.row.cells
    if scored.row.case is None or not cells.get("layer_fwd_ms"):
        return []
    forward, backward = layer_seconds(scored.row.case)
    forward_error = 1e3 * forward / float(cells["layer_fwd_ms"]) - 1
    backward_error = 1e3 * backward / float(cells["layer_bwd_ms"]) - 1
    return [forward_error, backward_error]


def _errors(errors: Sequence[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    ninth = math.ceil(0.9 * len(sizes)) - 1
    return {"median": median(sizes), "mean": mean(sizes), "p90": sizes[ninth], "bias": mean(errors)}


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, ties at their mean rank; None for fewer than three values."""
    if len(first) < 3:
        return None
    middle = (len(first) + 1) / 2
    first_ranks = [rank - middle for rank in _ranks(first)]
    second_ranks = [rank - middle for rank in _ranks(second)]
    pairs = zip(first_ranks, second_ranks, strict=True)
    covariance = sum(x * y for x, y in pairs)
    first_variance = sum(rank**2 for rank in first_ranks)
    second_variance = sum(rank**2 for rank in second_ranks)
    deviations = math.sqrt(first_variance * second_variance)
    return covariance / deviations if deviations else None


def _ranks(values: Sequence[float]) -> list[float]:
    ranks: dict[float, list[int]] = {}
    for rank, value in enumerate(sorted(values), start=1):
        ranks.setdefault(value, []).append(rank)
    return [mean(ranks[value]) for value in values]


def regret(scored: Sequence[Scored]) -> dict[str, Any]:
    """Compare the layout that would be chosen with the best measured one, in time and MFU.

    Chosen is the one predicted fastest per sequence among those whose risk of running out of memory is as small as the
    risk of a pick of `recipes/plan.py rank`. The result says if it ran out of memory.
    """
    timed, admitted = [], []
    for row in scored:
        if row.prediction is None or not (row.row.seconds or row.row.out_of_memory):
            continue
        if row.row.seconds:
            timed.append(row)
        if row.row.case and row.prediction.memory.total <= memory_limit(row.row.case.hardware):
            admitted.append(row)
    if len(timed) < 2 or not admitted:
        return {}
    fastest = min(map(_predicted_seconds, admitted)) * (1 + 1e-9)
    ties = [row for row in admitted if _predicted_seconds(row) <= fastest]
    chosen = max(ties, key=_measured_seconds)
    if not chosen.row.seconds:
        return {"chosen_ran_out_of_memory": True}
    best = min(timed, key=_measured_seconds)
    slower = _measured_seconds(chosen) / _measured_seconds(best) - 1
    result: dict[str, Any] = {"chosen_ran_out_of_memory": False, "regret_seconds": slower}
    best_mfu = best.row.cells.get("mfu_pct")
    chosen_mfu = chosen.row.cells.get("mfu_pct")
    if best_mfu and chosen_mfu:
        result["regret_points"] = float(best_mfu) - float(chosen_mfu)
    return result


def _predicted_seconds(scored: Scored) -> float:
    """Return the predicted seconds per sequence."""
    assert scored.row.case is not None
    assert scored.prediction is not None
    return scored.prediction.step / scored.row.case.training.global_batch_size


def _measured_seconds(scored: Scored) -> float:
    """Return the measured seconds per sequence; infinitely many if the layout ran out of memory."""
    assert scored.row.case is not None
    if not scored.row.seconds:
        return math.inf
    return scored.row.seconds / scored.row.case.training.global_batch_size


_COLUMNS = ("rows", *CLASSES, "timed", "median", "mean", "p90", "bias", "scaled", "rho", "memory", "oom", "regret")
LEGEND = (
    "assumed: scored under an assumption that is stated below; unscored: for a reason that is stated below;",
    "median, mean, p90, bias: error of the step time, in % of the measured; scaled: mean error when the predictions",
    "of a data set are divided by their median ratio; rho: rank correlation; memory: mean error of the peak, in %;",
    "oom: % of rows that fit or ran out of memory as predicted; regret: % that the layout predicted fastest is slower",
    "than the one measured fastest",
)
"""legend of the columns"""
_HEADER = " " * 54 + "".join(f"{name:>9s}" for name in _COLUMNS)


def _line(name: str, summary: dict[str, Any]) -> str:
    """Return one line: errors, shares and regret in percent."""
    errors = summary if "mean" in summary else summary.get("layers", {})
    scaled = summary.get("scaled", {})
    memory = summary.get("memory", {})
    verdicts = summary.get("out_of_memory", {})
    rho = summary.get("spearman")
    slower = _percent(summary.get("regret_seconds"))
    cells = [str(summary[key]) for key in ("rows", *CLASSES, "timed")]
    cells += [_percent(errors.get(key)) for key in ("median", "mean", "p90", "bias")]
    cells.append(_percent(scaled.get("mean")))
    cells.append("-" if rho is None else f"{rho:.3f}")
    cells.append(_percent(memory.get("mean")))
    cells.append(_percent(verdicts.get("right")))
    cells.append("OOM" if summary.get("chosen_ran_out_of_memory") else slower)
    columns = "".join(f"{cell:>9s}" for cell in cells)
    return f"{name:54s}{columns}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
