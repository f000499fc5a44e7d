"""The store of a job: where ranks and launchers leave each other addresses, votes and alarms.

On one node it is a file of the launcher, which outlives every rank and no other user can reach. Between nodes it is
torch's TCPStore, without a password: whoever reaches its port may read and write every key. So values from it are never
unpickled, and ranks sign entries that make ranks end, kill a process or name a file (`hang_watch.sign`).
"""

import os
import socket
from datetime import timedelta

# public names, but not re-exported for type checkers
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not there

from torchllm.tools.launch.launcher_notes import STORE

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]

LOOPBACK = "127.0.0.1"
"""address that only processes of the same host reach"""


def has_launcher() -> bool:
    """Return whether a launcher has started this rank, and not run_train.sh itself, as with one task per GPU."""
    return STORE in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join_store(timeout: timedelta) -> Store:
    """Return the store that all ranks share. timeout: of its requests."""
    if STORE in os.environ:
        store = FileStore(os.environ[STORE])
        store.set_timeout(timeout)
        return store
    return connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout)


def connect_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Return a client of the store at `address`. timeout: of its requests, and to wait for the store to be served."""
    return TCPStore(address, port, is_master=False, timeout=timeout)


def serve_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Return a store that other hosts reach as `address`; torch binds it to all addresses of this one.

    port: 0 takes a free one, the store's `port`.
    """
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout)


def serve_loopback_store(port: int, timeout: timedelta) -> TCPStore:
    """Return a store that only this host reaches, as `LOOPBACK`. port: 0 takes a free one, the store's `port`.

    torch binds a store to all addresses, whatever it is told, unless it is given a socket that is bound already.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((LOOPBACK, port))
    bound_port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        bound_port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),  # the store closes it
    )
