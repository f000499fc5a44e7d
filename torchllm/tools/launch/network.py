"""Find the network interface that connects the nodes of a job. No torch.

Gloo listens on the address that the host's own name stands for. Where /etc/hosts says 127.0.1.1 for it, as Debian
writes it, or the name belongs to a network of another purpose, the other nodes cannot connect.
"""

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

SIOCGIFADDR = 0x8915
"""Linux: the request for the IPv4 address of an interface"""
ANY_HOSTS = ("192.0.2.1", "2001:db8::1")
"""addresses that no host has (RFC 5737, RFC 3849), behind the default route; nothing is sent to them"""
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
"""Linux: the IPv6 addresses of all interfaces"""


def interface_towards(host: str) -> str:
    """Return the name of the interface through which this node reaches `host`; "" if that is the loopback, or unknown.

    If no interface has the address of `host`, as for 127.0.1.1, the interface of the default route is returned.
    """
    for target in (host, *ANY_HOSTS):
        if name := interface_with(address_towards(target)):
            return "" if name.startswith("lo") else name
    return ""


def address_towards(host: str) -> str:
    """Return this node's address on the way to `host`, IPv4 or IPv6; "" if there is no way. Nothing is sent."""
    with suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as endpoint:
                endpoint.connect(target)
                address: str = endpoint.getsockname()[0]
                return address
    return ""


def interface_with(address: str) -> str:
    """Return the name of the interface that has an address; "" if none has it, or if this is not Linux."""
    if ":" in address:
        return _interface_with_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(endpoint, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _interface_with_ipv6(address: str) -> str:
    """Return the name of the interface that has an IPv6 address; "" if none has it."""
    digits = ipaddress.IPv6Address(address.partition("%")[0]).exploded.replace(":", "")
    with suppress(OSError):
        for line in IPV6_ADDRESSES.read_text().splitlines():
            found, *_, name = line.split()
            if found == digits:
                return name
    return ""
