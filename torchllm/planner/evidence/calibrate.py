"""Fit a framework's six constants to measurements. No torch.

It minimizes the mean of |log(predicted / measured)|, smoothed near zero, plus a pull to the original constants, so that
few measurements move them little and a constant without effect stays. It is a descent by coordinates, in ever smaller
steps.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from torchllm.planner.case import Case
from torchllm.planner.evidence.measurements import MeasuredRow, cluster_of_row, read_rows
from torchllm.planner.predict import predict
from torchllm.resources import find_config, name_base
from torchllm.spec.cluster import FOLDER
from torchllm.spec.software import UNITS, Constants

PULL = 0.001
"""added to the error by a constant that has changed by a factor of e"""
KINK = 0.03
"""log of a ratio below which errors count by their square: a descent by coordinates gets stuck in kinks"""
STEPS = (2.0, 1024.0)
"""largest factors, each tried from the original: for constants nearby, or far off like a CPU's waits of milliseconds"""
TIMES = ("launch", "traffic", "exposed", "wait", "flush")
"""constants that affect step times; that of memory is fitted to peaks"""


def calibrate(rows: Sequence[MeasuredRow]) -> tuple[Constants, float, float]:
    """Return the fitted constants, and the mean error before and after. ValueError if no row is timed."""
    timed = [(row.case, row.seconds) for row in rows if row.case is not None and row.seconds]
    if not timed:
        raise ValueError("no row has a step time that can be predicted")
    before = timed[0][0].software.constants

    def logs(constants: Constants) -> list[float]:
        return [math.log(predict(with_constants(case, constants)).step / seconds) for case, seconds in timed]

    def error(constants: Constants) -> float:  # as `score` counts it
        return sum(abs(math.expm1(log)) for log in logs(constants)) / len(timed)

    def cost(constants: Constants) -> float:
        old, new = asdict(before), asdict(constants)
        rounded = sum(math.hypot(log, KINK) for log in logs(constants)) / len(timed)
        return rounded + PULL * sum(abs(math.log((new[key] + _TINY) / (old[key] + _TINY))) for key in TIMES)

    def descend(factor: float) -> Constants:
        now, least = before, cost(before)
        while factor > 1.01:
            start = least
            for key in TIMES:
                for by in (factor, 1 / factor):
                    while (new := cost(tried := _scaled(now, key, by))) < least - 1e-7:
                        least, now = new, tried
            if least > start - 1e-4:
                factor = math.sqrt(factor)
        return now

    now = min(map(descend, STEPS), key=cost)
    peaks = [
        (predict(row.case).memory, float(row.cells["peak_memory_gib"]) * 2**30)
        for row in rows
        if row.case is not None and row.cells.get("peak_memory_gib") and not row.case.software.peaks_allocated
    ]
    if peaks:
        ratios = sorted(1 + (peak - memory.live) / max(memory.under_way, 1.0) for memory, peak in peaks)
        now = replace(now, allocator=max(1.0, ratios[len(ratios) // 2]))
    return now, error(before), error(now)


_TINY = 1e-7


def _scaled(constants: Constants, key: str, by: float) -> Constants:
    value = getattr(constants, key) * by
    if key == "exposed":
        value = min(1.0, value)
    return replace(constants, **{key: max(value, _TINY)})


def with_constants(case: Case, constants: Constants) -> Case:
    """Return the case with other constants of its software."""
    return replace(case, software=replace(case.software, constants=constants))


def calibrate_file(source: str, target: str, cluster: str) -> str:
    """Fit constants to a CSV file and write a cluster file with them, based on `cluster`. Return a line on the errors.

    cluster: a name or a file; empty: the one that most rows name, or whose GPU they have. OSError or ValueError if
    there is no such file or cluster, or no row is timed.
    """
    rows = read_rows(source, cluster)
    constants, before, after = calibrate(rows)
    if not cluster:
        names = Counter(cluster_of_row(row.cells) for row in rows if row.case is not None)
        cluster = names.most_common(1)[0][0]
    base = Path(find_config(cluster)) if cluster.endswith(".toml") else FOLDER / f"{cluster}.toml"
    lines = [
        f"# {cluster} with the constants of torchllm fitted to {source}: mean error of a step {before:.1%} before,"
    ]
    lines += [f"# {after:.1%} after.", f'base = "{name_base(str(base), str(Path(target).parent))}"', "", "[constants]"]
    for key in fields(Constants):
        lines.append(f"{key.name} = {getattr(constants, key.name):.6g}  # {UNITS[key.name]}")
    Path(target).write_text("\n".join(lines) + "\n")
    return f"mean error of a step {before:.1%} before, {after:.1%} after; written to {target}"
