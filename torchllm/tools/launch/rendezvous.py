"""How the launchers of a job find each other, and the store that their ranks share: a new one for each attempt.

torchrun's two rendezvous backends do not fit: "c10d", which `--standalone` uses, unpickles data that anyone on the
network may write to its store. "static" listens on all addresses even if the job has one node, and keeps one store for
all attempts, so that the ranks of a second attempt find the addresses, votes and alarms of the first.

A job of one node listens on the loopback address only. Among several nodes, the launcher of node 0 serves a store to
the other launchers for as long as the job lasts, under an address that all of them are given or find in the run folder
(head.py). There it announces the port of each attempt's store. Whoever reaches these ports can end the job: the network
must be trusted.

torchrun runs each attempt without restarts: it would count them per node. When the ranks of a node fail,
its launcher says so in the launchers' store, all others end their ranks, and all of them tell node 0 how their part has
ended; node 0 decides for the job whether there is another attempt (`agree`, restarts.py).
"""

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import get_args

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from torchllm.config.environment import ATTEMPT, LAUNCHED
from torchllm.runtime.parent import is_running
from torchllm.tools.launch import rank_notes
from torchllm.tools.launch.hang_report import format_ranks
from torchllm.tools.launch.head import HeadAddress, NodeMissing, NodeWait, find_head, publish_head, reach_head
from torchllm.tools.launch.node_watch import NodeConnection, NodeWatch
from torchllm.tools.launch.restarts import PartEnding, Verdict
from torchllm.tools.launch.store import (
    LOOPBACK,
    PrefixStore,
    Store,
    TCPStore,
    connect_store,
    serve_loopback_store,
    serve_store,
)

BACKEND = "torchllm"
"""name of this rendezvous for torchrun's --rdzv-backend"""
FAILED = "failed"
"""end of the key of the launchers' store, per attempt: the node whose part of it ended first"""
START_TIMEOUT = 900.0
"""seconds that nodes wait for each other where run.start_timeout is unknown"""
CHECK_INTERVAL = 1.0
"""seconds between two checks of a launcher for the state of other nodes"""
ENDED = "ended"
"""key of the launchers' store: the node whose launcher has ended first, and how: `3 failed` or `3 lost`"""
WATCH_PORT = "watch_port"
"""key of the launchers' store: port of node 0's NodeWatch"""
PATIENCE = timedelta(seconds=60)
"""that node 0 has with the other nodes when an attempt has failed: they end their ranks within some 12 s"""

Decide = Callable[[Sequence[PartEnding], int], Verdict]
"""returns the verdict on an attempt, from the ending of each node's part, and the index of the first to end"""


class AttemptOver(RendezvousClosedError):
    """Another node's part of this attempt has failed."""


