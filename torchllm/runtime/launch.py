"""Run torchrun for run_train.sh: `python -m torchllm.runtime.launch TORCHRUN_ARGUMENTS`.

There are six differences from plain torchrun. It raises the limit of open files, for its ranks and for the store that
it serves to all ranks of the job. Its rendezvous is our own (rendezvous.py). It ends with run_train.sh, and its ranks
end with it (parent.py). On node 0 it owns the run folder for as long as the job lasts (lease.py). It reacts to SIGQUIT
only, by ending all ranks at once: after SIGTERM torchrun gives the ranks 30 s, too short for some saves, so
run_train.sh asks for a stop through a file instead. And it prints no traceback of its own when a rank ends the job: a
rank that failed has printed its error; a rank that was killed could not, and is named here.
"""

import signal
import sys

from torchllm.runtime.lease import DONE, own_for_ranks, release_leases
from torchllm.runtime.parent import end_with_parent, find_children, tie_children

if __name__ == "__main__":  # before torch is imported, for seconds
    end_with_parent()
    tie_children()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell makes its background processes ignore it
    own_for_ranks()

import logging
import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main

from torchllm.config.environment import REFUSAL_FILE
from torchllm.runtime import rendezvous
from torchllm.runtime.descriptors import raise_descriptor_limit

REFUSED = 2
"""exit status of a rank that refuses to start, and of its job"""
SECONDS_TO_END = 10
"""that the other ranks of a node have, after one has failed, from SIGTERM to SIGKILL"""


def launch(arguments: list[str]) -> None:
    """Run torchrun with `arguments`.

    Raises SystemExit with 1 if a rank failed, 2 if it refused to start, 128 + N if signal N ended the job.
    """
    raise_descriptor_limit()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_END))  # of a launcher that ends
    if hasattr(os, "pidfd_open"):  # Linux
        threading.Thread(target=_limit_ends, name="end of the ranks", daemon=True).start()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").disabled = True
    rendezvous.register()
    ours = ["--signals-to-handle=SIGQUIT", f"--rdzv-backend={rendezvous.BACKEND}"]
    # torch warns if there is no end point, which only a job of several nodes has, and if PET_NODE_RANK is not 0.
    ours += ["--rdzv-endpoint=none", "--node-rank=0"]
    with tempfile.TemporaryDirectory(prefix="torchllm-") as folder:
        refusal = Path(folder) / "refused"
        os.environ[REFUSAL_FILE] = str(refusal)
        try:
            main([*ours, *arguments])
            release_leases(DONE)
        except SignalException as ended:
            sys.exit(128 + ended.sigval)
        except (RendezvousError, DistError, ChildFailedError) as error:
            if refusal.exists():  # a rank has said why; torchrun knows only that it, or another node, has ended
                sys.exit(REFUSED)
            if reason := describe_failure(error):
                print(reason, file=sys.stderr)
            sys.exit(1)


def describe_failure(error: Exception) -> str:
    """Return what to say of an error of torchrun; "" if a rank has said it."""
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        if status == 1:
            return ""
        ending = f"was killed: {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"rank {rank} {ending}"
    if isinstance(error, RendezvousError):
        return f"error: {error}"
    return f"error: the launchers of all nodes could not begin together: {error}"


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
        if ended is None or ended.si_status == 0 or not _is_rank(ended.si_pid):
            time.sleep(0.02)  # or a rank may end, and torch ask for its status, meanwhile
            continue
        survivors = [os.pidfd_open(pid) for pid in find_children() if _is_rank(pid)]
        time.sleep(SECONDS_TO_END)
        for handle in survivors:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


def _is_rank(pid: int) -> bool:
    """Return whether a child is a rank: torchrun starts each in a session of its own."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


if __name__ == "__main__":
    launch(sys.argv[1:])
