"""The store of a job (torch's TCPStore): where ranks and launchers leave each other addresses, votes and alarms.

It has no password: whoever reaches its port may read and write every key. So values from it are never
unpickled or used as file names, and ranks sign entries that make ranks end, or kill a process (`Signer`).
"""

import hashlib
import hmac
import socket
from datetime import timedelta

# public names, but not re-exported for type checkers
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not there

__all__ = [
    "LOOPBACK",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Signer",
    "Store",
    "TCPStore",
    "connect_store",
    "serve_loopback_store",
    "serve_store",
]

LOOPBACK = "127.0.0.1"
"""address that only processes of the same host reach"""


class Signer:
    """Signs texts with a secret that only the ranks of this start of the job have: HMAC (RFC 2104)."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret

    def sign(self, text: str) -> str:
        """Return the text with its signature; `verify` is the inverse."""
        return f"{self._signature(text)} {text}"

    def verify(self, signed: bytes) -> str | None:
        """Return the text of a value that was signed with the same secret; None if it was not."""
        signature, _, text = bytes(signed).decode(errors="replace").partition(" ")
        is_genuine = hmac.compare_digest(signature.encode(), self._signature(text).encode())
        return text if is_genuine else None

    def _signature(self, text: str) -> str:
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()


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
