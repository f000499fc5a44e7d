"""Hosts in namespaces, on which the tests of clusters build."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launched import ends
from tests.namespaces import Network, can_make_hosts, network

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="making namespaces needs root, unshare and ip")

ANSWER = """
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    connection.close()
"""
CALL = "import socket; socket.create_connection(('first', 5000), 1.0)"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Network]:
    """Two hosts; the first accepts connections."""
    with network(["first", "second"], tmp_path) as made:
        server = made.hosts["first"].start(sys.executable, "-c", ANSWER, stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield made
    server.wait()
    server.stdout.close()


def reaches_first(pair: Network) -> bool:
    """Whether the second host can connect to the first."""
    command = pair.hosts["second"].command(sys.executable, "-c", CALL)
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def test_hosts_have_names_and_reach_each_other_until_a_link_is_cut(pair: Network) -> None:
    assert pair.hosts["second"].run("cat", "/proc/sys/kernel/hostname") == "second\n"
    assert reaches_first(pair)
    pair.cut("second")
    assert not reaches_first(pair)
    pair.join("second")
    assert reaches_first(pair)
    pair.lose("second")
    pair.replace("second")
    assert reaches_first(pair)


def test_a_host_ends_with_all_its_processes(pair: Network) -> None:
    (pid,) = pair.hosts["first"].processes()
    assert pair.hosts["second"].processes() == {}
    pair.close()
    assert ends(pid)


def test_a_killed_test_leaves_no_host(tmp_path: Path) -> None:
    code = "from tests.namespaces import Network; from pathlib import Path; import sys, time\n"
    code += "n = Network(['alone'], Path(sys.argv[1])); print(n.hosts['alone'].pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    assert ends(first)
