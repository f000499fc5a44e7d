"""Hosts of one machine: namespaces of the kernel, each with a network, a name and process ids of its own.

Needs Linux and root. A host lives as long as its first process, which waits for the end of its standard input: when the
test process closes that pipe, or dies, the kernel kills whatever runs on the host and removes its network. So nothing
is left behind, however a test ends.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.patience import patience

NAMESPACES = ["--net", "--uts", "--ipc", "--mount", "--pid"]
SUBNETS = {4: "10.213.77.{}/24", 6: "fd00:213:77::{}/64"}
"""of the hosts, by version of IP; only they see it"""
FIRST_PROCESS = "read -r _"
"""in bash, which waits for processes that lost their parent, as a first process must"""
PATIENCE = patience(20)


def can_make_hosts() -> bool:
    """Return whether this process may make namespaces, and the programs for it are there."""
    try:
        done = subprocess.run(["unshare", *NAMESPACES, "--fork", "ip", "link"], capture_output=True)
    except FileNotFoundError:
        return False
    return done.returncode == 0


class Network:
    """Hosts that reach each other through a switch, and nobody else."""

    def __init__(self, names: list[str], folder: Path, version: int = 4) -> None:
        """Make hosts with these names, of at most 15 letters. folder: for the file with their addresses.

        version: of IP, the only one that they speak with each other.
        """
        self.subnet = SUBNETS[version]
        self._switch = subprocess.Popen(["unshare", "--net", "bash", "-c", FIRST_PROCESS], stdin=subprocess.PIPE)
        _wait_for_namespace(self._switch.pid, "net")
        self._at_switch("ip", "link", "add", "switch", "type", "bridge")
        self._at_switch("ip", "link", "set", "switch", "up")
        addresses = {name: self.subnet.format(number).split("/")[0] for number, name in enumerate(names, start=1)}
        table = folder / "hosts"
        table.write_text(
            {4: "127.0.0.1", 6: "::1"}[version]
            + " localhost\n"
            + "".join(f"{addresses[name]} {name}\n" for name in names)
        )
        self.hosts = {name: self._add(name, addresses[name], table) for name in names}

    def _add(self, name: str, address: str, table: Path) -> "Host":
        """Make a host and connect it with the switch."""
        host = Host(name, address, table)
        self._at_switch("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self._at_switch("ip", "link", "set", name, "master", "switch", "up")
        host.run("ip", "address", "add", f"{address}/{self.subnet.split('/')[1]}", "dev", "eth0", "nodad")
        host.run("ip", "link", "set", "eth0", "up")
        return host

    def cut(self, name: str) -> None:
        """Pull a host's cable out of the switch."""
        self._at_switch("ip", "link", "set", name, "down")

    def join(self, name: str) -> None:
        """Put a host's cable back."""
        self._at_switch("ip", "link", "set", name, "up")

    def lose(self, name: str) -> None:
        """Take the power from a host: it is silent at once, and closes no connection."""
        self._at_switch("ip", "link", "delete", name)
        self.hosts[name].close()

    def replace(self, name: str) -> "Host":
        """Make a lost host anew."""
        lost = self.hosts[name]
        self.hosts[name] = self._add(name, lost.address, lost.table)
        return self.hosts[name]

    def close(self) -> None:
        """Remove all hosts with what runs on them."""
        for host in self.hosts.values():
            host.close()
        _end(self._switch)

    def _at_switch(self, *command: str) -> None:
        subprocess.run(["nsenter", "--target", str(self._switch.pid), "--net", "--", *command], check=True)


class Host:
    """One of them. Files are those of this machine, but for /run, /dev/shm and /etc/hosts."""

    def __init__(self, name: str, address: str, table: Path) -> None:
        self.name = name
        self.address = address
        self.table = table
        """its /etc/hosts"""
        command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "bash", "-c", FIRST_PROCESS]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.pid = _wait_for_child(self._process)
        """of its first process, as this machine counts"""
        self._namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        self.run("bash", "-c", f"echo {name} >/proc/sys/kernel/hostname")
        self.run("mount", "--bind", str(table), "/etc/hosts")
        self.run("mount", "-t", "tmpfs", "tmpfs", "/run")
        self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        self.run("ip", "link", "set", "lo", "up")

    def command(self, *words: str) -> list[str]:
        """Return the command that runs `words` on this host."""
        return ["nsenter", "--target", str(self.pid), *NAMESPACES, "--", *words]

    def run(self, *words: str, **options: Any) -> str:
        """Run a command on this host; return what it prints. Raises CalledProcessError."""
        done = subprocess.run(self.command(*words), check=True, stdout=subprocess.PIPE, text=True, **options)
        return done.stdout

    def start(self, *words: str, **options: Any) -> "subprocess.Popen[bytes]":
        """Start a command on this host."""
        return subprocess.Popen(self.command(*words), **options)

    def processes(self) -> dict[int, str]:
        """Return the command lines of what runs on this host, by the process ids of this machine."""
        commands = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                is_first = int(process.name) == self.pid
                if not is_first and os.readlink(process / "ns/pid") == self._namespace:
                    commands[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ").strip()
        return {pid: command for pid, command in commands.items() if command}  # a zombie has none

    def is_alive(self) -> bool:
        """Return whether the host has not been closed."""
        return self._process.poll() is None

    def close(self) -> None:
        """Kill what runs on this host and remove it."""
        _end(self._process)
        deadline = time.monotonic() + PATIENCE
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.01)


@contextmanager
def network(names: list[str], folder: Path, version: int = 4) -> Iterator[Network]:
    """Make a network, and remove it at the end."""
    made = Network(names, folder, version)
    try:
        yield made
    finally:
        made.close()


def _wait_for_child(process: "subprocess.Popen[bytes]") -> int:
    """Return the id of the process that `unshare` has forked, once it runs its command."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert process.poll() is None, "unshare has failed"
        with suppress(OSError, IndexError):
            child = int(children.read_text().split()[0])
            if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"bash\0"):
                return child
        time.sleep(0.005)
    raise TimeoutError("unshare has not started its command")


def _wait_for_namespace(pid: int, kind: str) -> None:
    """Wait until a process has left this process's namespace."""
    deadline = time.monotonic() + PATIENCE
    while os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}"):
        assert time.monotonic() < deadline, "unshare has made no namespace"
        time.sleep(0.005)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a first process, or the `unshare` whose child it is."""
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
