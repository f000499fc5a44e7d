"""Compare predictions with measurements: errors, rank correlation, regret, out of memory. No torch.

An error is predicted over measured step time, minus one; `scaled` errors are after dividing by the data set's median
ratio. Of layouts predicted alike, the one measured slowest counts as chosen. Each row is of one class, and every line
counts all three: scored, scored under a stated assumption, unscored with the reason.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from statistics import mean, median
from typing import Any, Literal, NamedTuple

from torchllm.planner.evidence.layer import layer_seconds
from torchllm.planner.evidence.measurements import MeasuredRow, read_rows
from torchllm.planner.memory import counted
from torchllm.planner.predict import Prediction, predict
from torchllm.planner.search.validity import Verdict, judge
from torchllm.spec.software import UNITS, Constants

RowClass = Literal["scored", "assumed", "unscored"]
"""scored; scored under a stated assumption; unscored, with the reason"""
CLASSES: tuple[RowClass, ...] = ("scored", "assumed", "unscored")
UNDER = {"scored": "nothing assumed", "assumed": "under a stated assumption"}
"""names of the lines that have the errors of one class alone"""


class Scored(NamedTuple):
    """A row and its prediction."""

    row: MeasuredRow
    prediction: Prediction | None
    verdict: Verdict | None

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
    found = []
    for row in rows:
        prediction = predict(row.case) if row.case is not None else None
        found.append(Scored(row, prediction, judge(row.case, prediction) if row.case and prediction else None))
    return found


def predict_file(source: str, target: str) -> str:
    """Write a table of layouts with their predictions; return what was assumed, as text. Errors as `read_rows`."""
    scored = score_rows(read_rows(source))
    names = list(dict.fromkeys([*(name for one in scored for name in one.row.cells), *PREDICTED]))
    with open(target, "w", newline="") as opened:
        writer = csv.DictWriter(opened, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**one.row.cells, **_predicted(one)} for one in scored)
    return "\n".join(_said(scored))


PREDICTED = tuple(
    f"predicted_{name}"
    for name in ("step_time_s", "low_s", "high_s", "mfu_pct", "hfu_pct", "memory_gib", "fits", "verdict", "note")
)
"""columns that `predict_file` adds: the step and its interval, utilisation, memory, 1 if it fits, how surely, and what
was assumed or why there is no prediction"""


def _predicted(one: Scored) -> dict[str, str]:
    row, prediction, verdict = one.row, one.prediction, one.verdict
    if row.case is None or prediction is None or verdict is None:
        return {"predicted_note": row.problem}
    low, high = verdict.seconds
    values = (
        *(f"{seconds:.6g}" for seconds in (prediction.step, low, high)),
        *(f"{100 * share:.2f}" for share in (prediction.mfu, prediction.hfu)),
        f"{counted(prediction.memory, row.case.software) / 2**30:.1f}",
        str(int(prediction.fits)),
        verdict.fits,
        "; ".join([verdict.evidence, *row.assumed]),
    )
    return dict(zip(PREDICTED, values, strict=True))


def score_files(files: Sequence[str], as_json: bool, cluster: str = "") -> str:
    """Return the errors of every data set and every group in it, as text. Errors as `read_rows`.

    cluster: replaces the cluster of all rows. Layouts that a sweep found invalid are ignored.
    """
    rows = []
    for file in files:
        rows += [row for row in read_rows(file, cluster) if row.cells.get("status") != "invalid"]
    scored = score_rows(rows)
    sets = {}
    for name, of_set in _by(scored, "dataset").items():
        sets[name] = {**_summary(of_set), **_parts(of_set)}
    if as_json:
        return json.dumps(sets, indent=1)
    lines = [_HEADER]
    for name, summary in sets.items():
        lines.append(_line(name, summary))
        for part in ("classes", "groups"):
            lines += [_line("  " + inner, of) for inner, of in summary[part].items()]
    return "\n".join([*lines, "", *LEGEND, "", _share(scored), "", *_constants(scored), "", *_said(scored)])


def _share(scored: Sequence[Scored]) -> str:
    """Return a line that says how many of the timed rows are scored."""
    timed = [one for one in scored if one.row.seconds is not None]
    if not timed:
        return "no row is timed"
    counts = Counter(one.row_class for one in timed)
    share = 1 - counts["unscored"] / len(timed)
    return (
        f"{share:.1%} of the {len(timed):,} timed rows are scored: {counts['scored']:,}, and {counts['assumed']:,} "
        f"under a stated assumption; {counts['unscored']:,} are not"
    )


def _constants(scored: Sequence[Scored]) -> list[str]:
    """Return lines with the fitted constants of every framework in these rows."""
    software = {one.row.cells.get("stack", "") or "-": one.row.case.software for one in scored if one.row.case}
    names = [key.name for key in fields(Constants)]
    titles = [f"  {name}, {UNITS[name]}" for name in names]
    lines = [f"{'constants':34s}" + "".join(titles)]
    for stack, of in software.items():
        values = [f"{getattr(of.constants, name):{len(title)}.3g}" for name, title in zip(names, titles, strict=True)]
        lines.append(f"{stack:34s}" + "".join(values))
    return lines


def _said(scored: Sequence[Scored]) -> list[str]:
    """Return why rows are unscored and what was assumed, each once with its number of rows."""
    counts: Counter[str] = Counter()
    for one in scored:
        if one.unscored:
            counts[f"unscored: {one.unscored}"] += 1
        else:
            counts.update(f"assumed: {what}" for what in one.row.assumed)
    return [f"{line} ({count} rows)" for line, count in counts.items()]


def _by(scored: Iterable[Scored], key: str) -> dict[str, list[Scored]]:
    found: dict[str, list[Scored]] = {}
    for one in scored:
        found.setdefault(one.row.cells.get(key, "") or "-", []).append(one)
    return found


def _summary(scored: Sequence[Scored]) -> dict[str, Any]:
    """Return counts and errors of some rows; what none of them measured is missing."""
    counts = Counter(one.row_class for one in scored)
    timed = [one for one in scored if one.error is not None]
    summary: dict[str, Any] = {"rows": len(scored)}
    for row_class in CLASSES:
        summary[row_class] = counts[row_class]
    summary["timed"] = len(timed)
    if timed:
        summary |= _time_errors(timed)
    layer_errors: list[float] = []
    memory_errors: list[float] = []
    for one in scored:
        layer_errors += _layer_errors(one)
        memory_errors += _memory_errors(one)
    if layer_errors:
        summary["layers"] = _errors(layer_errors)
    if memory_errors:
        summary["memory"] = _errors(memory_errors)
    known = [one for one in scored if one.prediction and one.row.out_of_memory is not None]
    if known:
        summary["out_of_memory"] = _memory_verdicts(known)
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
        groups[name] = {**_summary(rows), **regret(rows)}
    return {"classes": classes, "groups": groups}


def _by_class(scored: Iterable[Scored]) -> dict[str, list[Scored]]:
    found: dict[str, list[Scored]] = {row_class: [] for row_class in CLASSES}
    for one in scored:
        found[one.row_class].append(one)
    return found


def _time_errors(timed: Sequence[Scored]) -> dict[str, Any]:
    """Return the errors of the step time: raw, after one factor for all rows, and of the order."""
    predicted, measured = [], []
    for one in timed:
        assert one.prediction is not None
        assert one.row.seconds is not None
        predicted.append(one.prediction.step)
        measured.append(one.row.seconds)
    ratios = [mine / its for mine, its in zip(predicted, measured, strict=True)]
    middle = median(ratios)
    scaled = _errors([ratio / middle - 1 for ratio in ratios])
    return {
        **_errors([ratio - 1 for ratio in ratios]),
        "scaled": {"factor": 1 / middle, **scaled},
        "spearman": spearman(predicted, measured),
    }


def _memory_errors(one: Scored) -> list[float]:
    """Return the error of a row's peak of memory, if it has one."""
    peak = one.row.cells.get("peak_memory_gib")
    if not peak or one.prediction is None or one.row.case is None:
        return []
    predicted = counted(one.prediction.memory, one.row.case.software)
    return [predicted / 2**30 / float(peak) - 1]


