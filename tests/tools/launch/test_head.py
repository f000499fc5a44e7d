"""How a node finds the first one, and what it says while it does not."""

import json
import socket
import threading
from pathlib import Path

import pytest

from tests.patience import patience
from tests.tiny_run import free_port
from torchllm.tools.launch import head
from torchllm.tools.launch.head import (
    FILE,
    HeadAddress,
    NodeMissing,
    NodeWait,
    find_head,
    publish_head,
    reach_head,
    read_head,
)

JOB = "70123.0.1"
ADDRESS = HeadAddress("node-1.example", 23456)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOOK_INTERVAL", 0.02)
    monkeypatch.setattr(head, "SAY_INTERVAL", 0.1)
    monkeypatch.setattr(head, "SAY_AFTER", 0.0)


def test_a_node_waits_for_the_file_of_its_own_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    publish_head(folder, "70123.0.0", ADDRESS)  # the same job, before it was requeued
    timer = threading.Timer(0.3, publish_head, (folder, JOB, ADDRESS))
    timer.start()
    assert find_head(folder, JOB, NodeWait(patience(20))) == ADDRESS
    timer.join()
    assert [file.name for file in folder.iterdir()] == [FILE]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"waiting for node 0 to write {folder}/head.json: 0 s so far"
    assert len(lines) <= 3


def test_a_file_that_is_not_this_jobs_is_no_address(tmp_path: Path) -> None:
    for number, content in enumerate(
        [
            "",
            "[]",
            '{"job": "70123.0.1", "host": "node1"}',
            json.dumps({"job": "70123", "host": "node1", "port": 23456}),
            json.dumps({"job": JOB, "host": "node1", "port": 0}),
            json.dumps({"job": JOB, "host": "node1", "port": 70000}),
            json.dumps({"job": JOB, "host": "node1", "port": None}),
            json.dumps({"job": JOB, "host": "node1/../x y", "port": 23456}),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / FILE).write_text(content)
        assert read_head(folder, JOB) is None, content
        assert read_head(folder / "missing", JOB) is None, content


def test_a_head_that_does_not_answer_is_named_with_its_address(capfd: pytest.CaptureFixture[str]) -> None:
    for host, reason in [("127.0.0.1", "Connection refused"), ("no-such-host.invalid", "")]:
        address = HeadAddress(host, free_port())
        with pytest.raises(NodeMissing, match=rf"for node 0 at {address} \(.*{reason}.*firewall"):
            reach_head(address, NodeWait(patience(0.5)))
        assert f"waiting for node 0 at {address} (" in capfd.readouterr().err, host


def test_a_rank_that_is_not_the_first_of_its_node_waits_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NodeMissing):
        reach_head(HeadAddress("127.0.0.1", free_port()), NodeWait(0.3, speaks=False))
    assert capfd.readouterr().err == ""


def test_a_head_that_comes_late_is_reached() -> None:
    port = free_port()
    listeners: list[socket.socket] = []
    timer = threading.Timer(0.3, lambda: listeners.append(socket.create_server(("127.0.0.1", port))))
    timer.start()
    reach_head(HeadAddress("127.0.0.1", port), NodeWait(patience(20)))
    timer.join()
    listeners[0].close()
