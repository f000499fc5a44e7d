"""Start the ranks of this node: `python -P -m torchllm.tools.launch.launch [OPTIONS] RECIPE [ARGUMENTS]`.

It stands in for torchrun, and its ranks find the same environment variables (ranks.py). There is no torch in it on one
node, where the ranks share a file (store.py); several nodes need torch's store (rendezvous.py). It ends with
run_train.sh, and reacts to SIGQUIT only, by ending all ranks at once: run_train.sh asks for a stop through a file. A
rank that failed has printed its error; one that was killed could not, and is named here.
"""

import argparse
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from torchllm.config.environment import ATTEMPT, LAUNCHED, LOST_PEER_NOTE, RANK_NOTES
from torchllm.runtime.stop import write_marker
from torchllm.tools.config.environment import system_errors_on_one_line
from torchllm.tools.launch import launcher_notes
from torchllm.tools.launch.descriptors import raise_descriptor_limit
from torchllm.tools.launch.head import NodeMissing
from torchllm.tools.launch.launcher_notes import STORE
from torchllm.tools.launch.lease import DONE, HANDED_DOWN, release_leases
from torchllm.tools.launch.process_tree import end_with_parent, tie_children
from torchllm.tools.launch.rank_watch import RankWatch, memory_folder
from torchllm.tools.launch.ranks import RankPlaces, RankProcesses
from torchllm.tools.launch.restarts import AttemptOver, JobOver, JobStopped, PartEnding, Restarts
from torchllm.tools.launch.start_lines import say_that_nodes_have_joined, say_what_is_started
from torchllm.tools.launch.take_lease import own_for_ranks

if TYPE_CHECKING:  # it imports torch
    from torchllm.tools.launch.rendezvous import Rendezvous

REFUSED = 2
"""exit status of a rank that refuses to start, and of its job"""
ASKED = 3
"""exit status of a job that was asked to stop while its nodes waited for each other"""
START_TIMEOUT = 900.0
"""seconds that nodes wait for each other where run.start_timeout is unknown"""


