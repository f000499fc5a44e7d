"""Launchers of several nodes, as threads of this process: what they agree on at each attempt."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousInfo, RendezvousParameters

from tests.tiny_run import free_port
from torchllm.config.environment import LAUNCHED
from torchllm.runtime import rendezvous
from torchllm.runtime.node_watch import NodeWatch
from torchllm.runtime.rendezvous import BACKEND, AttemptRendezvous, describe_end


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

    def open_all(nodes: int) -> list[AttemptRendezvous]:
        port = free_port()

        def open_node(node: int) -> AttemptRendezvous:
            parameters = RendezvousParameters(
                BACKEND, f"127.0.0.1:{port}", "job", nodes, nodes, rank=str(node), timeout="20"
            )
            return AttemptRendezvous(parameters)

        launchers = together(open_node, range(nodes))
        opened.extend(launchers)
        return launchers

    yield open_all
    for launcher in opened:
        launcher.shutdown()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers look at what the others do whenever they are asked."""
    monkeypatch.setattr(rendezvous, "CHECK_INTERVAL", 0.0)


@pytest.mark.parametrize("nodes", [1, 3])
def test_each_attempt_has_a_store_of_its_own(open_nodes: Callable[[int], list[AttemptRendezvous]], nodes: int) -> None:
    launchers = open_nodes(nodes)
    first = together(begin, launchers)
    assert os.environ[LAUNCHED] == "1000.0"
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


def test_a_node_that_begins_again_makes_the_others_begin_again(
    open_nodes: Callable[[int], list[AttemptRendezvous]], eager: None
) -> None:
    launchers = open_nodes(2)
    together(begin, launchers)
    assert [node.num_nodes_waiting() for node in launchers] == [0, 0]
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(begin, launchers[1])
        while launchers[0].num_nodes_waiting() == 0:
            assert not failed.done()  # it waits for node 0
        stores = [begin(launchers[0]).store, failed.result().store]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert [node.num_nodes_waiting() for node in launchers] == [0, 0]


def test_a_node_that_ends_ends_the_others(open_nodes: Callable[[int], list[AttemptRendezvous]], eager: None) -> None:
    launchers = open_nodes(3)
    together(begin, launchers)
    launchers[1].shutdown()
    for node in (launchers[0], launchers[2]):
        with pytest.raises(RendezvousClosedError, match="node 1 has ended the job"):
            node.num_nodes_waiting()


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


@pytest.mark.parametrize("message", [b"", b"2", b"../x\n", b"2\ndone\n", b"9" * 100])
def test_a_stranger_who_connects_and_leaves_ends_nothing(message: bytes) -> None:
    lost: list[int] = []
    watch = NodeWatch(lost.append)
    with socket.create_connection(("127.0.0.1", watch.port)) as stranger:
        stranger.sendall(message)
    with socket.create_connection(("127.0.0.1", watch.port)) as node:
        node.sendall(b"7\n")
    deadline = time.monotonic() + 20
    while not lost:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lost == [7]


def test_what_ended_a_job_is_a_sentence_whatever_the_store_holds() -> None:
    assert describe_end(b"3 failed") == "node 3 has ended the job; its output says why"
    assert describe_end(b"3 lost") == "the launcher of node 3 was killed, or its node was shut down"
    assert describe_end(b"\xff../..") == "the job was ended by a launcher that does not say which it is"


def test_the_others_are_asked_once_per_second(open_nodes: Callable[[int], list[AttemptRendezvous]]) -> None:
    """torchrun asks ten times per second on each of thousands of nodes."""
    launchers = open_nodes(2)
    together(begin, launchers)
    assert launchers[0].num_nodes_waiting() == 0
    launchers[1].shutdown()
    assert launchers[0].num_nodes_waiting() == 0
