"""Run torchrun for run_train.sh: `python -P -m torchllm.tools.launch.launch [OPTIONS] TORCHRUN_ARGUMENTS`.

There are eight differences from plain torchrun. It raises the limit of open files, for its ranks and for the store that
it serves to all ranks of the job. Its rendezvous is our own (rendezvous.py). It ends with run_train.sh, and its ranks
end with it (parent.py). On node 0 it owns the run folder for as long as the job lasts (lease.py). It reacts to SIGQUIT
only, by ending all ranks at once: after SIGTERM torchrun gives the ranks 30 s, too short for some saves, so
run_train.sh asks for a stop through a file instead. It starts the whole job again after a rank has died (restarts.py).
It ends ranks that are stuck (rank_watch.py). And it prints no traceback when a rank ends the job: a rank
that failed has printed its error; a rank that was killed could not, and is named here.
"""

import os
import signal
import sys

from torchllm.runtime import launcher_notes
from torchllm.runtime.parent import end_with_parent, find_ranks, is_session_leader, tie_children
from torchllm.tools.launch.lease import DONE, HANDED_DOWN, own_for_ranks, release_leases
from torchllm.tools.launch.start_lines import say_that_imports_go_on

if __name__ == "__main__":  # before torch is imported, for seconds
    end_with_parent()
    tie_children()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell makes its background processes ignore it
    own_for_ranks()
    if HANDED_DOWN in os.environ:  # node 0
        say_that_imports_go_on()

import argparse
import logging
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError, RendezvousParameters
from torch.distributed.run import main

from torchllm.tools.launch import rank_notes, rendezvous
from torchllm.tools.launch.descriptors import raise_descriptor_limit
from torchllm.tools.launch.rank_watch import RankWatch, memory_folder
from torchllm.tools.launch.rendezvous import AttemptOver, AttemptRendezvous, RankLeft
from torchllm.tools.launch.restarts import PartEnding, Restarts

REFUSED = 2
"""exit status of a rank that refuses to start, and of its job"""
SECONDS_TO_END = 10
"""that the other ranks of a node have, after one has failed, from SIGTERM to SIGKILL"""


def launch(arguments: Sequence[str]) -> None:
    """Run torchrun with `arguments`, again for each restart of the job.

    Raises SystemExit with 1 if a rank failed, 2 if it refused to start, 128 + N if signal N ended the job.
    """
    parser = argparse.ArgumentParser(
        prog="python -P -m torchllm.tools.launch.launch", allow_abbrev=False, add_help=False
    )
    parser.add_argument("--restarts", type=int, default=0, help="restarts of the job without progress")
    parser.add_argument("--run-folder", type=Path, help="where its checkpoints are, and reports of hangs go")
    parser.add_argument("--start-timeout", type=float, help="run.start_timeout")
    parser.add_argument("--on-event", default="", help="run.on_event, on node 0")
    options, torchrun_arguments = parser.parse_known_args(arguments)
    raise_descriptor_limit()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_END))  # of a launcher that ends
    if hasattr(os, "pidfd_open"):  # Linux
        threading.Thread(target=_limit_ends, name="end of the ranks", daemon=True).start()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").disabled = True
    watch = RankWatch(options.start_timeout, options.run_folder, options.on_event)
    Launcher(torchrun_arguments, Restarts(options.restarts, options.run_folder or Path()), watch).run()