class RankLeft(Exception):
    """A rank of this node has ended in the middle of the run, with exit status 0."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} ended in the middle of the run")
        self.rank = rank


class EndedBySignal(BaseException):
    """This launcher was asked to end all ranks at once."""


@system_errors_on_one_line()
def launch(arguments: Sequence[str]) -> NoReturn:
    """Run a job as `arguments` say.

    Raises SystemExit with 1 if a rank failed, 2 if it refused to start or an argument is wrong, 3 if the job was asked
    to stop while its nodes waited for each other, 128 + N if signal N ended the job.
    """
    parser = argparse.ArgumentParser(prog="python -P -m torchllm.tools.launch.launch", allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks on this node")
    parser.add_argument("--nnodes", type=int, default=1, help="nodes of the job")
    parser.add_argument("--node-rank", type=int, default=0, help="number of this node")
    parser.add_argument("--rdzv-endpoint", default="", help="HOST:PORT of node 0; port 0: any, which RUN_FOLDER tells")
    parser.add_argument("--rdzv-id", default="none", help="name of the job")
    parser.add_argument("--restarts", type=int, default=0, help="restarts of the job without progress")
    parser.add_argument("--run-folder", type=Path, help="where its checkpoints are, and reports of hangs go")
    parser.add_argument("--start-timeout", type=float, help="run.start_timeout")
    parser.add_argument("--stop-file", type=Path, help="file that exists when the job was asked to stop")
    parser.add_argument("--on-event", default="", help="run.on_event, on node 0")
    parser.add_argument("recipe")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.nproc_per_node < 1 or not 0 <= options.node_rank < options.nnodes:
        parser.error("a job has at least one rank per node, and --node-rank counts from 0 to --nnodes - 1")
    if options.nnodes > 1 and not re.fullmatch(r".+:\d+", options.rdzv_endpoint):
        parser.error(f"several nodes need --rdzv-endpoint=HOST:PORT of node 0, not {options.rdzv_endpoint!r}")
    if HANDED_DOWN in os.environ:  # node 0
        count = options.nnodes * options.nproc_per_node
        say_what_is_started(f"{options.recipe} on {count} process{'es' if count > 1 else ''}")
    raise_descriptor_limit()
    logging.basicConfig(format="%(message)s")
    Launcher(options).run()


class Launcher:
    """A node's launcher, and its state over the attempts of the job."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Make one that `run` starts. options: of the command line."""
        self.options = options
        self.restarts = Restarts(options.restarts, options.run_folder or Path())
        """node 0's account of them"""
        self.watch = RankWatch(options.start_timeout, options.run_folder, options.on_event)
        self.rendezvous: Rendezvous | None = None
        """with the launchers of other nodes"""
        self.attempt = 0
        """counts the attempts from 1"""
        self.reserved = socket.socket()
        """keeps other programs from the port of rank 0 in a job of one node; nothing listens on it yet"""

    def run(self) -> NoReturn:
        """Run the job. Raises SystemExit as `launch` does."""
        status = 1
        reason = ""
        signal.signal(signal.SIGQUIT, _end_at_once)
        self.watch.start()
        try:
            self._meet()
            verdict = "restart"
            while verdict == "restart":
                ending = self._run_attempt()
                if ending.kind == "done":
                    status = 0
                    release_leases(DONE)
                    sys.exit(status)
                verdict = self._agree(ending)
            if verdict == "refuse":
                status = REFUSED
            else:
                reason = self._describe(ending)
        except EndedBySignal:
            status = 128 + signal.SIGQUIT
        except JobStopped as stop:
            status, reason = ASKED, str(stop)
            if self.options.node_rank == 0 and self.options.run_folder is not None:
                write_marker(self.options.run_folder, None)
        except (NodeMissing, JobOver) as error:
            reason = f"error: {error}"
        finally:
            if self.rendezvous is not None:
                self.rendezvous.close(is_done=status == 0)
        if reason:  # last: torch warns with a stack if the store of node 0 is gone when the rendezvous is closed
            print(reason, file=sys.stderr)
        sys.exit(status)

    def _meet(self) -> None:
        """Find the launchers of the other nodes, or reserve a port in a job of one node."""
        options = self.options
        if options.nnodes > 1:
            from torchllm.tools.launch.rendezvous import Rendezvous

            start_timeout = options.start_timeout or START_TIMEOUT
            self.rendezvous = Rendezvous(
                options.nnodes,
                options.node_rank,
                options.rdzv_endpoint,
                options.rdzv_id,
                start_timeout=start_timeout,
                run_folder=options.run_folder,
                stop_file=options.stop_file,
            )
            return
        # The kernel lets rank 0 bind the port too, as long as both set this option and only rank 0 listens.
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind(("127.0.0.1", 0))

    def _run_attempt(self) -> PartEnding:
        """Run the ranks of this node once, and return how they have ended."""
        self.attempt += 1
        if self.attempt > 1:
            os.environ[LAUNCHED] = str(time.time())  # else the ranks count the earlier attempts as their start-up
            os.environ[ATTEMPT] = str(self.attempt)
        with tempfile.TemporaryDirectory("", "torchllm-", memory_folder(), ignore_cleanup_errors=True) as folder:
            os.environ[RANK_NOTES] = folder
            with self.watch.attempt(Path(folder) / "heartbeats"):
                ending = self._run_ranks(Path(folder))
            if stuck := self.watch.found:
                return ending._replace(kind="hung", rank=ending.rank if stuck.beat.rank is None else stuck.beat.rank)
            if launcher_notes.has_note("refused") or ending.status == REFUSED:
                return ending._replace(kind="refused")
            if launcher_notes.has_note("user_error"):
                return ending._replace(kind="user_error")
            return ending

    def _run_ranks(self, folder: Path) -> PartEnding:
        """Start the ranks of this node, and return how they have ended."""
        try:
            places = self._places(folder)
        except AttemptOver:  # another node was quicker
            return PartEnding("stopped")
        ranks = RankProcesses(places, [self.options.recipe, *self.options.arguments])
        try:
            failed = ranks.wait(lambda: self._look(ranks.done()))
            if failed is not None and ranks.done() and launcher_notes.has_note(f"{LOST_PEER_NOTE}{failed.rank}"):
                raise RankLeft(ranks.done()[0])  # the others have trained on without it
            if failed is not None:
                return PartEnding("failed", failed.rank, failed.status, self._host())
            members = launcher_notes.members()
            if members:  # though all ranks of this node have ended with exit status 0
                return PartEnding("left", members[0], 0, self._host())
            if self.rendezvous is not None:
                self.rendezvous.await_others()
            return PartEnding("done")
        except RankLeft as left:
            return PartEnding("left", left.rank, 0, self._host())
        except AttemptOver:
            return PartEnding("stopped" if len(ranks.done()) < places.ranks_on_node else "early")
        except EndedBySignal:
            ranks.end(signal.SIGQUIT)
            raise
        finally:
            ranks.end()

    def _places(self, folder: Path) -> RankPlaces:
        """Begin an attempt, and return where its ranks meet. folder: of the attempt."""
        options = self.options
        address, port = self.reserved.getsockname() if self.rendezvous is None else self.rendezvous.begin(self.attempt)
        if options.node_rank > 0 and options.rdzv_id == "none":  # under Slurm all nodes share one output
            say_that_nodes_have_joined(options.node_rank, options.nnodes, self.attempt)
        if self.rendezvous is None:
            os.environ[STORE] = str(folder / "store")
        return RankPlaces(
            nodes=options.nnodes,
            node=options.node_rank,
            ranks_on_node=options.nproc_per_node,
            run_id=options.rdzv_id,
            address=address,
            port=port,
            has_store=self.rendezvous is not None,
        )

    def _look(self, done: Sequence[int]) -> None:
        """Raise RankLeft, AttemptOver or JobOver if the ranks of this node have to end. done: with exit status 0."""
        for rank in launcher_notes.members():
            if rank in done:
                raise RankLeft(rank)
        if self.rendezvous is not None:
            self.rendezvous.look()

    def _agree(self, ending: PartEnding) -> str:
        """Return the verdict of node 0 on an attempt. ending: of this node's part."""
        if self.rendezvous is None:
            return self.restarts.decide([ending], 0)
        return self.rendezvous.agree(ending, self.restarts.decide)

    def _host(self) -> str:
        """Return the name of this host as messages have it: "" in a job of one node."""
        return "" if self.rendezvous is None else os.uname().nodename

    def _describe(self, ending: PartEnding) -> str:
        """Return a message about the last attempt; "" if a rank of this node has printed one."""
        if ending.kind in ("stopped", "early") and self.rendezvous is not None:
            line = f"error: node {self.rendezvous.first_to_fail} has ended the job; its output says why"
            early = "; the ranks of this node had ended before, with exit status 0"
            return line + early if ending.kind == "early" else line
        return "" if ending.already_reported else ending.describe()


def _end_at_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise EndedBySignal


if __name__ == "__main__":
    end_with_parent()
    tie_children()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell makes its background processes ignore it
    own_for_ranks()
    launch(sys.argv[1:])