class RankLeft(RendezvousError):
    """A rank of this node has ended in the middle of the run, with exit status 0."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} ended in the middle of the run, with exit status 0")
        self.rank = rank


class AttemptRendezvous(RendezvousHandler):
    """Brings the launchers of all nodes together at the beginning of each attempt to run the job."""

    def __init__(
        self, parameters: RendezvousParameters, start_timeout: float = START_TIMEOUT, run_folder: Path | None = None
    ) -> None:
        """Read the number of nodes, node 0's address and port (`endpoint`) and this node's number (`rank`).

        With port 0, node 0 takes any, and writes it into `run_folder`. start_timeout: seconds that nodes wait for each
        other. Raises RendezvousConnectionError if they do not meet.
        """
        self.nodes = parameters.max_nodes
        self.node = parameters.get_as_int("rank", 0) or 0
        self.run_id = parameters.run_id
        self.start_timeout = start_timeout
        self.timeout = timedelta(seconds=start_timeout)
        """of requests to a store"""
        self.attempt = 0
        """counts the attempts from 1"""
        self.launchers: TCPStore | None = None
        """store of the launchers; None in a job of one node"""
        self.store: TCPStore | None = None
        """store of this attempt"""
        self.connection: NodeConnection | None = None
        """to node 0; None there, and in a job of one node"""
        self.first_to_fail = 0
        """the node whose part of the last attempt that failed ended first"""
        self.has_ranks = False
        """torchrun has started this attempt's ranks, and looks after them"""
        self.next_check = 0.0
        """time.monotonic() of the next look at the launchers' store"""
        self.head = LOOPBACK
        if self.nodes > 1:
            self.head, _, port = parameters.endpoint.rpartition(":")
            try:
                self.launchers = self._meet(int(port), run_folder)
                self._watch_nodes(self.launchers)
            except (NodeMissing, OSError) as error:
                raise RendezvousConnectionError(str(error)) from error

    def _meet(self, port: int, run_folder: Path | None) -> TCPStore:
        """Return the store of the launchers, which node 0 serves on `port`, or on one that the run folder tells."""
        is_free = port == 0
        if is_free and (run_folder is None or self.run_id == "none"):
            raise NodeMissing("a job with any free port (0) needs --run-folder, and a unique name: --rdzv-id")
        if self.node == 0:
            try:
                store = serve_store(self.head, port, self.timeout)
            except dist.DistNetworkError as error:
                raise NodeMissing(
                    f"cannot listen on port {port}, perhaps another process does: set PET_MASTER_PORT, or under Slurm "
                    "MASTER_PORT, on all nodes"
                ) from error
            if is_free and run_folder is not None:
                publish_head(run_folder, self.run_id, HeadAddress(self.head, store.port))
            return store
        wait = NodeWait(self.start_timeout)
        if is_free and run_folder is not None:
            self.head, port = find_head(run_folder, self.run_id, wait)
        return self._connect(port, wait)

    def _connect(self, port: int, wait: NodeWait) -> TCPStore:
        """Return a store of node 0."""
        reach_head(HeadAddress(self.head, port), wait)
        return connect_store(self.head, port, self.timeout)

    def _watch_nodes(self, launchers: TCPStore) -> None:
        """Let node 0 notice when the launcher of another node is killed."""
        if self.node == 0:
            watch = NodeWatch(self._lose)
            launchers.set(WATCH_PORT, str(watch.port))
            return
        port = int(self._await(launchers, WATCH_PORT, NodeWait(self.start_timeout)))
        reach_head(HeadAddress(self.head, port), NodeWait(self.start_timeout))
        self.connection = NodeConnection(self.head, port, self.node, self.start_timeout)

    def _await(self, launchers: TCPStore, key: str, wait: NodeWait) -> bytes:
        """Return a value of the launchers' store when node 0 has set it."""
        while not launchers.check([key]):
            self._raise_end()
            wait.go_on(f"node 0 at {self.head} to begin", "Its output names the reason")
        return launchers.get(key)

    def _raise_end(self) -> None:
        """Raise why the job is over according to the other launchers, if it is."""
        end = self.find_end()
        if end is not None:
            raise end

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

        The nodes wait for each other. Raises RendezvousTimeoutError if they do not come in time.
        """
        self.attempt += 1
        self.has_ranks = False
        if self.attempt > 1:
            os.environ[LAUNCHED] = str(time.time())  # else the ranks count the earlier attempts as their start-up
            os.environ[ATTEMPT] = str(self.attempt)
        try:
            self.store = self._open_attempt()
        except NodeMissing as error:
            raise RendezvousTimeoutError(str(error)) from error
        address = RendezvousStoreInfo(self.head, self.store.port)
        return RendezvousInfo(AttemptStore(self.store, self.find_end), self.node, self.nodes, address)

    def _open_attempt(self) -> TCPStore:
        """Return the store of this attempt."""
        if self.launchers is None:
            return serve_loopback_store(0, self.timeout)
        wait = NodeWait(self.start_timeout)
        if self.node != 0:
            self.launchers.set(self._key(f"begun_{self.node}"), "")
            return self._connect(int(self._await(self.launchers, self._key("port"), wait)), wait)
        store = serve_store(self.head, 0, self.timeout)
        self.launchers.set(self._key("port"), str(store.port))
        self._await_nodes(self.launchers, wait)
        return store

    def _await_nodes(self, launchers: TCPStore, wait: NodeWait) -> None:
        """Let node 0 wait until all nodes have begun this attempt: torchrun would wait in silence."""
        missing = list(range(1, self.nodes))
        while missing := [node for node in missing if not launchers.check([self._key(f"begun_{node}")])]:
            self._raise_end()
            nodes = f"node {missing[0]}" if len(missing) == 1 else f"nodes {format_ranks(missing)}"
            wait.go_on(f"{nodes} to begin", "Their output names the reason")

    def _key(self, name: str) -> str:
        """Return a key of the launchers' store for this attempt."""
        return f"attempt_{self.attempt}/{name}"

    def num_nodes_waiting(self) -> int:
        """Return 0: no node may join a job that runs. torchrun calls it ten times per second.

        Its exceptions make torchrun end this node's ranks: RankLeft, AttemptOver, or another RendezvousError if a
        launcher has ended the job.
        """
        self.has_ranks = True
        for member in rank_notes.members():
            if not is_running(member.pid):  # with another status torchrun would have ended all ranks
                raise RankLeft(member.rank)
        if self.launchers is None or time.monotonic() < self.next_check:
            return 0
        self.next_check = time.monotonic() + CHECK_INTERVAL
        end = self.find_end()
        if end is not None:
            raise end
        return 0

    def find_end(self) -> RendezvousError | None:
        """Return why this attempt, or the job, is over according to the other launchers; None if it goes on."""
        if self.launchers is None:
            return None
        try:
            if self.launchers.check([ENDED]):
                return RendezvousClosedError(describe_end(self.launchers.get(ENDED)))
            if self.launchers.check([self._key(FAILED)]):
                return AttemptOver("another node's part of this attempt has failed")
        except dist.DistError:
            return _node_0_has_ended()
        return None

    def agree(self, ending: PartEnding, decide: Decide) -> Verdict:
        """End this attempt on all nodes, and return the verdict of node 0 for all of them.

        ending: of this node's part, whose ranks have ended. decide: node 0 calls it. Raises RendezvousError if another
        launcher does not answer.
        """
        self.has_ranks = False
        if self.launchers is None:
            return decide([ending], 0)
        try:
            first = self.launchers.compare_set(self._key(FAILED), "", str(self.node)).decode(errors="replace")
            self.first_to_fail = min(int(first), self.nodes - 1) if re.fullmatch("[0-9]{1,7}", first) else 0
            self.launchers.set(self._key(f"ending_{self.node}"), ending.text())
            if self.node == 0:
                verdict = decide(self._endings(), self.first_to_fail)
                self.launchers.set(self._key("verdict"), verdict)
                return verdict
            self.launchers.wait([self._key("verdict")], 2 * PATIENCE)
            text = self.launchers.get(self._key("verdict")).decode(errors="replace")
        except dist.DistError as error:
            raise _node_0_has_ended() from error
        return next((verdict for verdict in get_args(Verdict) if verdict == text), "end")

    def _endings(self) -> list[PartEnding]:
        """Return how the part of each node has ended, when all have."""
        assert self.launchers is not None
        endings = []
        deadline = time.monotonic() + PATIENCE.total_seconds()
        for node in range(self.nodes):
            key = self._key(f"ending_{node}")
            while not self.launchers.check([key]):  # `wait` would keep `_lose` from the store
                if time.monotonic() > deadline:
                    raise RendezvousTimeoutError(f"node {node} does not answer: its launcher has not ended its ranks")
                time.sleep(0.1)
            endings.append(PartEnding.parse(self.launchers.get(key).decode(errors="replace")))
        return endings

    def is_closed(self) -> bool:
        """Return False: while this launcher lives, it may begin another attempt."""
        return False

    def set_closed(self) -> None:
        """Do nothing: `close` ends a job."""

    def get_run_id(self) -> str:
        """Return the job's name on torchrun's command line."""
        return self.run_id

    def shutdown(self) -> bool:
        """Do nothing: torchrun calls it after each attempt."""
        return True

    def close(self, *, is_done: bool) -> None:
        """Leave the other launchers; end them too, unless the job is done."""
        if not is_done:
            self._note_end(self.node, "failed")
        if self.connection is not None:
            self.connection.close()