class Launcher:
    """A node's launcher, and its state over the attempts of the job."""

    def __init__(self, arguments: Sequence[str], restarts: Restarts, watch: RankWatch) -> None:
        """Make one that runs torchrun with `arguments`. restarts: node 0's account of them. watch: of its ranks."""
        # torch warns if there is no end point, which only a job of several nodes has, and if PET_NODE_RANK is not 0.
        ours = ["--signals-to-handle=SIGQUIT", f"--rdzv-backend={rendezvous.BACKEND}", "--rdzv-endpoint=none"]
        self.arguments = [*ours, "--node-rank=0", "--max-restarts=0", *arguments]
        self.restarts = restarts
        self.watch = watch
        self.rendezvous: AttemptRendezvous | None = None
        rendezvous.register(self._create_rendezvous)

    def _create_rendezvous(self, parameters: RendezvousParameters) -> AttemptRendezvous:
        """Return the rendezvous of the job, which is the same in all attempts."""
        if self.rendezvous is None:
            start_timeout = self.watch.start_timeout or rendezvous.START_TIMEOUT
            self.rendezvous = AttemptRendezvous(parameters, start_timeout, self.watch.run_folder)
        return self.rendezvous

    def run(self) -> None:
        """Run the job. Raises SystemExit as `launch` does."""
        status = 1
        reason = ""
        self.watch.start()
        try:
            verdict = "restart"
            while verdict == "restart":
                ending = self._run_attempt()
                if ending.kind == "done":
                    status = 0
                    release_leases(DONE)
                    return
                assert self.rendezvous is not None
                verdict = self.rendezvous.agree(ending, self.restarts.decide)
            if verdict == "refuse":
                status = REFUSED
            else:
                reason = self._describe(ending)
        except SignalException as ended:
            status = 128 + ended.sigval
        except RendezvousError as error:
            reason = f"error: {error}"
        except DistError as error:
            reason = f"error: the launchers of all nodes could not begin together: {error}"
        finally:
            if self.rendezvous is not None:
                self.rendezvous.close(is_done=status == 0)
        if reason:  # last: torch warns with a stack if the store of node 0 is gone when the rendezvous is closed
            print(reason, file=sys.stderr)
        sys.exit(status)

    def _run_attempt(self) -> PartEnding:
        """Run the ranks of this node once, and return how they have ended."""
        with tempfile.TemporaryDirectory(prefix="torchllm-", dir=memory_folder()) as folder:
            os.environ[launcher_notes.FOLDER] = folder
            with self.watch.attempt(Path(folder) / "heartbeats"):
                ending = self._run_ranks()
            if stuck := self.watch.found:
                return ending._replace(kind="hung", rank=ending.rank if stuck.rank is None else stuck.rank)
            if rank_notes.has_error("refused") or ending.status == REFUSED:
                return ending._replace(kind="refused")
            if rank_notes.has_error("user_error"):
                return ending._replace(kind="user_error")
            return ending

    def _run_ranks(self) -> PartEnding:
        """Run torchrun once, and return how the ranks of this node have ended."""
        try:
            main(self.arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return PartEnding("failed", rank, failure.exitcode, self._host())
        except RankLeft as left:
            return PartEnding("left", left.rank, 0, self._host())
        except AttemptOver:
            return PartEnding("stopped")
        assert self.rendezvous is not None
        members = rank_notes.members()
        if members:  # though all ranks of this node have ended with exit status 0
            return PartEnding("left", members[0].rank, 0, self._host())
        end = self.rendezvous.find_end()
        if end is None or isinstance(end, RendezvousConnectionError):  # node 0 was done first
            return PartEnding("done")
        if isinstance(end, AttemptOver):
            return PartEnding("stopped")
        raise end

    def _host(self) -> str:
        """Return the name of this host as messages have it: "" in a job of one node."""
        if self.rendezvous is None or self.rendezvous.nodes == 1:
            return ""
        return os.uname().nodename

    def _describe(self, ending: PartEnding) -> str:
        """Return a message about the last attempt; "" if a rank of this node has printed one."""
        if ending.kind == "stopped" and self.rendezvous is not None:
            return f"error: node {self.rendezvous.first_to_fail} has ended the job; its output says why"
        return "" if ending.already_reported else ending.describe()


def _limit_ends() -> None:
    """Kill the ranks of this node that are still there `SECONDS_TO_END` after one of them has failed.

    torch sends them SIGTERM and waits for 30 s, a number that cannot be set: those that start up ignore the signal, and
    those in a collective do not get to it.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # torch asks for the exit status, not this thread
        except ChildProcessError:  # there are no ranks yet
            ended = None
        if ended is None or ended.si_status == 0 or not is_session_leader(ended.si_pid):
            time.sleep(0.02)  # or a rank may end, and torch ask for its status, meanwhile
            continue
        survivors = [os.pidfd_open(pid) for pid in find_ranks()]
        time.sleep(SECONDS_TO_END)
        for handle in survivors:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


if __name__ == "__main__":
    launch(sys.argv[1:])
