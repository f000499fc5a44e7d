"""The store of a job, and who can reach it."""

from datetime import timedelta
from pathlib import Path

import pytest

from tests.listening import listening_addresses
from torchllm.tools.launch.store import LOOPBACK, connect_store, serve_loopback_store, serve_store

TIMEOUT = timedelta(seconds=20)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc: nobody can say who listens")
def test_a_loopback_store_listens_on_the_loopback_address_only() -> None:
    store = serve_loopback_store(0, TIMEOUT)
    client = connect_store(LOOPBACK, store.port, TIMEOUT)
    client.set("key", "value")
    assert store.get("key") == b"value"
    addresses = listening_addresses("self")
    assert (LOOPBACK, store.port) in addresses
    assert [address for address, port in addresses if port == store.port] == [LOOPBACK]
    del client, store

    public = serve_store("localhost", 0, TIMEOUT)  # the control: torch listens to everybody
    assert [address for address, port in listening_addresses("self") if port == public.port] in (["::"], ["0.0.0.0"])
