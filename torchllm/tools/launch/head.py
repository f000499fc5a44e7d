"""How launchers of other nodes find the launcher of node 0, the head, and report while they wait for it. No torch.

The head listens on the port that the environment gives, or else on any free one. It writes that into `FILE` of the run
folder, with the job's name: the file may still be there from an earlier job in the folder, whose port may belong to
another process by now. So a job that uses the file must have a unique name, the same on all nodes, as Slurm
gives it one (job, step and restart).
"""

import json
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torchllm.tools.launch.restarts import JobStopped
from torchllm.tools.launch.start_lines import say_line

FILE = "head.json"
"""in the run folder"""
LOOK_INTERVAL = 0.5
"""seconds between two looks for a missing node"""
SAY_AFTER = 10.0
"""seconds until the first line about a wait"""
SAY_INTERVAL = 60.0
"""seconds between two lines about a wait"""
CONNECT_TIMEOUT = 10.0
"""seconds that an attempt to connect may take"""


class HeadAddress(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class NodeMissing(Exception):
    """Timed out waiting for another node."""


class NodeWait:
    """A wait for other nodes that reports the missing node, and ends after a request to stop or a timeout."""

    def __init__(self, limit: float, stop_file: Path | None = None, *, speaks: bool = True) -> None:
        """Begin to wait, for `limit` seconds at most. stop_file: exists after a request to stop. speaks: on stderr."""
        self.limit = limit
        self.stop_file = stop_file
        self.speaks = speaks
        self.began = time.monotonic()
        self.next_line = self.began + SAY_AFTER

    def go_on(self, missing: str, advice: str) -> None:
        """Sleep until the next look. Raises NodeMissing, with advice, after the timeout; JobStopped after a request."""
        if self.stop_file is not None and self.stop_file.exists():
            raise JobStopped(f"stopped while waiting for {missing}")
        moment = time.monotonic()
        if moment - self.began > self.limit:
            raise NodeMissing(f"waited for {self.limit:g} s (run.start_timeout) for {missing}. {advice}")
        if self.speaks and moment >= self.next_line:
            self.next_line = moment + SAY_INTERVAL
            say_line(f"waiting for {missing}: {moment - self.began:.0f} s so far")
        time.sleep(LOOK_INTERVAL)


def publish_head(run_folder: Path, job: str, address: HeadAddress) -> None:
    """Write where the head of a job listens. The file appears whole. Raises OSError."""
    run_folder.mkdir(parents=True, exist_ok=True)
    unfinished = run_folder / f".{FILE}.{os.getpid()}"
    unfinished.write_text(json.dumps({"job": job, "host": address.host, "port": address.port}) + "\n")
    unfinished.replace(run_folder / FILE)


def find_head(run_folder: Path, job: str, wait: NodeWait) -> HeadAddress:
    """Wait until the head of `job` has written where it listens, and return it. Raises NodeMissing."""
    while True:
        address = read_head(run_folder, job)
        if address is not None:
            return address
        wait.go_on(
            f"node 0 to write {run_folder / FILE}",
            "Is it running, and is run.folder on a file system that all nodes share? With MASTER_PORT=PORT on all "
            "nodes they do without this file",
        )


def read_head(run_folder: Path, job: str) -> HeadAddress | None:
    """Return where the head of `job` listens; None if the file is missing, of another job, or damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        os.listdir(run_folder)  # asks the server of a network file system for new files
        content = json.loads((run_folder / FILE).read_text())
        host, port = str(content["host"]), int(content["port"])
        if content["job"] == job and re.fullmatch(r"[\w.:-]{1,255}", host) and 0 < port < 2**16:
            return HeadAddress(host, port)
    return None


def reach_head(address: HeadAddress, wait: NodeWait) -> None:
    """Wait until the head accepts connections at `address`. Raises NodeMissing that says why it does not."""
    while True:
        try:
            socket.create_connection(address, CONNECT_TIMEOUT).close()
            return
        except OSError as error:
            wait.go_on(
                f"node 0 at {address} ({error})",
                f"Is it running, does this node know {address.host} as its address, and may the nodes reach each "
                "other's ports, or does a firewall stand between them? Its output names the reason",
            )
