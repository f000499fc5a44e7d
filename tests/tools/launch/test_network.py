"""The interface on which nodes reach each other is found, and is never the loopback."""

from pathlib import Path

import pytest

from torchllm.tools.launch import network
from torchllm.tools.launch.network import address_towards, interface_towards, interface_with

pytestmark = pytest.mark.quick


def test_the_loopback_is_found_by_its_address() -> None:
    assert address_towards("localhost") == "127.0.0.1"
    assert interface_with("127.0.0.1") == "lo"
    assert interface_with("127.0.1.1") == "", "what Debian's /etc/hosts says for the host's own name"
    assert interface_with("") == ""
    assert address_towards("no-such-host.invalid") == ""


def test_the_interface_of_an_ipv6_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        "fd000000000000000000000000000007 02 40 00 80     ib0\n00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    (tmp_path / "if_inet6").write_text(table)
    monkeypatch.setattr(network, "IPV6_ADDRESSES", tmp_path / "if_inet6")
    assert interface_with("fd00::7") == "ib0"
    assert interface_with("::1") == "lo"
    assert interface_with("fd00::8") == ""
    assert interface_with("fe80::8%ib0") == ""


@pytest.fixture
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with the loopback, a network to `head`, and another one with the default route."""
    addresses = {"head": "10.0.0.7", network.ANY_HOSTS[0]: "192.168.0.7", "self": "127.0.1.1", "localhost": "127.0.0.1"}
    names = {"10.0.0.7": "ib0", "192.168.0.7": "eth0", "127.0.0.1": "lo"}
    monkeypatch.setattr(network, "address_towards", lambda host: addresses.get(host, ""))
    monkeypatch.setattr(network, "interface_with", lambda address: names.get(address, ""))


def test_the_interface_is_that_towards_the_head_or_of_the_default_route(two_networks: None) -> None:
    for host, interface in [("head", "ib0"), ("self", "eth0"), ("unknown", "eth0"), ("localhost", "")]:
        assert interface_towards(host) == interface, host


def test_a_node_without_a_network_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "address_towards", lambda host: "")
    assert interface_towards("head") == ""
