"""Which rank of a profiled step is slow: it works, rather than waits for others, much longer than its peers.

The peers of a rank hold the same pipeline stages. Time and memory grow with the number of ranks, not with its square:
at 16,384 ranks a conclusion takes some milliseconds.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchllm.tools.watch.breakdown import PARTS

SLOW = 1.25
"""a slow rank works this many times as long as its peers"""
NOTICEABLE = 0.05
"""delays below this share of a step are ignored"""
REPORT = np.dtype(
    [
        ("parts", np.float64, len(PARTS)),  # seconds by part of the step; NaN for a part that the rank does not have
        ("peer_group", np.int64),  # ranks with the same number do the same work
        ("cost", np.float64),  # seconds that the step took longer than an unprofiled one, reading the profile included
        ("usual", np.float64),  # seconds of an unprofiled step
        ("exchange", np.float64),  # seconds from the report of the profiled step before to the conclusion from it
        ("host", "S64"),  # Linux allows 64 bytes
    ]
)
"""a rank's report on its profiled step; all ranks' reports are one array, by rank"""

Reports = npt.NDArray[np.void]


class SlowRank(NamedTuple):
    """A rank that holds up others."""

    rank: int
    host: str
    part: str
    """the part of the step where it loses most"""
    seconds: float
    """of that part"""
    peer_seconds: float
    """of that part, the median of its peers"""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.host}) is slow: {self.part} takes {self.seconds:.3g} s, "
            f"{self.peer_seconds:.3g} s on its peers"
        )


def is_work(part: str) -> bool:
    """Whether a rank's own doing decides how long a part takes; its data loader is its own."""
    return not part.startswith(("exposed", "bubble")) and part not in ("evaluate", "checkpoint")


WORK = np.array([is_work(part) for part in PARTS])
"""whether each of `PARTS` is work"""


def rank_report(
    parts: Mapping[str, float], peer_group: int, host: str, cost: float, usual: float, exchange: float
) -> Reports:
    """Return the report of one rank, as `REPORT` describes it; an array of one element."""
    seconds = [parts.get(name, np.nan) for name in PARTS]
    return np.array([(seconds, peer_group, cost, usual, exchange, host.encode()[:64])], dtype=REPORT)


def find_slow_rank(reports: Reports) -> SlowRank | None:
    """Return the rank that works longest in comparison with its peers, if it is slow; reports: of all ranks."""
    seconds = np.nan_to_num(reports["parts"])  # (ranks, parts)
    work = seconds[:, WORK].sum(axis=1)
    usual = medians_of_peers(work, reports["peer_group"])
    delays = work - usual
    step_seconds = seconds.sum(axis=1)
    delays[~(work > SLOW * usual)] = 0.0  # of a rank without peers too, whose usual time is NaN
    delays[delays <= NOTICEABLE * step_seconds] = 0.0
    rank = int(np.argmax(delays))
    return slow_rank(rank, reports) if delays[rank] > 0 else None


def slow_rank(rank: int, reports: Reports) -> SlowRank:
    """Return which part makes a rank slower than its peers; reports: of all ranks."""
    groups = reports["peer_group"]
    are_peers = groups == groups[rank]
    are_peers[rank] = False
    peer_parts = np.nan_to_num(reports["parts"][are_peers])
    peer_seconds = np.median(peer_parts, axis=0)
    seconds = reports["parts"][rank]
    lost = seconds - peer_seconds  # NaN for a part that the rank does not have
    lost[~WORK] = np.nan
    part = int(np.nanargmax(lost))
    return SlowRank(
        rank=rank,
        host=bytes(reports["host"][rank]).decode(),
        part=PARTS[part],
        seconds=float(seconds[part]),
        peer_seconds=float(peer_seconds[part]),
    )


def medians_of_peers(values: npt.NDArray[np.float64], groups: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return for each rank the median of the values of the other ranks of its group; NaN if it is alone there.

    Each group is sorted once. Without one of its members it is in the same order, so the middle of a member's peers is
    the middle of the group or the place next to it.
    """
    medians = np.full(len(values), np.nan)
    for group in np.unique(groups):
        ranks = np.flatnonzero(groups == group)
        ranks = ranks[np.argsort(values[ranks])]
        peers = len(ranks) - 1
        if peers:
            position = np.arange(len(ranks))  # of each rank in its group
            lower, upper = (peers - 1) // 2, peers // 2
            lower_peer = ranks[lower + (lower >= position)]
            upper_peer = ranks[upper + (upper >= position)]
            medians[ranks] = (values[lower_peer] + values[upper_peer]) / 2
    return medians


def ranks_with_parts(reports: Reports) -> npt.NDArray[np.bool_]:
    """Return which ranks know the parts of their step, (ranks): a GPU's events may be missing."""
    are_known: npt.NDArray[np.bool_] = ~np.isnan(reports["parts"]).all(axis=1)
    return are_known


def mean_parts(reports: Reports) -> dict[str, float]:
    """Return the mean over ranks of each part that a rank has.

    A rank that lacks a part spent no time on it. reports: of the ranks that know their parts; there may be none.
    """
    known = [(name, part) for name, part in zip(PARTS, reports["parts"].T, strict=True) if not np.isnan(part).all()]
    return {name: float(np.nan_to_num(seconds).mean()) for name, seconds in known}
