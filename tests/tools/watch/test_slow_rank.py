"""Which rank is slow."""

from collections.abc import Sequence
from statistics import median

import numpy as np
import pytest

from torchllm.tools.watch.breakdown import PARTS
from torchllm.tools.watch.slow_rank import (
    NOTICEABLE,
    SLOW,
    Reports,
    SlowRank,
    find_slow_rank,
    is_work,
    mean_parts,
    rank_report,
)

USUAL = {"forward": 0.3, "backward": 0.6, "exposed fsdp": 0.1, "data": 0.0, "checkpoint": 0.0}
"""seconds by part of a step"""
Parts = dict[str, float]


def reports_of(ranks: Sequence[Parts], groups: Sequence[int]) -> Reports:
    reports = []
    for rank, (parts, group) in enumerate(zip(ranks, groups, strict=True)):
        reports.append(rank_report(parts, group, f"host-{rank}", 0.0, 0.0, 0.0))
    return np.concatenate(reports)


def slow_rank(*ranks: Parts, peers: Sequence[int] = ()) -> SlowRank | None:
    """Whom parts of each rank that differ from the usual ones make slow; peers: group of each, by default one."""
    return find_slow_rank(reports_of([USUAL | parts for parts in ranks], peers or [0] * len(ranks)))


def test_a_rank_is_slow_if_it_works_longer_than_its_peers() -> None:
    assert slow_rank({}, {}, {}, {}) is None
    assert slow_rank({}, {}, {"forward": 0.8}, {}) == (2, "host-2", "forward", 0.8, 0.3)
    assert slow_rank({}, {"data": 0.9}) == (1, "host-1", "data", 0.9, 0.0)
    assert slow_rank({}, {"forward": 0.4}) is None  # 11 % more work
    assert slow_rank({}, {}, {"forward": 0.8}, {"forward": 1.8}) == (3, "host-3", "forward", 1.8, 0.3)


def test_a_rank_waits_for_others_or_saves_without_being_slow() -> None:
    assert slow_rank({}, {"exposed fsdp": 9.0}, {"checkpoint": 9.0}, {"bubble": 9.0}) is None


def slow_rank_by_definition(ranks: Sequence[Parts], groups: Sequence[int]) -> SlowRank | None:
    """The slow rank, in plain Python: each rank's peers, and their median, one after the other."""
    work = [sum(seconds for name, seconds in parts.items() if is_work(name)) for parts in ranks]
    slowest, longest_delay = None, 0.0
    for rank, parts in enumerate(ranks):
        peers = peers_of(rank, groups)
        if not peers:
            continue
        usual = median(work[peer] for peer in peers)
        delay = work[rank] - usual
        noticeable = delay > NOTICEABLE * sum(parts.values())
        if work[rank] > SLOW * usual and noticeable and delay > longest_delay:
            slowest, longest_delay = rank, delay
    if slowest is None:
        return None
    slow = None
    for name, seconds in ranks[slowest].items():
        if is_work(name):
            peer_seconds = median(ranks[peer].get(name, 0.0) for peer in peers_of(slowest, groups))
            if slow is None or seconds - peer_seconds > slow.seconds - slow.peer_seconds:
                slow = SlowRank(slowest, f"host-{slowest}", name, seconds, peer_seconds)
    return slow


def peers_of(rank: int, groups: Sequence[int]) -> list[int]:
    return [index for index, group in enumerate(groups) if index != rank and group == groups[rank]]


def random_ranks(seed: int) -> tuple[list[Parts], list[int]]:
    """Parts and peer groups of 1 to 24 ranks: some parts are missing, some ranks slow, some times the same."""
    generator = np.random.default_rng(seed)
    count = int(generator.integers(1, 25))
    ranks = []
    for _ in range(count):
        parts = {}
        slow = 10.0 if generator.random() < 0.1 else 1.0
        for name in PARTS:
            if generator.random() < 0.7:
                parts[name] = slow * float(generator.choice([0.0, 0.1, generator.random()]))
        ranks.append(parts)
    groups = generator.integers(0, generator.integers(1, 5), count).tolist()
    return ranks, groups


def test_the_conclusion_is_that_of_the_definition() -> None:
    slow_ranks = 0
    for seed in range(400):
        ranks, groups = random_ranks(seed)
        expected = slow_rank_by_definition(ranks, groups)
        slow = find_slow_rank(reports_of(ranks, groups))
        assert slow == pytest.approx(expected) if expected is None else slow is not None, seed
        if slow is not None and expected is not None:
            slow_ranks += 1
            assert slow[:3] == expected[:3], seed
            assert slow[3:] == pytest.approx(expected[3:]), seed
    assert slow_ranks > 100


def test_a_part_is_the_mean_over_all_ranks() -> None:
    reports = reports_of([{"forward": 1.0, "bubble": 0.5}, {"forward": 3.0}], [0, 0])
    assert mean_parts(reports) == {"forward": 2.0, "bubble": 0.25}
    assert mean_parts(reports[:0]) == {}
