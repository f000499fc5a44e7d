"""The cost of setting up gloo groups of all ranks: sockets, requests to the store, and their bytes, per rank.

Every rank is a thread with its own connection to one store, and has the two groups that each run has: the default one
and the host group. Counted are both groups with one all-reduce and one all-gather in each.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Barrier
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

GROUPS = ("default", "host")
TIMEOUT = timedelta(seconds=120)


class CountingStore(dist.Store):  # type: ignore[name-defined]  # torch does not re-export it for type checkers
    """Passes everything on to another store and counts it."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store = store
        self.requests = 0
        self.bytes = 0

    def _count(self, size: int) -> None:
        self.requests += 1
        self.bytes += size

    def set(self, key: str, value: str) -> None:  # torch's
        self._count(len(value))
        self.store.set(key, value)

    def get(self, key: str) -> bytes:  # torch's
        value = bytes(self.store.get(key))
        self._count(len(value))
        return value

    def add(self, key: str, amount: int) -> int:  # torch's
        self._count(8)
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:  # torch's
        self._count(1)
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:  # torch's
        self._count(1)
        self.store.wait(keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:  # torch's
        self.store.set_timeout(timeout)


class SetupCost(NamedTuple):
    """The cost of one rank, the largest of all ranks; of sockets the mean."""

    ranks: int
    sockets: float
    requests: int
    bytes: int


def setup_cost(ranks: int) -> SetupCost:
    """Set up the groups of `ranks` ranks in this process, and count."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as a run: two ranks connect when they first send to each other
    connect = partial(dist.TCPStore, "127.0.0.1")  # type: ignore[attr-defined]  # as above
    server = connect(0, is_master=True, wait_for_workers=False)
    clients = [connect(server.port, is_master=False) for _ in range(ranks)]
    store_sockets = open_sockets()
    stores = [CountingStore(client) for client in clients]
    all_done = Barrier(ranks + 1)
    counted = Barrier(ranks + 1)
    with ThreadPoolExecutor(ranks) as threads:
        done = []
        for rank, store in enumerate(stores):
            done.append(threads.submit(_be_rank, rank, ranks, store, all_done, counted))
        all_done.wait()
        sockets = (open_sockets() - store_sockets) / ranks
        counted.wait()
        for thread in done:
            thread.result()
    return SetupCost(ranks, sockets, max(store.requests for store in stores), max(store.bytes for store in stores))


def _be_rank(rank: int, ranks: int, store: CountingStore, all_done: Barrier, counted: Barrier) -> None:
    """Be one rank: set up the groups, use them, and keep them until they are counted."""
    groups = []
    try:
        for name in GROUPS:
            store_of_group = dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # as above
            group = dist.ProcessGroupGloo(store_of_group, rank, ranks, TIMEOUT)
            use_group(group, rank, ranks)
            groups.append(group)
    finally:
        all_done.wait()
        counted.wait()


def use_group(group: Any, rank: int, ranks: int) -> None:
    """Reduce and gather once; check both results."""
    total = torch.tensor([rank])
    group.allreduce([total]).wait()
    assert total.item() == ranks * (ranks - 1) // 2
    gathered = [torch.empty(1, dtype=torch.int64) for _ in range(ranks)]
    group.allgather([gathered], [torch.tensor([rank])]).wait()
    assert [int(number) for number in gathered] == list(range(ranks))


def open_sockets() -> int:
    """Return the number of sockets of this process."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return count
