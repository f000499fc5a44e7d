"""How the launchers of a job find each other, and the store that their ranks share: a new one for each attempt.

torchrun has two ways of its own, and neither will do. "c10d", which `--standalone` uses, unpickles what anybody on the
network writes into its store. "static" listens on all addresses even if the job has one node, and keeps one store for
all attempts, in which the ranks of a second attempt find the addresses, votes and alarms of the first.

A job of one node listens on the loopback address only. Among several nodes, the launcher of node 0 serves a store to
the other launchers for as long as the job lasts, under the address and port that all of them are given. There it
announces the port of each attempt's store. Whoever reaches these ports can end the job: the network must be trusted.
"""

import os
import re
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from torchllm.config.environment import LAUNCHED
from torchllm.runtime.node_watch import NodeConnection, NodeWatch
from torchllm.runtime.store import LOOPBACK, TCPStore, connect_store, serve_loopback_store, serve_store

BACKEND = "torchllm"
"""name of this rendezvous for torchrun's --rdzv-backend"""
CHECK_INTERVAL = 1.0
"""seconds between two looks of a launcher at what the other nodes do"""
ENDED = "ended"
"""key of the launchers' store: the node whose launcher has ended first, and how: `3 failed` or `3 lost`"""
WATCH_PORT = "watch_port"
"""key of the launchers' store: port of node 0's NodeWatch"""


class AttemptRendezvous(RendezvousHandler):
    """Brings the launchers of all nodes together at the beginning of each attempt to run the job."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Read the number of nodes, node 0's address and port (`endpoint`) and this node's number (`rank`)."""
        self.nodes = parameters.max_nodes
        self.node = parameters.get_as_int("rank", 0) or 0
        self.run_id = parameters.run_id
        self.timeout = timedelta(seconds=parameters.get_as_int("timeout", 900) or 900)
        self.attempt = 0
        """counts the attempts from 1"""
        self.launchers: TCPStore | None = None
        """store of the launchers; None in a job of one node"""
        self.connection: NodeConnection | None = None
        """to node 0; None there, and in a job of one node"""
        self.has_ranks = False
        """torchrun has started this attempt's ranks, and looks after them"""
        self.next_check = 0.0
        """time.monotonic() of the next look at the launchers' store"""
        self.head = LOOPBACK
        if self.nodes > 1:
            self.head, _, port = parameters.endpoint.rpartition(":")
            self.launchers = self._open(int(port))
            self._watch_nodes(self.launchers)

    def _open(self, port: int) -> TCPStore:
        """Return a store that node 0 serves on `port`, 0 being any."""
        if self.node == 0:
            return serve_store(self.head, port, self.timeout)
        return connect_store(self.head, port, self.timeout)

    def _watch_nodes(self, launchers: TCPStore) -> None:
        """Let node 0 notice when the launcher of another node is killed."""
        if self.node == 0:
            watch = NodeWatch(self._lose)
            launchers.set(WATCH_PORT, str(watch.port))
            return
        port = int(launchers.get(WATCH_PORT))
        self.connection = NodeConnection(self.head, port, self.node, self.timeout.total_seconds())

    def _lose(self, node: int) -> None:
        """End the job because the launcher of a node is gone."""
        self._note_end(node, "lost")
        if not self.has_ranks:  # torchrun waits for that node, for as long as `timeout`, and looks at nothing else
            print(f"error: {describe_end(f'{node} lost'.encode())}", file=sys.stderr, flush=True)
            os._exit(1)

    def _note_end(self, node: int, how: str) -> None:
        """Make the other launchers end, unless they do already."""
        if self.launchers is not None:
            with suppress(dist.DistError):  # node 0 has ended
                self.launchers.compare_set(ENDED, "", f"{node} {how}")

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Let ranks be clients of the attempt's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin an attempt: return its store, this node's number and the number of nodes.

        On another node than 0 it waits for node 0. Raises torch's DistError if that does not come in time.
        """
        self.attempt += 1
        self.has_ranks = False
        if self.attempt > 1:
            os.environ[LAUNCHED] = str(time.time())  # else the ranks count the earlier attempts as their start-up
        store = self._open_attempt()
        address = RendezvousStoreInfo(self.head, store.port)
        return RendezvousInfo(store, self.node, self.nodes, address)

    def _open_attempt(self) -> TCPStore:
        """Return the store of this attempt."""
        if self.launchers is None:
            return serve_loopback_store(0, self.timeout)
        begun, port = _attempt_keys(self.attempt)
        self.launchers.set(begun, "")
        if self.node != 0:
            return self._open(int(self.launchers.get(port)))
        store = self._open(0)
        self.launchers.set(port, str(store.port))
        return store

    def num_nodes_waiting(self) -> int:
        """Return whether another node has begun the next attempt, as 0 or 1; then torchrun restarts this node's ranks.

        torchrun calls it ten times per second. Raises RendezvousClosedError or RendezvousConnectionError, which make
        torchrun end this node's ranks, if a launcher has ended the job.
        """
        self.has_ranks = True
        if self.launchers is None or time.monotonic() < self.next_check:
            return 0
        self.next_check = time.monotonic() + CHECK_INTERVAL
        try:
            if self.launchers.check([ENDED]):
                raise RendezvousClosedError(describe_end(self.launchers.get(ENDED)))
            begun, _ = _attempt_keys(self.attempt + 1)
            return int(self.launchers.check([begun]))
        except dist.DistError as error:
            raise RendezvousConnectionError("node 0 has ended: its launcher does not answer any more") from error

    def is_closed(self) -> bool:
        """Return False: while this launcher lives, it may begin another attempt."""
        return False

    def set_closed(self) -> None:
        """Do nothing: what ends a job is `shutdown`."""

    def get_run_id(self) -> str:
        """Return what torchrun was told to call the job."""
        return self.run_id

    def shutdown(self) -> bool:
        """Tell the other launchers that this one ends. After a success, all nodes are done: torchrun has waited."""
        self._note_end(self.node, "failed")
        if self.connection is not None:
            self.connection.close()
        return True


def describe_end(value: bytes) -> str:
    """Return what the value of `ENDED` says, as a sentence."""
    match = re.fullmatch("([0-9]{1,7}) (failed|lost)", bytes(value).decode(errors="replace"))
    if match is None:
        return "the job was ended by a launcher that does not say which it is"
    node, how = match.groups()
    if how == "lost":
        return f"the launcher of node {node} was killed, or its node was shut down"
    return f"node {node} has ended the job; its output says why"


def _attempt_keys(attempt: int) -> tuple[str, str]:
    """Return the keys of the launchers' store: that a node has begun an attempt, and the port of its store."""
    return f"attempt_{attempt}/begun", f"attempt_{attempt}/port"


def register() -> None:
    """Make torchrun know this rendezvous under the name `BACKEND`."""
    rendezvous_handler_registry.register(BACKEND, AttemptRendezvous)
