"""Notice that the launcher of another node is gone: node 0 holds a connection to each, and sees its end. No torch.

A killed process closes its connections at once, whatever it was doing. A node that loses its power or its network does
not: its ranks are missed after run.timeout (`hang_watch`), and a network that recovers in time does no harm.
"""

import asyncio
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

_GOODBYE = b"done\n"
"""sent by a launcher before it exits normally"""
_LONGEST = 64
"""bytes that a launcher sends at most"""


class NodeWatch:
    """Node 0's end of the connections: a thread that looks after all of them."""

    def __init__(self, on_lost: Callable[[int], None]) -> None:
        """Begin to listen. `on_lost` is called, in the thread, with the number of each node that is lost."""
        self.on_lost = on_lost
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=is_dual)
        self.port: int = listener.getsockname()[1]
        threading.Thread(target=asyncio.run, args=(self._watch(listener),), name="node watch", daemon=True).start()

    async def _watch(self, listener: socket.socket) -> None:
        """Accept connections and read from them, for as long as this process lives."""
        server = await asyncio.start_server(self._read, sock=listener, backlog=socket.SOMAXCONN)
        await server.serve_forever()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read from a launcher until it is gone."""
        received = b""
        with suppress(ConnectionError):
            while len(received) <= _LONGEST and (data := await reader.read(_LONGEST)):
                received += data
        writer.close()
        # A node's number without a goodbye: neither an orderly end, nor a stranger who sent something else.
        if lost := re.fullmatch(rb"([0-9]{1,7})\n", received):
            self.on_lost(int(lost[1]))


class NodeConnection:
    """Another node's end of its connection."""

    def __init__(self, address: str, port: int, node: int, timeout: float) -> None:
        """Connect node `node` to the watch of node 0 at `address`. Raises OSError."""
        self.socket = socket.create_connection((address, port), timeout)
        self.socket.sendall(f"{node}\n".encode())

    def close(self) -> None:
        with suppress(OSError):  # node 0 has ended earlier
            self.socket.sendall(_GOODBYE)
        self.socket.close()
