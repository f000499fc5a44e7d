import threading
from pathlib import Path

import pytest

from torchllm.runtime.heartbeat import Timeout
from torchllm.tools.launch import hang_report
from torchllm.tools.launch.hang_report import (
    ROOT,
    RankDump,
    Standstill,
    blocked_operations,
    describe_hang,
    find_culprits,
    format_ranks,
    innermost_place,
    look_every_second,
    read_dump,
    read_slices,
    skipped_record,
    unfinished_records,
    write_slices,
)
from torchllm.tools.launch.torch_records import FlightRecord

NOW = 1_000_000_000_000
GROUPS = {"0": [0, 1, 2, 3], "a": [0, 1], "b": [2, 3], "pp": [1, 3]}
FOLDER = Path("runs/x/hang/time")


def collective(
    group: str, sequence: int, ago: float = 30, done: bool = False, name: str = "all_reduce", where: str = "x.py:1"
) -> FlightRecord:
    """A record of an operation that began `ago` seconds before the dump."""
    return FlightRecord(0, group, f"gloo:{name}", sequence, NOW - int(ago * 1e9), done, where)


def message(name: str, done: bool = False) -> FlightRecord:
    return collective("pp", 0, name=name, done=done)


def dump(rank: int, *records: FlightRecord, at: str = "y.py:9 in work", in_wait: bool = False) -> RankDump:
    """The dump of a rank whose main thread is at `at`."""
    groups = {name: write_slices(ranks) for name, ranks in GROUPS.items() if rank in ranks}
    stack = ["z.py:1 in main", at]
    return RankDump(rank, f"node{rank}", NOW, stack, in_wait, groups, list(records))


def report_lines(*dumps: RankDump, world_size: int = 4) -> list[str]:
    """The lines of the report but the first and the last, which are always the same."""
    lines = describe_hang(dumps, world_size, "node{}".format, Timeout(30.0, "run.timeout"), FOLDER).split("\n  ")
    assert lines[0] == "hang: ranks waited over 30 s (run.timeout) for other ranks; aborting"
    assert lines[-1] == f"every rank's stack and last operations: {FOLDER}"
    return lines[1:-1]


def culprits(*dumps: RankDump, world_size: int = 4) -> list[int]:
    return find_culprits(dumps, blocked_operations(dumps), world_size)


def test_the_rank_that_has_not_entered_is_named_with_the_operation_and_its_place() -> None:
    done = collective("0", 56, done=True)
    blocked = collective("0", 57, where=f"{ROOT}torchllm/optim/grad_norm.py:40")
    waiting = [dump(rank, done, blocked) for rank in (0, 1, 3)]
    absent = dump(2, done, at="/usr/lib/python3.11/socket.py:5 in recv")
    assert report_lines(*waiting, absent) == [
        "rank 2 (node2) has not entered gloo:all_reduce number 57 of ranks 0-3 (torchllm/optim/grad_norm.py:40); "
        "ranks 0-1, 3 have waited 30 s",
        "rank 2's main thread is at z.py:1 in main",
    ]