class AttemptStore(PrefixStore):
    """The store of an attempt as torchrun sees it: it does not wait for nodes that will not come.

    torchrun waits here for all nodes when its own ranks are done, for five minutes.
    """

    def __init__(self, store: Store, find_end: Callable[[], RendezvousError | None]) -> None:
        """Make one for the launchers of an attempt. find_end: returns why it is over; None if it goes on."""
        super().__init__("launchers", store)
        self.find_end = find_end

    def wait(self, keys: list[str]) -> None:  # type: ignore[override]  # torchrun passes no timeout
        """Return when the keys are set, or the attempt is over: a rank of this node may have left the job early."""
        while not rank_notes.members() and self.find_end() is None:
            try:
                super().wait(keys, timedelta(seconds=CHECK_INTERVAL))
                return
            except dist.DistStoreError:  # the time is up
                continue


def _node_0_has_ended() -> RendezvousConnectionError:
    return RendezvousConnectionError("node 0 has ended: its launcher does not answer any more")


def describe_end(value: bytes) -> str:
    """Return the meaning of `ENDED`'s value, as a sentence."""
    match = re.fullmatch("([0-9]{1,7}) (failed|lost)", bytes(value).decode(errors="replace"))
    if match is None:
        return "the job was ended by a launcher that does not say which it is"
    node, how = match.groups()
    if how == "lost":
        return f"the launcher of node {node} was killed, or its node was shut down"
    return f"node {node} has ended the job; its output says why"


def register(create: Callable[[RendezvousParameters], AttemptRendezvous]) -> None:
    """Make torchrun know this rendezvous under the name `BACKEND`. create: called at the beginning of each attempt."""
    rendezvous_handler_registry.register(BACKEND, create)
