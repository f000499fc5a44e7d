from pathlib import Path

import pytest

from torchllm.runtime.hang_report import ROOT, Dump, culprits, read_dump, report, skipped, spans, unfinished, waits
from torchllm.runtime.torch_compat import FlightRecord

NOW = 1_000_000_000_000
GROUPS = {"0": [0, 1, 2, 3], "a": [0, 1], "b": [2, 3], "pp": [1, 3]}
FOLDER = Path("runs/x/hang/then")


def sent(
    group: str, sequence: int, ago: float = 30, done: bool = False, name: str = "all_reduce", where: str = "x.py:1"
) -> FlightRecord:
    return FlightRecord(0, group, f"gloo:{name}", sequence, NOW - int(ago * 1e9), done, where)


def dump(rank: int, *records: FlightRecord, at: str = "y.py:9 in work", in_wait: bool = False) -> Dump:
    groups = {name: ranks for name, ranks in GROUPS.items() if rank in ranks}
    return Dump(rank, f"node{rank}", NOW, ["z.py:1 in main", at], in_wait, groups, list(records))


def said(*dumps: Dump, world: int = 4) -> list[str]:
    """The lines between the first and the last, which are always the same."""
    lines = report(dumps, [f"node{rank}" for rank in range(world)], 30.0, FOLDER).split("\n  ")
    assert lines[0] == "the job hangs: ranks have waited for others for 30 s (run.timeout), and it is ended"
    assert lines[-1] == f"every rank's stack and last operations: {FOLDER}"
    return lines[1:-1]


def named(*dumps: Dump) -> list[int]:
    return culprits(dumps, waits(dumps), 4)


def test_who_has_not_entered_is_named_with_the_operation_and_its_place() -> None:
    place = f"{ROOT}torchllm/optim/grad_norm.py:40"
    others = [dump(rank, sent("0", 56, done=True), sent("0", 57, where=place)) for rank in (0, 1, 3)]
    assert said(*others, dump(2, sent("0", 56, done=True), at="/usr/lib/python3.11/socket.py:5 in recv")) == [
        "rank 2 (node2) has not entered gloo:all_reduce number 57 of ranks 0-3 (torchllm/optim/grad_norm.py:40); "
        "ranks 0-1, 3 have waited 30 s",
        "rank 2's main thread is at z.py:1 in main",
    ]


def test_a_rank_that_says_nothing_is_named() -> None:
    assert said(*(dump(rank, sent("0", 57)) for rank in (0, 1, 2))) == [
        "rank 3 (node3) has not entered gloo:all_reduce number 57 of ranks 0-3 (x.py:1); ranks 0-2 have waited 30 s",
        "rank 3 says nothing: its process has ended, is stopped, or is stuck outside Python",
    ]


def test_the_first_of_a_chain_is_named() -> None:
    """2 computes; 3 waits for it in their group, and so has not come to where 0 and 1 wait for both, for longer."""
    early = [dump(rank, sent("a", 9, done=True), sent("0", 5, ago=31)) for rank in (0, 1)]
    late = dump(3, sent("0", 4, done=True), sent("b", 9))
    assert named(*early, dump(2, sent("0", 4, done=True), sent("b", 8, done=True)), late) == [2]


def test_where_all_wait_the_one_that_went_on_alone_is_named() -> None:
    others = [dump(rank, sent("0", 5)) for rank in (0, 1, 3)]
    alone = dump(2, sent("0", 4, done=True), sent("b", 9, ago=31, where="w.py:3"))
    assert named(*others, alone) == [2]
    assert said(*others, alone)[1:] == [
        "rank 2's main thread is at y.py:9 in work",
        "rank 2 waits in gloo:all_reduce number 9 of ranks 2-3 (w.py:3) meanwhile",
    ]


