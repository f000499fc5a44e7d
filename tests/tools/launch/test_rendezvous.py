"""Launchers of several nodes, as threads of this process: what they agree on at each attempt."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import get_args

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.store import barrier

from tests.patience import patience
from tests.tiny_run import free_port
from torchllm.config.environment import ATTEMPT, LAUNCHED
from torchllm.runtime import launcher_notes
from torchllm.tools.launch import rendezvous
from torchllm.tools.launch.head import HeadAddress, publish_head
from torchllm.tools.launch.node_watch import NodeWatch
from torchllm.tools.launch.rendezvous import BACKEND, AttemptOver, AttemptRendezvous, Decide, describe_end
from torchllm.tools.launch.restarts import PartEnding, Verdict


def together(action: Callable[..., object], items: object) -> list:
    """Return the results of one call per item, all at the same time."""
    items = list(items)
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(action, items))


def begin(node: AttemptRendezvous) -> RendezvousInfo:
    return node.next_rendezvous()


def ask_for_ever(node: AttemptRendezvous) -> None:
    while True:
        node.num_nodes_waiting()


@pytest.fixture
def open_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[AttemptRendezvous]]]:
    """Returns the rendezvous of each node's launcher, that of node 0 first; they end as they should."""
    opened: list[AttemptRendezvous] = []

    monkeypatch.setenv(LAUNCHED, "1000.0")  # a later attempt changes it
    monkeypatch.setenv(ATTEMPT, "1")  # and this
    monkeypatch.delenv(ATTEMPT)
    monkeypatch.delenv(launcher_notes.FOLDER, raising=False)

    def open_all(nodes: int) -> list[AttemptRendezvous]:
        port = free_port()

        def open_node(node: int) -> AttemptRendezvous:
            parameters = RendezvousParameters(BACKEND, f"127.0.0.1:{port}", "job", nodes, nodes, rank=str(node))
            return AttemptRendezvous(parameters, start_timeout=patience(60))

        launchers = together(open_node, range(nodes))
        opened.extend(launchers)
        return launchers

    yield open_all
    for launcher in opened:
        launcher.close(is_done=True)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers look at what the others do whenever they are asked."""
    monkeypatch.setattr(rendezvous, "CHECK_INTERVAL", 0.0)


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_attempt_has_a_store_of_its_own(open_nodes: Callable[[int], list[AttemptRendezvous]], nodes: int) -> None:
    launchers = open_nodes(nodes)
    first = together(begin, launchers)
    assert os.environ[LAUNCHED] == "1000.0"
    assert ATTEMPT not in os.environ
    for node, info in enumerate(first):
        assert (info.rank, info.world_size) == (node, nodes)
        assert info.bootstrap_store_info == first[0].bootstrap_store_info
        info.store.set(f"hang_watch/alarm/{node}", "of the first attempt")
        first[0].store.wait([f"hang_watch/alarm/{node}"])
    second = together(begin, launchers)
    ports = {info.bootstrap_store_info.master_port for info in [*first, *second]}
    assert len(ports) == 2
    assert second[-1].store.num_keys() <= 1  # torch's own
    assert float(os.environ[LAUNCHED]) > 1000
    assert os.environ[ATTEMPT] == "2"


def decide_to(verdict: Verdict, seen: list[object]) -> Decide:
    """Return what node 0 decides; it notes what it is given."""

    def decide(endings: Sequence[PartEnding], first: int) -> Verdict:
        seen.append((list(endings), first))
        return verdict

    return decide


KILLED = PartEnding("failed", 1, -9, "host-1")
AT_NIGHT = [
    pytest.param(verdict, marks=pytest.mark.exhaustive) for verdict in get_args(Verdict) if verdict != "restart"
]


@pytest.mark.parametrize("verdict", ["restart", *AT_NIGHT])
def test_a_part_that_fails_ends_the_attempt_and_node_0_decides_what_follows(
    open_nodes: Callable[[int], list[AttemptRendezvous]], eager: None, verdict: Verdict
) -> None:
    launchers = open_nodes(3)
    together(begin, launchers)
    seen: list[object] = []
    assert [node.num_nodes_waiting() for node in launchers] == [0, 0, 0]
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(launchers[1].agree, KILLED, decide_to("end", seen))
        for node in (launchers[0], launchers[2]):
            with pytest.raises(AttemptOver):
                ask_for_ever(node)
        stopped = PartEnding("stopped")
        verdicts = together(lambda node: node.agree(stopped, decide_to(verdict, seen)), [launchers[0], launchers[2]])
        assert [*verdicts, failed.result()] == [verdict] * 3
    assert seen == [([stopped, KILLED, stopped], 1)]
    assert [node.first_to_fail for node in launchers] == [1, 1, 1]
    together(begin, launchers)
    assert [node.num_nodes_waiting() for node in launchers] == [0, 0, 0]


def test_what_a_stranger_writes_ends_no_attempt_otherwise(
    open_nodes: Callable[[int], list[AttemptRendezvous]], eager: None
) -> None:
    launchers = open_nodes(2)
    together(begin, launchers)
    store = launchers[1].launchers
    assert store is not None
    store.set("attempt_1/failed", "../..")
    store.set("attempt_1/ending_1", "\x1b[2J 1 2 3")
    store.set("attempt_1/verdict", "rm -rf")
    seen: list[object] = []
    assert launchers[1].agree(KILLED, decide_to("restart", seen)) == "end"
    store.set("attempt_1/ending_1", "\x1b[2J 1 2 3")
    assert launchers[0].agree(PartEnding("stopped"), decide_to("restart", seen)) == "restart"
    assert seen == [([PartEnding("stopped"), PartEnding("stopped")], 0)]


def test_a_node_that_does_not_end_its_part_is_named(
    open_nodes: Callable[[int], list[AttemptRendezvous]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE", timedelta(seconds=0.3))
    launchers = open_nodes(2)
    together(begin, launchers)
    with pytest.raises(RendezvousTimeoutError, match="node 1 does not answer"):
        launchers[0].agree(KILLED, decide_to("restart", []))


def test_nodes_whose_ranks_are_done_wait_for_the_others_unless_the_attempt_is_over(
    open_nodes: Callable[[int], list[AttemptRendezvous]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own wait takes no notice of the others for five minutes."""
    monkeypatch.setattr(rendezvous, "CHECK_INTERVAL", 0.1)
    launchers = open_nodes(2)
    infos = together(begin, launchers)
    with ThreadPoolExecutor(3) as pool:
        waits = pool.submit(barrier, infos[1].store, 2, "done")
        time.sleep(0.3)
        assert not waits.done()
        barrier(infos[0].store, 2, "done")
        waits.result(patience(30))
        waits = pool.submit(barrier, infos[1].store, 2, "done again")
        agreed = pool.submit(launchers[0].agree, KILLED, decide_to("restart", []))
        waits.result(patience(30))
        assert isinstance(launchers[1].find_end(), AttemptOver)
        assert launchers[1].agree(PartEnding("stopped"), decide_to("end", [])) == agreed.result() == "restart"