def _memory_verdicts(known: Sequence[Scored]) -> dict[str, float]:
    """Count which rows were predicted to fit, and which ran out of memory."""
    verdicts = {"fits_ok": 0, "fits_oom": 0, "refused_ok": 0, "refused_oom": 0}
    for one in known:
        admitted = "fits" if one.prediction and one.prediction.fits else "refused"
        outcome = "oom" if one.row.out_of_memory else "ok"
        verdicts[f"{admitted}_{outcome}"] += 1
    right = verdicts["fits_ok"] + verdicts["refused_oom"]
    return {**verdicts, "right": right / len(known)}


def _layer_errors(one: Scored) -> list[float]:
    """Return the errors, forward and backward, of a row that times one layer (Korthikanti et al. 2022)."""
    cells = one.row.cells
    if one.row.case is None or not cells.get("layer_fwd_ms"):
        return []
    forward, backward = layer_seconds(one.row.case)
    return [1e3 * forward / float(cells["layer_fwd_ms"]) - 1, 1e3 * backward / float(cells["layer_bwd_ms"]) - 1]


def _errors(errors: Sequence[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    return {
        "median": median(sizes),
        "mean": mean(sizes),
        "p90": sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)],
        "bias": mean(errors),
    }


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, ties at their mean rank; None for fewer than three values."""
    if len(one) < 3:
        return None
    a, b = _ranks(one), _ranks(other)
    middle = (len(a) + 1) / 2
    above = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    below = math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))
    return above / below if below else None


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values), start=1):
        places.setdefault(value, []).append(place)
    return [mean(places[value]) for value in values]


def regret(scored: Sequence[Scored]) -> dict[str, Any]:
    """Compare the layout that would be chosen with the best measured one, in time and MFU.

    Chosen is the one predicted fastest per sequence among those predicted to fit. The result says if it ran out of
    memory.
    """
    known = [one for one in scored if one.prediction and (one.row.seconds or one.row.out_of_memory)]
    timed = [one for one in known if one.row.seconds]
    admitted = [one for one in known if one.prediction and one.prediction.fits]
    if len(timed) < 2 or not admitted:
        return {}

    def per_sequence(one: Scored, seconds: float) -> float:
        assert one.row.case is not None
        return seconds / one.row.case.training.global_batch_size

    def predicted(one: Scored) -> float:
        return per_sequence(one, one.prediction.step if one.prediction else math.inf)

    def measured(one: Scored) -> float:
        return per_sequence(one, one.row.seconds) if one.row.seconds else math.inf

    least = min(map(predicted, admitted))
    chosen = max((one for one in admitted if predicted(one) <= least * (1 + 1e-9)), key=measured)
    if not chosen.row.seconds:
        return {"chosen_ran_out_of_memory": True}
    best = min(timed, key=measured)
    found: dict[str, Any] = {"chosen_ran_out_of_memory": False, "regret_seconds": measured(chosen) / measured(best) - 1}
    if best.row.cells.get("mfu_pct") and chosen.row.cells.get("mfu_pct"):
        found["regret_points"] = float(best.row.cells["mfu_pct"]) - float(chosen.row.cells["mfu_pct"])
    return found


_COLUMNS = ("rows", *CLASSES, "timed", "median", "mean", "p90", "bias", "scaled", "rho", "memory", "oom", "regret")
LEGEND = (
    "assumed: scored under an assumption that is stated below; unscored: for a reason that is stated below;",
    "median, mean, p90, bias: error of the step time, in % of the measured; scaled: mean error when the predictions",
    "of a data set are divided by their median ratio; rho: rank correlation; memory: mean error of the peak, in %;",
    "oom: % of rows that fit or ran out of memory as predicted; regret: % that the layout predicted fastest is slower",
    "than the one measured fastest",
)
"""what the columns say"""
_HEADER = " " * 54 + "".join(f"{name:>9s}" for name in _COLUMNS)


def _line(name: str, of: dict[str, Any]) -> str:
    """Return one line: errors, shares and regret in percent."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    errors = of if "mean" in of else of.get("layers", {})
    rho = of.get("spearman")
    cells = [
        *(str(of[key]) for key in ("rows", *CLASSES, "timed")),
        *(percent(errors.get(key)) for key in ("median", "mean", "p90", "bias")),
    ]
    cells += [percent(of.get("scaled", {}).get("mean")), "-" if rho is None else f"{rho:.3f}"]
    cells += [percent(of.get("memory", {}).get("mean")), percent(of.get("out_of_memory", {}).get("right"))]
    cells.append("OOM" if of.get("chosen_ran_out_of_memory") else percent(of.get("regret_seconds")))
    return f"{name:54s}" + "".join(f"{cell:>9s}" for cell in cells)
