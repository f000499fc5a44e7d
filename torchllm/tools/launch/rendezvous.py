"""How the launchers of several nodes find each other, and the store that their ranks share: a new one for each attempt.

The launcher of node 0 serves a store to the other launchers for as long as the job lasts, under an address that all of
them are given or find in the run folder (head.py). There it announces the port of each attempt's store: in an earlier
attempt's store ranks would find the addresses, votes and alarms of ranks that have ended. Anyone with access to these
ports can end the job: the network must be trusted.

When the ranks of a node fail, its launcher says so in the launchers' store, all others end their ranks, and all of
them tell node 0 how their part has ended; node 0 decides for the job whether there is another attempt (`agree`).
"""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import get_args

import torch.distributed as dist

from torchllm.tools.launch.hang_report import format_ranks
from torchllm.tools.launch.head import HeadAddress, NodeMissing, NodeWait, find_head, publish_head, reach_head
from torchllm.tools.launch.node_watch import NodeConnection, NodeWatch
from torchllm.tools.launch.restarts import AttemptOver, JobOver, JobStopped, PartEnding, Verdict
from torchllm.tools.launch.store import TCPStore, connect_store, serve_store

FAILED = "failed"
"""end of the key of the launchers' store, per attempt: the node whose part of it ended first"""
CHECK_INTERVAL = 1.0
"""seconds between two checks of a launcher for the state of other nodes"""
ENDED = "ended"
"""key of the launchers' store: the node whose launcher has ended first, and how: `3 failed`, `3 lost` or `3 stopped`"""
WATCH_PORT = "watch_port"
"""key of the launchers' store: port of node 0's NodeWatch"""
PATIENCE = timedelta(seconds=60)
"""that node 0 has with the other nodes when an attempt has failed: they end their ranks within some 12 s"""

Decide = Callable[[Sequence[PartEnding], int], Verdict]
"""returns the verdict on an attempt, from the ending of each node's part, and the index of the first to end"""


class NodeGone(JobOver):
    """Node 0 does not answer any more."""

    def __init__(self) -> None:
        super().__init__("node 0 has ended: its launcher does not answer any more")