def test_a_launcher_that_is_killed_ends_the_others(
    open_nodes: Callable[[int], list[AttemptRendezvous]], eager: None
) -> None:
    launchers = open_nodes(3)
    together(begin, launchers)
    assert [node.num_nodes_waiting() for node in launchers] == [0, 0, 0]
    assert launchers[2].connection is not None
    launchers[2].connection.socket.close()  # what the kernel does for a killed process
    for node in launchers[:2]:
        with pytest.raises(RendezvousClosedError, match="the launcher of node 2 was killed"):
            ask_for_ever(node)


def parameters_of(node: int, port: int) -> RendezvousParameters:
    return RendezvousParameters(BACKEND, f"127.0.0.1:{port}", "70123.0.0", 2, 2, rank=str(node))


def test_nodes_find_each_other_by_the_run_folder_where_no_port_is_given(tmp_path: Path) -> None:
    """The file of an earlier job is still there, and its port belongs to somebody else."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        publish_head(tmp_path, "70123.0.9", HeadAddress("127.0.0.1", stranger.getsockname()[1]))
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(AttemptRendezvous, parameters_of(1, 0), patience(60), tmp_path)
            time.sleep(0.2)
            nodes = [AttemptRendezvous(parameters_of(0, 0), patience(60), tmp_path), second.result()]
        stores = [info.store for info in together(begin, nodes)]
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"
    for node in nodes:
        node.close(is_done=True)


def test_nodes_that_do_not_meet_are_told_for_whom_they_have_waited(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(RendezvousConnectionError, match=rf"for node 0 at 127.0.0.1:{port} \(.*refused\)"):
        AttemptRendezvous(parameters_of(1, port), 0.1)
    with pytest.raises(RendezvousConnectionError, match=f"for node 0 to write {tmp_path}/head.json"):
        AttemptRendezvous(parameters_of(1, 0), 0.1, tmp_path)
    with socket.create_server(("", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(RendezvousConnectionError, match=f"cannot listen on port {taken}"):
            AttemptRendezvous(parameters_of(0, taken), 0.1)
    alone = AttemptRendezvous(parameters_of(0, port), 0.1)
    with pytest.raises(RendezvousTimeoutError, match=r"waited for 0.1 s \(run.start_timeout\) for node 1 to begin"):
        alone.next_rendezvous()
    alone.close(is_done=False)


def test_a_file_is_trusted_only_for_a_job_with_a_name_of_its_own(tmp_path: Path) -> None:
    parameters = RendezvousParameters(BACKEND, "127.0.0.1:0", "none", 2, 2, rank="1")
    with pytest.raises(RendezvousConnectionError, match="needs --run-folder, and a unique name"):
        AttemptRendezvous(parameters, 0.1, tmp_path)


@pytest.mark.parametrize("message", [b"", b"2", b"../x\n", b"2\ndone\n", b"9" * 100])
def test_a_stranger_who_connects_and_leaves_ends_nothing(message: bytes) -> None:
    lost: list[int] = []
    watch = NodeWatch(lost.append)
    with socket.create_connection(("127.0.0.1", watch.port)) as stranger:
        stranger.sendall(message)
    with socket.create_connection(("127.0.0.1", watch.port)) as node:
        node.sendall(b"7\n")
    deadline = time.monotonic() + patience(20)
    while not lost:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lost == [7]


def test_what_ended_a_job_is_a_sentence_whatever_the_store_holds() -> None:
    assert describe_end(b"3 failed") == "node 3 has ended the job; its output says why"
    assert describe_end(b"3 lost") == "the launcher of node 3 was killed, or its node was shut down"
    assert describe_end(b"\xff../..") == "the job was ended by a launcher that does not say which it is"
