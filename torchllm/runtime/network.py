"""Find the network interface on which the nodes of a job reach each other. No torch.

Gloo listens on the address that the host's own name stands for. Where /etc/hosts says 127.0.1.1 for it, as Debian
writes it, or the name belongs to a network of another purpose, the other nodes cannot connect.
"""

import fcntl
import socket
import struct
from contextlib import suppress

SIOCGIFADDR = 0x8915
"""Linux: the request for the IPv4 address of an interface"""
ANY_HOST = "192.0.2.1"
"""an address that no host has (RFC 5737), behind the default route; nothing is sent to it"""


def interface_towards(host: str) -> str:
    """Return the name of the interface through which this node reaches `host`; "" if that is the loopback, or unknown.

    Where no interface has the address that `host` stands for, as for 127.0.1.1, it is that of the default route.
    """
    name = interface_with(address_towards(host)) or interface_with(address_towards(ANY_HOST))
    return "" if name.startswith("lo") else name


def address_towards(host: str) -> str:
    """Return this node's IPv4 address on the way to `host`; "" if there is no way. Nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        endpoint.connect((host, 9))
        address: str = endpoint.getsockname()[0]
        return address
    return ""


def interface_with(address: str) -> str:
    """Return the name of the interface that has an IPv4 address; "" if none has it, or if this is not Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(endpoint, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