class Rendezvous:
    """Brings the launchers of several nodes together at the beginning and the end of each attempt to run the job."""

    def __init__(
        self,
        nodes: int,
        node: int,
        endpoint: str,
        run_id: str,
        *,
        start_timeout: float,
        run_folder: Path | None = None,
        stop_file: Path | None = None,
    ) -> None:
        """Let node number `node` meet the others. endpoint: HOST:PORT of node 0. run_id: the job's name.

        With port 0, node 0 takes any, and writes it into `run_folder`. start_timeout: seconds that nodes wait for each
        other. stop_file: exists when the job was asked to stop. Raises NodeMissing if they do not meet, JobStopped if
        the file appears.
        """
        self.nodes = nodes
        self.node = node
        self.run_id = run_id
        self.start_timeout = start_timeout
        self.timeout = timedelta(seconds=start_timeout)
        """of requests to a store"""
        self.stop_file = stop_file
        self.attempt = 0
        """counts the attempts from 1"""
        self.store: TCPStore | None = None
        """store of this attempt"""
        self.connection: NodeConnection | None = None
        """to node 0; None there"""
        self.first_to_fail = 0
        """the node whose part of the last attempt that failed ended first"""
        self.next_check = 0.0
        """time.monotonic() of the next look at the launchers' store"""
        self.head, _, port = endpoint.rpartition(":")
        try:
            self.launchers = self._meet(int(port), run_folder)
            """store of the launchers"""
            self._watch_nodes()
        except (OSError, dist.DistError) as error:
            raise NodeMissing(str(error)) from error

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
        wait = NodeWait(self.start_timeout, self.stop_file)
        if is_free and run_folder is not None:
            self.head, port = find_head(run_folder, self.run_id, wait)
        return self._connect(port, wait)

    def _connect(self, port: int, wait: NodeWait) -> TCPStore:
        reach_head(HeadAddress(self.head, port), wait)
        return connect_store(self.head, port, self.timeout)

    def _watch_nodes(self) -> None:
        """Let node 0 notice when the launcher of another node is killed."""
        if self.node == 0:
            watch = NodeWatch(lambda node: self._note_end(node, "lost"))
            self.launchers.set(WATCH_PORT, str(watch.port))
            return
        port = int(self._await(WATCH_PORT, NodeWait(self.start_timeout, self.stop_file), self._beginning_of_node_0()))
        reach_head(HeadAddress(self.head, port), NodeWait(self.start_timeout, self.stop_file))
        self.connection = NodeConnection(self.head, port, self.node, self.start_timeout)

    def _await(self, key: str, wait: NodeWait, missing: str) -> bytes:
        """Return a value of the launchers' store when node 0 has set it. missing: the awaited event, in words."""
        while not self.launchers.check([key]):
            self._raise_end()
            wait.go_on(missing, "The output of node 0 names the reason")
        return self.launchers.get(key)

    def _beginning_of_node_0(self) -> str:
        return f"node 0 at {self.head} to begin"

    def _raise_end(self) -> None:
        """Raise why the job is over according to the other launchers, if it is."""
        end = self.find_end()
        if end is not None:
            raise end

    def _note_end(self, node: int, how: str) -> None:
        """Make the other launchers end, unless they do already."""
        with suppress(dist.DistError):  # node 0 has ended
            self.launchers.compare_set(ENDED, "", f"{node} {how}")

    def begin(self, attempt: int) -> HeadAddress:
        """Begin an attempt, which counts from 1: return where its store is.

        The nodes wait for each other. Raises NodeMissing if they do not come in time, JobOver if one ends the job.
        """
        self.attempt = attempt
        wait = NodeWait(self.start_timeout, self.stop_file)
        try:
            if self.node == 0:
                self.store = serve_store(self.head, 0, self.timeout)
                self.launchers.set(self._key("port"), str(self.store.port))
                self._await_nodes(wait)
                self.launchers.set(self._key("all_begun"), "")
            else:
                self.launchers.set(self._key(f"begun_{self.node}"), "")
                port = int(self._await(self._key("port"), wait, self._beginning_of_node_0()))
                self.store = self._connect(port, wait)
                self._await(self._key("all_begun"), wait, "the other nodes to begin")
        except dist.DistError as error:
            raise NodeMissing(f"the launchers of all nodes could not begin together: {error}") from error
        except JobStopped:
            self._note_end(self.node, "stopped")
            if self.node == 0:
                time.sleep(CHECK_INTERVAL)  # the others look for the note, which ends with this process
            raise
        return HeadAddress(self.head, self.store.port)

    def _await_nodes(self, wait: NodeWait) -> None:
        """Let node 0 wait until all nodes have begun this attempt."""
        missing = list(range(1, self.nodes))
        while missing := [node for node in missing if not self.launchers.check([self._key(f"begun_{node}")])]:
            self._raise_end()
            nodes = f"node {missing[0]}" if len(missing) == 1 else f"nodes {format_ranks(missing)}"
            wait.go_on(f"{nodes} to begin", "Their output names the reason")

    def _key(self, name: str) -> str:
        """Return a key of the launchers' store for this attempt."""
        return f"attempt_{self.attempt}/{name}"

    def look(self) -> None:
        """Raise AttemptOver or JobOver if the ranks of this node have to end; looks once per `CHECK_INTERVAL`."""
        if time.monotonic() >= self.next_check:
            self.next_check = time.monotonic() + CHECK_INTERVAL
            self._raise_end()

    def await_others(self) -> None:
        """Wait, when the ranks of this node are done, until the ranks of all nodes are. Raises as `look` does."""
        try:
            done = self.launchers.add(self._key("done"), 1)
            while done < self.nodes:
                self._raise_end()
                time.sleep(CHECK_INTERVAL)
                done = self.launchers.add(self._key("done"), 0)
        except (dist.DistError, NodeGone):  # node 0 waits for all others: it was done first
            return

    def find_end(self) -> AttemptOver | JobOver | None:
        """Return why this attempt, or the job, is over according to the other launchers; None if it goes on."""
        try:
            if self.launchers.check([ENDED]):
                return job_over(self.launchers.get(ENDED))
            if self.launchers.check([self._key(FAILED)]):
                return AttemptOver("another node's part of this attempt has failed")
        except dist.DistError:
            return NodeGone()
        return None

    def agree(self, ending: PartEnding, decide: Decide) -> Verdict:
        """End this attempt on all nodes, and return the verdict of node 0 for all of them.

        ending: of this node's part, whose ranks have ended. decide: node 0 calls it. Raises JobOver or NodeMissing if
        another launcher does not answer.
        """
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
            raise NodeGone from error
        return next((verdict for verdict in get_args(Verdict) if verdict == text), "end")

    def _endings(self) -> list[PartEnding]:
        """Return how the part of each node has ended, when all have."""
        endings = []
        deadline = time.monotonic() + PATIENCE.total_seconds()
        for node in range(self.nodes):
            key = self._key(f"ending_{node}")
            while not self.launchers.check([key]):  # `wait` would keep `_note_end` from the store
                if self.launchers.check([ENDED]):
                    raise job_over(self.launchers.get(ENDED))
                if time.monotonic() > deadline:
                    raise NodeMissing(f"node {node} does not answer: its launcher has not ended its ranks")
                time.sleep(0.1)
            endings.append(PartEnding.parse(self.launchers.get(key).decode(errors="replace")))
        return endings

    def close(self, *, is_done: bool) -> None:
        """Leave the other launchers; end them too, unless the job is done."""
        if not is_done:
            self._note_end(self.node, "failed")
        if self.connection is not None:
            self.connection.close()


def job_over(value: bytes) -> JobOver:
    """Return the error that `ENDED`'s value stands for."""
    match = re.fullmatch("([0-9]{1,7}) (failed|lost|stopped)", bytes(value).decode(errors="replace"))
    if match is None:
        return JobOver("the job was ended by a launcher that does not say which it is")
    node, how = match.groups()
    if how == "lost":
        return JobOver(f"the launcher of node {node} was killed, or its node was shut down")
    if how == "stopped":
        return JobStopped(f"node {node} was asked to stop while the nodes waited for each other")
    return JobOver(f"node {node} has ended the job; its output says why")
