"""Launchers of several nodes, as threads of this process: what they agree on at each attempt."""

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from tests.patience import patience, until
from tests.tiny_run import free_port
from torchllm.tools.launch import head, rendezvous
from torchllm.tools.launch.head import HeadAddress, NodeMissing, publish_head, read_head
from torchllm.tools.launch.node_watch import NodeWatch
from torchllm.tools.launch.rendezvous import Decide, Rendezvous, job_over
from torchllm.tools.launch.restarts import AttemptOver, JobOver, JobStopped, PartEnding, Verdict


def together(action: Callable[..., object], items: object) -> list:
    items = list(items)
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(action, items))


def begin(node: Rendezvous) -> HeadAddress:
    return node.begin(node.attempt + 1)


def look_for_ever(node: Rendezvous) -> None:
    while True:
        node.look()


@pytest.fixture
def open_nodes() -> Iterator[Callable[[int], list[Rendezvous]]]:
    """Returns the rendezvous of each node's launcher, that of node 0 first; they end as they should."""
    opened: list[Rendezvous] = []

    def open_all(nodes: int) -> list[Rendezvous]:
        port = free_port()

        def open_node(node: int) -> Rendezvous:
            return Rendezvous(nodes, node, f"127.0.0.1:{port}", "job", start_timeout=patience(60))

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


def test_each_attempt_has_a_store_of_its_own(open_nodes: Callable[[int], list[Rendezvous]]) -> None:
    launchers = open_nodes(2)
    first = together(begin, launchers)
    assert first[0] == first[1]
    assert launchers[0].store is not None
    assert launchers[1].store is not None
    launchers[0].store.set("alarm", "of the first attempt")
    assert launchers[1].store.get("alarm") == b"of the first attempt"
    second = together(begin, launchers)
    assert second[0] == second[1] != first[0]
    assert not launchers[1].store.check(["alarm"])