def test_the_steps_of_ranks_are_named_if_they_differ() -> None:
    waiting = [dump(rank, collective("0", 57))._replace(step=9 + rank // 3) for rank in range(4)]
    assert report_lines(*waiting)[-1] == "step 9: ranks 0-2; step 10: rank 3"
    assert not any("step" in line for line in report_lines(*waiting[:3]))


def test_a_rank_that_does_not_answer_is_named() -> None:
    waiting = [dump(rank, collective("0", 57)) for rank in (0, 1, 2)]
    assert report_lines(*waiting) == [
        "rank 3 (node3) has not entered gloo:all_reduce number 57 of ranks 0-3 (x.py:1); ranks 0-2 have waited 30 s",
        "rank 3 does not answer: its process has ended, is stopped, or is stuck outside Python",
    ]


def test_the_first_of_a_chain_is_named() -> None:
    """2 computes; 3 waits for it in their group, and so has not come to where 0 and 1 wait for both, for longer."""
    waiting_for_both = [dump(rank, collective("a", 9, done=True), collective("0", 5, ago=31)) for rank in (0, 1)]
    waiting_for_2 = dump(3, collective("0", 4, done=True), collective("b", 9))
    computing = dump(2, collective("0", 4, done=True), collective("b", 8, done=True))
    assert culprits(*waiting_for_both, computing, waiting_for_2) == [2]


def test_if_all_wait_the_rank_that_went_on_alone_is_named() -> None:
    waiting = [dump(rank, collective("0", 5)) for rank in (0, 1, 3)]
    alone = dump(2, collective("0", 4, done=True), collective("b", 9, ago=31, where="w.py:3"))
    assert culprits(*waiting, alone) == [2]
    assert report_lines(*waiting, alone)[1:] == [
        "rank 2's main thread is at y.py:9 in work",
        "rank 2 itself waits in gloo:all_reduce number 9 of ranks 2-3 (w.py:3)",
    ]


def test_two_ranks_that_wait_for_each_other_are_both_named() -> None:
    groups = {"a": "0:2:1", "pair": "0:2:1"}
    first = dump(0, collective("a", 5))._replace(groups=groups)
    second = dump(1, collective("pair", 8))._replace(groups=groups)
    assert culprits(first, second, world_size=2) == [0, 1]


def test_a_skipped_collective_is_found_though_its_rank_went_on_in_the_same_group() -> None:
    expected = [collective("0", number, where=f"x.py:{number}", done=number < 4) for number in (1, 2, 3, 4)]
    without_2 = [
        collective("0", 1, where="x.py:1", done=True),
        collective("0", 2, where="x.py:3", done=True),
        collective("0", 3, where="x.py:4", done=True),
    ]
    reference = dump(0, *expected)
    skipper = dump(2, *without_2)
    assert skipped_record(skipper, reference, "0") == expected[1]
    lines = report_lines(reference, dump(1, *expected), skipper, dump(3, *expected))
    assert lines[-1] == "rank 2 seems to have skipped number 2 of this group, gloo:all_reduce at x.py:2"


def test_another_branch_of_the_program_is_no_skipped_collective() -> None:
    expected = [collective("0", number, where=f"x.py:{number}") for number in (1, 2, 3, 4)]
    branch = [expected[0], collective("0", 2, where="y.py:1"), expected[2]]
    assert skipped_record(dump(2, *branch), dump(0, *expected), "0") is None
    assert skipped_record(dump(2, *expected[:3]), dump(0, *expected), "0") is None


def test_a_message_of_nccl_names_its_other_end() -> None:
    receiver = dump(3, message("recv 1<-0"), in_wait=True)
    assert report_lines(dump(0), dump(1, at="y.py:3 in step"), dump(2), receiver) == [
        "rank 1 (node1) has not answered gloo:recv 1<-0 of ranks 1, 3 (x.py:1); rank 3 has waited 30 s",
        "rank 1's main thread is at y.py:3 in step",
    ]


def test_a_message_of_gloo_has_no_record_but_the_rank_that_does_not_wait_is_named() -> None:
    waiting = [dump(rank, at=f"p.py:{rank} in recv", in_wait=True) for rank in (1, 2, 3)]
    assert report_lines(dump(0), *waiting) == [
        "rank 0 (node0) is not waiting for any rank",
        "rank 0's main thread is at y.py:9 in work",
        "ranks 1-3 waited for a message at p.py:1 in recv on rank 1",
    ]
    # Ranks 2 and 3 compute, but no rank waits for them.
    assert culprits(dump(0, collective("a", 3)), dump(1), dump(2), dump(3)) == [1]


def test_an_operation_that_all_have_entered_names_no_rank() -> None:
    assert report_lines(*(dump(rank, collective("0", 7)) for rank in range(4))) == [
        "all ranks of the group have entered gloo:all_reduce number 7 of ranks 0-3 (x.py:1), but it does not end: "
        "the network, or tensors of unequal sizes"
    ]


def test_the_parts_of_a_batch_are_done_when_it_is() -> None:
    parts = [message("send 0->1"), message("recv 0<-1")]
    assert unfinished_records([*parts, message("coalesced", done=True)]) == []
    assert unfinished_records([*parts, collective("0", 3, done=True)]) == parts
    assert unfinished_records([message("coalesced", done=True), *parts]) == parts


def test_many_ranks_are_few_lines() -> None:
    lines = report_lines(dump(0, collective("0", 3)), dump(1, collective("0", 3)), world_size=100)
    assert len(lines) == 9
    assert lines[-1] == "the same is true of ranks 6-99"


def test_format_ranks() -> None:
    for ranks, text in [
        ([], ""),
        ([3], "3"),
        ([2, 0, 1], "0-2"),
        ([0, 2, 3, 7], "0, 2-3, 7"),
        ([3, 11], "3, 11"),
        (range(3, 16384, 8), "3-16379 in steps of 8"),
        ([*range(0, 100, 3), 100], "0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45, … (35 ranks in all)"),
    ]:
        assert format_ranks(ranks) == text, ranks


def test_a_group_is_written_as_slices_in_its_order() -> None:
    for ranks, text in [
        ([], ""),
        ([7], "7:8:1"),
        (range(16384), "0:16384:1"),
        (range(5, 16384, 128), "5:16389:128"),
        ([0, 1, 2, 3, 8, 9, 10, 11], "0:4:1,8:12:1"),
        ([5, 0, 1, 2, 9], "5:-5:-5,1:3:1,9:10:1"),
    ]:
        assert write_slices(ranks) == text, ranks
        assert list(read_slices(text)) == list(ranks), ranks


def test_a_dump_is_read_as_written_and_shortened_by_group() -> None:
    whole = dump(1, collective("0", 1), collective("a", 1), collective("0", 2), collective("0", 3))
    assert read_dump(whole.json()) == whole
    assert [(record.group, record.sequence) for record in whole.recent(2).records] == [("a", 1), ("0", 2), ("0", 3)]


def test_time_in_which_the_watching_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `scontrol suspend`, which stops the ranks as well."""
    looks: list[float] = []
    clock = iter([0.0, 1.0, 1.0, 2.0, 2.0, 1000.0, 1300.0, 1301.0, 1301.0])  # the third look takes 300 s
    ended = threading.Event()

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 4:
            ended.set()

    monkeypatch.setattr(ended, "wait", lambda seconds: ended.is_set())
    monkeypatch.setattr(hang_report.time, "monotonic", lambda: next(clock))
    look_every_second(look, ended)
    assert looks == [1.0, 1.0, 2.0, 301.0]


def test_torchllm_itself_is_outside_of_pythons_library_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_report, "ROOT", "/v/lib/python3.12/site-packages/")
    packages = [f"/v/lib/python3.12/site-packages/{file}" for file in ("torch/nn/m.py:3 in f", "torchllm/x.py:2 in g")]
    assert innermost_place([*packages, "/home/me/fork.py:1 in main"]) == "torchllm/x.py:2 in g"


def test_a_standstill_counts_from_the_first_look_at_a_value() -> None:
    clock: Standstill[str] = Standstill()
    assert [clock.look(value, 2.0) for value in "aaabb"] == [0.0, 2.0, 4.0, 0.0, 2.0]