def test_two_that_wait_for_each_other_are_both_named() -> None:
    one, other = dump(0, sent("a", 5)), dump(1, sent("pair", 8))
    groups = {"a": [0, 1], "pair": [0, 1]}
    pair = [one._replace(groups=groups), other._replace(groups=groups)]
    assert culprits(pair, waits(pair), 2) == [0, 1]


def test_what_a_rank_skipped_is_found_though_it_went_on_in_the_same_group() -> None:
    a, b, c = ({"where": f"x.py:{line}", "done": True} for line in (1, 2, 3))
    other = dump(0, sent("0", 1, **a), sent("0", 2, **b), sent("0", 3, **c), sent("0", 4, where="x.py:4"))
    skipper = dump(2, sent("0", 1, **a), sent("0", 2, **c), sent("0", 3, where="x.py:4", done=True))
    assert skipped(skipper, other, "0") == other.records[1]
    assert said(other, dump(1, *other.records), skipper, dump(3, *other.records))[-1] == (
        "rank 2 seems to have skipped number 2 of them, gloo:all_reduce at x.py:2"
    )
    # Another branch of the program, that counts alike.
    parted = dump(2, sent("0", 1, **a), sent("0", 2, where="y.py:1", done=True), sent("0", 3, **c))
    assert skipped(parted, other, "0") is None
    assert skipped(dump(2, *other.records[:3]), other, "0") is None


def test_a_message_of_nccl_names_its_other_end() -> None:
    receiver = dump(3, sent("pp", 0, name="recv 1<-0"), in_wait=True)
    assert said(dump(0), dump(1, at="y.py:3 in step"), dump(2), receiver) == [
        "rank 1 (node1) has not answered gloo:recv 1<-0 of ranks 1, 3 (x.py:1); rank 3 has waited 30 s",
        "rank 1's main thread is at y.py:3 in step",
    ]


def test_a_message_of_gloo_has_no_record_but_who_waits_for_nobody_is_named() -> None:
    waiting = [dump(rank, at=f"p.py:{rank} in recv", in_wait=True) for rank in (1, 2, 3)]
    assert said(dump(0), *waiting) == [
        "rank 0 (node0) waits for nobody",
        "rank 0's main thread is at y.py:9 in work",
        "ranks 1-3 waited for a message at p.py:1 in recv in rank 1",
    ]
    # Ranks 2 and 3 compute: nobody waits for them.
    assert named(dump(0, sent("a", 3)), dump(1), dump(2), dump(3)) == [1]


def test_what_all_have_entered_names_nobody() -> None:
    assert said(*(dump(rank, sent("0", 7)) for rank in range(4))) == [
        "all of the group have entered gloo:all_reduce number 7 of ranks 0-3 (x.py:1), which does not end: "
        "the network, or unequal sizes"
    ]


def test_the_parts_of_a_batch_are_done_when_it_is() -> None:
    parts = [sent("pp", 0, name="send 0->1"), sent("pp", 0, name="recv 0<-1")]
    assert unfinished([*parts, sent("pp", 0, name="coalesced", done=True)]) == []
    assert unfinished([*parts, sent("0", 3, done=True)]) == parts
    assert unfinished([sent("pp", 0, done=True), *parts]) == parts


def test_many_ranks_are_few_lines() -> None:
    lines = said(dump(0, sent("0", 3)), dump(1, sent("0", 3)), world=100)
    assert len(lines) == 9
    assert lines[-1] == "the same goes for ranks 6-99"


@pytest.mark.parametrize(("ranks", "text"), [([], ""), ([3], "3"), ([2, 0, 1], "0-2"), ([0, 2, 3, 7], "0, 2-3, 7")])
def test_spans(ranks: list[int], text: str) -> None:
    assert spans(ranks) == text


def test_a_dump_is_read_as_written_and_shortened_by_group() -> None:
    whole = dump(1, sent("0", 1), sent("a", 1), sent("0", 2), sent("0", 3))
    assert read_dump(whole.json()) == whole
    assert [(r.group, r.sequence) for r in whole.recent(2).records] == [("a", 1), ("0", 2), ("0", 3)]