def test_a_node_has_begun_when_all_have(
    open_nodes: Callable[[int], list[Rendezvous]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "LOOK_INTERVAL", 0.01)
    launchers = open_nodes(3)
    with ThreadPoolExecutor(3) as pool:
        begun = [pool.submit(begin, launcher) for launcher in launchers[:2]]
        for node in begun:
            with pytest.raises(TimeoutError):
                node.result(0.3)
        last = begin(launchers[2])
        assert [node.result(patience(30)) for node in begun] == [last, last]


def decide_to(verdict: Verdict, seen: list[object]) -> Decide:
    """Return what node 0 decides; it notes what it is given."""

    def decide(endings: Sequence[PartEnding], first: int) -> Verdict:
        seen.append((list(endings), first))
        return verdict

    return decide


KILLED = PartEnding("failed", 1, -9, "host-1")


def test_a_part_that_fails_ends_the_attempt_and_node_0_decides_what_follows(
    open_nodes: Callable[[int], list[Rendezvous]], eager: None
) -> None:
    launchers = open_nodes(3)
    together(begin, launchers)
    seen: list[object] = []
    for node in launchers:
        node.look()
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(launchers[2].agree, KILLED, decide_to("end", seen))
        for node in launchers[:2]:
            with pytest.raises(AttemptOver):
                look_for_ever(node)
        stopped = PartEnding("stopped")
        verdicts = together(lambda node: node.agree(stopped, decide_to("restart", seen)), launchers[:2])
        assert [*verdicts, failed.result()] == ["restart"] * 3
    assert seen == [([stopped, stopped, KILLED], 2)]
    assert [node.first_to_fail for node in launchers] == [2, 2, 2]
    together(begin, launchers)
    for node in launchers:
        node.look()


def test_what_a_stranger_writes_ends_no_attempt_otherwise(
    open_nodes: Callable[[int], list[Rendezvous]], eager: None
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
    open_nodes: Callable[[int], list[Rendezvous]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE", timedelta(seconds=0.3))
    launchers = open_nodes(2)
    together(begin, launchers)
    with pytest.raises(NodeMissing, match="node 1 does not answer"):
        launchers[0].agree(KILLED, decide_to("restart", []))


def test_nodes_whose_ranks_are_done_wait_for_the_others_unless_the_attempt_is_over(
    open_nodes: Callable[[int], list[Rendezvous]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "CHECK_INTERVAL", 0.1)
    launchers = open_nodes(2)
    together(begin, launchers)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(launchers[1].await_others)
        with pytest.raises(TimeoutError):
            waits.result(0.3)
        launchers[0].await_others()
        waits.result(patience(30))
    together(begin, launchers)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(launchers[1].await_others)
        agreed = pool.submit(launchers[0].agree, KILLED, decide_to("restart", []))
        with pytest.raises(AttemptOver):
            waits.result(patience(30))
        assert launchers[1].agree(PartEnding("stopped"), decide_to("end", [])) == agreed.result() == "restart"


def test_a_launcher_that_is_killed_before_it_has_joined_is_named(
    open_nodes: Callable[[int], list[Rendezvous]], eager: None
) -> None:
    """And not one that has ended as it should before."""
    first, done, killed = open_nodes(3)
    assert done.connection is not None
    assert killed.connection is not None
    with done.connection.socket.dup() as connection:
        done.close(is_done=True)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""  # node 0 has seen the end of node 1
    killed.connection.socket.close()
    with pytest.raises(JobOver, match="the launcher of node 2 was killed"):
        begin(first)


def test_a_launcher_that_is_killed_ends_the_others(open_nodes: Callable[[int], list[Rendezvous]], eager: None) -> None:
    launchers = open_nodes(3)
    together(begin, launchers)
    for node in launchers:
        node.look()
    assert launchers[2].connection is not None
    launchers[2].connection.socket.close()  # what the kernel does for a killed process
    for node in launchers[:2]:
        with pytest.raises(JobOver, match="the launcher of node 2 was killed"):
            look_for_ever(node)


def meet(
    node: int, port: int, seconds: float, folder: Path | None = None, name: str = "70123.0.0", stop: Path | None = None
) -> Rendezvous:
    return Rendezvous(2, node, f"127.0.0.1:{port}", name, start_timeout=seconds, run_folder=folder, stop_file=stop)


def test_a_request_to_stop_ends_every_wait_for_other_nodes(tmp_path: Path) -> None:
    port, stop = free_port(), tmp_path / "stop"
    stop.touch()
    with pytest.raises(JobStopped, match=f"stopped while waiting for node 0 at 127.0.0.1:{port}"):
        meet(1, port, 60, stop=stop)
    with pytest.raises(JobStopped, match=f"stopped while waiting for node 0 to write {tmp_path}/head.json"):
        meet(1, 0, 60, tmp_path, stop=stop)
    stop.unlink()
    nodes = together(lambda node: meet(node, port, 60, stop=stop), range(2))
    together(begin, nodes)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(begin, nodes[0])  # after a restart
        until(lambda: nodes[1].launchers.check(["attempt_2/port"]))
        stop.touch()
        with pytest.raises(JobStopped, match="stopped while waiting for node 1 to begin"):
            again.result(patience(30))
        nodes[1].stop_file = None  # it was not asked itself
        with pytest.raises(JobStopped, match="node 0 was asked to stop while the nodes waited for each other"):
            begin(nodes[1])
    for node in nodes:
        node.close(is_done=True)


def test_nodes_find_each_other_by_the_run_folder_where_no_port_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of an earlier job is still there, and its port belongs to somebody else."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        publish_head(tmp_path, "70123.0.9", HeadAddress("127.0.0.1", stranger.getsockname()[1]))
        with ThreadPoolExecutor(1) as pool:
            looks: list[Path] = []
            monkeypatch.setattr(head, "read_head", lambda *job: looks.append(job[0]) or read_head(*job))
            second = pool.submit(meet, 1, 0, patience(60), tmp_path)
            until(lambda: looks)
            nodes = [meet(0, 0, patience(60), tmp_path), second.result()]
        first, other = together(begin, nodes)
        assert first == other
    for node in nodes:
        node.close(is_done=True)


def test_nodes_that_do_not_meet_are_told_for_whom_they_have_waited(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(NodeMissing, match=rf"for node 0 at 127.0.0.1:{port} \(.*refused\)"):
        meet(1, port, 0.1)
    with pytest.raises(NodeMissing, match=f"for node 0 to write {tmp_path}/head.json"):
        meet(1, 0, 0.1, tmp_path)
    with socket.create_server(("", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(NodeMissing, match=f"cannot listen on port {taken}"):
            meet(0, taken, 0.1)
    wait = patience(1)  # also that of torch's store, which must listen within it
    alone = meet(0, port, wait)
    with pytest.raises(NodeMissing, match=rf"waited for {wait:g} s \(run.start_timeout\) for node 1 to begin"):
        begin(alone)
    alone.close(is_done=False)


def test_a_file_is_trusted_only_for_a_job_with_a_name_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(NodeMissing, match="needs --run-folder, and a unique name"):
        meet(1, 0, 0.1, tmp_path, name="none")


def test_a_stranger_who_connects_and_leaves_ends_nothing() -> None:
    for message in [b"", b"2", b"../x\n", b"2\ndone\n", b"9" * 100]:
        lost: list[int] = []
        watch = NodeWatch(lost.append)
        with socket.create_connection(("127.0.0.1", watch.port)) as stranger:
            stranger.sendall(message)
        with socket.create_connection(("127.0.0.1", watch.port)) as node:
            node.sendall(b"7\n")
        until(lost.copy)
        assert lost == [7], message


def test_what_ended_a_job_is_a_sentence_whatever_the_store_holds() -> None:
    assert str(job_over(b"3 failed")) == "node 3 has ended the job; its output says why"
    assert str(job_over(b"3 lost")) == "the launcher of node 3 was killed, or its node was shut down"
    assert str(job_over(b"\xff../..")) == "the job was ended by a launcher that does not say which it is"
