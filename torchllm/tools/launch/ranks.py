"""The ranks of one node as child processes: start them as torchrun does, wait for them, end them. No torch."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

POLL_INTERVAL = 0.1
"""seconds between two looks at the ranks"""
SECONDS_TO_END = 10.0
"""that the ranks have from SIGTERM to SIGKILL: those that start up ignore SIGTERM, those in a collective see it late"""


class RankPlaces(NamedTuple):
    """The places of this node's ranks in the job, and where all ranks meet."""

    nodes: int
    node: int
    ranks_on_node: int
    run_id: str
    address: str
    port: int
    has_store: bool
    """a launcher serves a store at `address`; otherwise rank 0 may serve one there"""

    def rank(self, local_rank: int) -> int:
        return self.node * self.ranks_on_node + local_rank

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return the environment variables that torchrun sets in a rank."""
        ranks = self.nodes * self.ranks_on_node
        values = {
            "RANK": self.rank(local_rank),
            "LOCAL_RANK": local_rank,
            "GROUP_RANK": self.node,
            "ROLE_RANK": self.rank(local_rank),
            "ROLE_NAME": "default",
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": self.ranks_on_node,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_WORLD_SIZE": ranks,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": self.has_store,
        }
        variables = {name: str(value) for name, value in values.items()}
        defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        if self.ranks_on_node > 1:
            defaults["OMP_NUM_THREADS"] = "1"
        return {**defaults, **os.environ, **variables}


class RankEnd(NamedTuple):
    """A rank that has ended with an error."""

    rank: int
    status: int
    """its exit status; negative: the signal that killed it"""


class RankProcesses:
    """The processes of the ranks of this node. Make them in the main thread: they end with it (parent.py)."""

    def __init__(self, places: RankPlaces, command: Sequence[str]) -> None:
        """Start them. command: a recipe and its arguments."""
        python = [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
        self.places = places
        self.processes = [
            subprocess.Popen([*python, *command], env=places.variables(local_rank), start_new_session=True)
            for local_rank in range(places.ranks_on_node)
        ]

    def wait(self, look: Callable[[], None]) -> RankEnd | None:
        """Wait until all have ended, or one with an error; return that one. look: called meanwhile, and may raise."""
        while True:
            statuses = [process.poll() for process in self.processes]
            for local_rank, status in enumerate(statuses):
                if status:
                    return RankEnd(self.places.rank(local_rank), status)
            if None not in statuses:
                return None
            look()
            time.sleep(POLL_INTERVAL)

    def done(self) -> list[int]:
        """Return the ranks that have ended with exit status 0."""
        return [self.places.rank(n) for n, process in enumerate(self.processes) if process.returncode == 0]

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the ranks that are left, and their helper processes, a signal; kill them after `SECONDS_TO_END`."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            _signal_session(process.pid, number)
        deadline = time.monotonic() + SECONDS_TO_END
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal_session(process.pid, signal.SIGKILL)
        for process in running:
            with suppress(subprocess.TimeoutExpired):  # in an uninterruptible call of the kernel
                process.wait(SECONDS_TO_END)


def _signal_session(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)
