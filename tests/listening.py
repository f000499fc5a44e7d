"""Which addresses a process listens on, from /proc."""

import ipaddress
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LISTENING = "0A"
"""TCP_LISTEN of the kernel, as /proc/net/tcp has it"""


class ListeningAddress(NamedTuple):
    """Address and port of a socket that accepts connections."""

    address: str
    port: int


def listening_addresses(pid: int | str) -> set[ListeningAddress]:
    """Return where a process accepts connections, over IPv4 and IPv6; none if it has ended. pid: "self" is this one."""
    addresses = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        inodes = _socket_inodes(pid)
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and fields[9] in inodes:
                    addresses.add(_parse(fields[1]))
    return addresses


def _socket_inodes(pid: int | str) -> set[str]:
    inodes = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{descriptor}")):
                inodes.add(match[1])
    return inodes


def _parse(text: str) -> ListeningAddress:
    """Return the address in a line of /proc/net/tcp: 32-bit words in the machine's byte order, in hexadecimal."""
    words, port = text.split(":")
    raw = b"".join(socket.htonl(int(words[i : i + 8], 16)).to_bytes(4, "big") for i in range(0, len(words), 8))
    return ListeningAddress(str(ipaddress.ip_address(raw)), int(port, 16))
