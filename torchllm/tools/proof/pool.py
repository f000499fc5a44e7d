"""A pool of live gloo ranks: starting a rank costs seconds, a test on warm ranks about one.

`Pool.run(function, world_size, *arguments)` calls `function(*arguments)` on ranks 0 .. world_size - 1, each inside a
fresh default process group, and returns their results in order of rank. `function` must be importable (top level
of a module). A failing function fails only its call; ranks that died or hang are replaced.
"""

import contextlib
import itertools
import logging
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from torchllm.tools.launch.restarts import signal_name

TIMEOUT = 120.0
"""seconds for one call"""
AFTER_A_FAILURE = 5.0
"""seconds; a peer of a failed rank can wait a whole gloo time-out for its connection"""
_counter = itertools.count()


class WorkerFailed(AssertionError):
    """The error of the first rank that failed by itself."""


class _Worker(NamedTuple):
    """The process of one rank."""

    process: BaseProcess
    connection: Connection


class _Failure(NamedTuple):
    """Why a rank has no result."""

    rank: int
    text: str
    is_consequence: bool
    """it has only waited for another rank"""


class Pool:
    """Lazily started ranks, one process each.

    preload: modules that the ranks have imported before they start. timeout: seconds for one call; gloo's own is half
    of it, so a stuck collective reports itself first.
    """

    def __init__(self, preload: Sequence[str] = (), timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(["torchllm.tools.proof.preload", *preload])
        self.ranks: dict[int, _Worker] = {}
        self.folder = tempfile.mkdtemp(prefix="torchllm-pool-")

    def _rank(self, rank: int) -> Connection:
        """Return the connection to a rank, which is started if it is not alive."""
        worker = self.ranks.get(rank)
        if worker is None or not worker.process.is_alive():
            connection, child_connection = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(child_connection, rank, self.timeout / 2), daemon=False)
            process.start()
            child_connection.close()
            worker = self.ranks[rank] = _Worker(process, connection)
        return worker.connection

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any, **keywords: Any) -> list[Any]:
        """Return the results by rank. Raises WorkerFailed with the traceback of the rank that failed first."""
        os.makedirs(self.folder, exist_ok=True)
        connections = [self._rank(rank) for rank in range(world_size)]
        store = os.path.join(self.folder, f"store-{next(_counter)}")
        for connection in connections:
            connection.send((function, world_size, store, arguments, keywords))
        results: dict[int, Any] = {}
        failures: list[_Failure] = []
        pending = {connection: rank for rank, connection in enumerate(connections)}
        while pending:
            seconds = AFTER_A_FAILURE if failures else self.timeout
            ready = wait(list(pending), timeout=seconds)
            if not ready:
                silent = f"no answer within {seconds:g} s: ranks hang, or this machine is too busy"
                failures += [_Failure(rank, silent, is_consequence=True) for rank in pending.values()]
                break
            for connection in connections:
                if connection not in ready:
                    continue
                rank = pending.pop(connection)
                try:
                    worked, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    failures.append(_Failure(rank, _describe_death(self.ranks[rank].process), is_consequence=False))
                    continue
                if worked:
                    results[rank] = value
                else:
                    # Ranks left waiting fail with a connection error when their peer does: the peer's is the cause.
                    lost_peer = "Connection" in value or "Timed out" in value
                    failures.append(_Failure(rank, value, is_consequence=lost_peer))
        if failures:
            self.stop(range(world_size))
            first = min(failures, key=lambda failure: failure.is_consequence)
            raise WorkerFailed(f"rank {first.rank} of {world_size}:\n{first.text}")
        return [results[rank] for rank in range(world_size)]

    def renew(self, ranks: Iterable[int]) -> None:
        """End these ranks' processes, so that the next call gets fresh ones, with no state of this one: in 0.1 s."""
        workers = [self.ranks[rank] for rank in ranks if rank in self.ranks]
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            worker.process.join(AFTER_A_FAILURE)
        self.stop(ranks)

    def stop(self, ranks: Any = None) -> None:
        """End these ranks' processes (all when None); they are started again when needed."""
        for rank in list(self.ranks if ranks is None else ranks):
            worker = self.ranks.pop(rank, None)
            if worker is not None:
                worker.process.kill()
                worker.process.join()
                worker.connection.close()

    def close(self) -> None:
        """End all processes; a later call would start them again.

        Idle ranks end by themselves: a killed one would leave semaphores behind, and Python would warn about them.
        """
        self.renew(list(self.ranks))
        shutil.rmtree(self.folder, ignore_errors=True)


def _describe_death(process: BaseProcess) -> str:
    """Return how a process has ended that closed its connection."""
    process.join(AFTER_A_FAILURE)
    status = process.exitcode
    if status is None:
        return "the process answers no more"
    if status < 0:
        return f"the process died: {signal_name(-status)}"
    return f"the process died with status {status}"


def _serve(connection: Connection, rank: int, timeout: float) -> None:
    """Answer calls on one rank until the pool is gone. timeout: seconds for a collective."""
    import torch
    import torch.distributed as dist

    from torchllm.runtime.torch_compat import one_thread_of_gloo
    from torchllm.tools.launch.store import FileStore

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the whole process group: the pool decides
    torch.set_num_threads(1)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as a run sets it; on some ranks of a group alone, they would hang
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    backend = one_thread_of_gloo()
    for noisy in ("torch.distributed.pipelining.schedules", "torch.distributed.tensor._redistribute"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    while True:
        try:
            function, world_size, store, arguments, keywords = connection.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                backend,
                store=FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            dist.barrier()  # a rank that is done at once must not leave while others still connect to it
            answer = (True, function(*arguments, **keywords))
        except BaseException:
            answer = (False, traceback.format_exc())
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        _forget_layout()
        connection.send(answer)


def _forget_layout() -> None:
    """Forget the process groups and the compiled graphs of a layout.

    DTensor caches keep process groups alive by name and fail on equal meshes. Graphs of earlier layouts would count
    towards the limit of recompilations, beyond which torch compiles no more: then a recomputation may take another
    graph than its forward.
    """
    import gc

    import torch

    from torchllm.runtime.torch_meshes import forget_meshes

    forget_meshes()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
