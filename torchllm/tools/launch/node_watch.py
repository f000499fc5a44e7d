"""Notice that the launcher of another node is gone: node 0 holds a connection to each, and sees its end. No torch.

A killed process closes its connections at once, whatever it was doing. A node that loses its power or its network does
not: its ranks are missed after run.timeout (`hang_watch`), and a network that recovers in time does no harm.
"""

import re
import selectors
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
        self.listener = socket.create_server(("", 0), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=is_dual)
        self.port: int = self.listener.getsockname()[1]
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.received: dict[socket.socket, bytes] = {}
        """data received from each connection so far"""
        threading.Thread(target=self._watch, name="node watch", daemon=True).start()

    def _watch(self) -> None:
        """Accept connections and read from them, for as long as this process lives."""
        while True:
            for ready, _ in self.selector.select():
                if ready.fileobj is self.listener:
                    connection, _ = self.listener.accept()
                    self.received[connection] = b""
                    self.selector.register(connection, selectors.EVENT_READ)
                elif isinstance(ready.fileobj, socket.socket):
                    self._read(ready.fileobj)

    def _read(self, connection: socket.socket) -> None:
        """Read data from a launcher, or notice that it is gone."""
        try:
            data = connection.recv(_LONGEST)
        except ConnectionError:
            data = b""
        self.received[connection] += data
        if data and len(self.received[connection]) <= _LONGEST:
            return
        self.selector.unregister(connection)
        connection.close()
        # A node's number without a goodbye: neither an orderly end, nor a stranger who sent something else.
        lost = re.fullmatch(rb"([0-9]{1,7})\n", self.received.pop(connection))
        if lost:
            self.on_lost(int(lost[1]))


class NodeConnection:
    """Another node's end of its connection."""

    def __init__(self, address: str, port: int, node: int, timeout: float) -> None:
        """Connect node `node` to the watch of node 0 at `address`. Raises OSError."""
        self.socket = socket.create_connection((address, port), timeout)
        self.socket.sendall(f"{node}\n".encode())

    def close(self) -> None:
        """Close the connection normally."""
        with suppress(OSError):  # node 0 has ended earlier
            self.socket.sendall(_GOODBYE)
        self.socket.close()
