"""A pool of live gloo ranks: starting a rank costs seconds, a test on warm ranks about one.

`run(function, world_size, *arguments)` calls `function(*arguments)` on ranks 0 .. world_size - 1, each inside a fresh
default process group, and returns what they returned, in order of rank. `function` must be importable (top level of a
module). A failing function fails only its test; ranks that died or hang are replaced.
"""

import atexit
import contextlib
import itertools
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

SIZE = 8
TIMEOUT = 120.0  # seconds for one call; gloo's own is shorter, so a stuck collective reports itself first
AFTER_A_FAILURE = 5.0  # seconds; a peer of a failed rank can wait a whole gloo time-out for its connection
_counter = itertools.count()


class WorkerFailed(AssertionError):
    """What went wrong on the first rank that failed by itself."""


class Pool:
    """Lazily started ranks, one process each."""

    def __init__(self) -> None:
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.workers_preload"])
        self.ranks: dict[int, tuple[Any, Connection]] = {}
        self.folder = tempfile.mkdtemp(prefix="torchllm-pool-")

    def _rank(self, rank: int) -> Connection:
        process, connection = self.ranks.get(rank, (None, None))
        if process is None or not process.is_alive():
            connection, child_connection = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(child_connection, rank), daemon=False)
            process.start()
            child_connection.close()
            self.ranks[rank] = (process, connection)
        return connection

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any, **keywords: Any) -> list[Any]:
        """Results by rank. Raises WorkerFailed with the traceback of the rank that failed first."""
        connections = [self._rank(rank) for rank in range(world_size)]
        store = os.path.join(self.folder, f"store-{next(_counter)}")
        for connection in connections:
            connection.send((function, world_size, store, arguments, keywords))
        results: dict[int, Any] = {}
        failures: list[tuple[int, str, bool]] = []
        pending = {connection: rank for rank, connection in enumerate(connections)}
        while pending:
            seconds = AFTER_A_FAILURE if failures else TIMEOUT
            ready = wait(list(pending), timeout=seconds)
            if not ready:
                failures += [(rank, f"no answer within {seconds:g} s", True) for rank in pending.values()]
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    worked, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    failures.append((rank, "the process died", False))
                    continue
                if worked:
                    results[rank] = value
                else:
                    # Ranks left waiting fail with a connection error when their peer does: the peer's is the cause.
                    failures.append((rank, value, "Connection" in value or "Timed out" in value))
        if failures:
            self.stop(range(world_size))
            rank, text, _ = min(failures, key=lambda failure: failure[2])
            raise WorkerFailed(f"rank {rank} of {world_size}:\n{text}")
        return [results[rank] for rank in range(world_size)]

    def stop(self, ranks: Any = None) -> None:
        """End these ranks' processes (all when None); they are started again when needed."""
        for rank in list(self.ranks if ranks is None else ranks):
            process, connection = self.ranks.pop(rank, (None, None))
            if process is not None:
                process.kill()
                process.join()
                connection.close()


def _serve(connection: Connection, rank: int) -> None:
    import logging

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as a run sets it; on some ranks of a group alone, they would hang
    for noisy in ("torch.distributed.pipelining.schedules", "torch.distributed.tensor._redistribute"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    while True:
        try:
            function, world_size, store, arguments, keywords = connection.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
            dist.barrier()  # a rank that is done at once must not leave while others still connect to it
            answer = (True, function(*arguments, **keywords))
        except BaseException:
            answer = (False, traceback.format_exc())
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        _forget_groups()
        connection.send(answer)


def _forget_groups() -> None:
    """DTensor caches keep process groups of earlier tests alive by name and fail on equal meshes: clear them."""
    import gc

    from torchllm.runtime.torch_compat import forget_meshes

    forget_meshes()
    gc.collect()


POOL = Pool()
atexit.register(POOL.stop)  # a script that uses the pool ends, although its ranks wait for more calls
run = POOL.run
