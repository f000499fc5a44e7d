"""The store of a job, and who can reach it."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.listening import listening_addresses
from torchllm.tools.launch.store import LOOPBACK, Signer, connect_store, serve_loopback_store, serve_store

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


def test_a_signed_text_is_read_with_the_same_secret_only() -> None:
    signer = Signer(b"secret of the job")
    signed = signer.sign("20261122-101112").encode()
    assert Signer(b"secret of the job").verify(signed) == "20261122-101112"
    assert Signer(b"another secret").verify(signed) is None


@pytest.mark.parametrize(
    "change", [lambda v: v[:-1], lambda v: v + b"0", lambda v: v[70:], lambda v: b"\xff", lambda v: b""]
)
def test_what_nobody_has_signed_is_no_text(change: Callable[[bytes], bytes]) -> None:
    signer = Signer(b"secret of the job")
    assert signer.verify(change(signer.sign("a text of several words").encode())) is None
