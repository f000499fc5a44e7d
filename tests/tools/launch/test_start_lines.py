"""A start is not silent while torch is imported."""

import importlib
import os
from pathlib import Path

import pytest

from torchllm.tools.launch import start_lines

pytestmark = pytest.mark.quick


def test_another_node_says_that_it_has_joined_and_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    for attempt in (1, 2):
        start_lines.say_that_nodes_have_joined(1, 2, attempt)
    host = os.uname().nodename
    assert capsys.readouterr().err.splitlines() == [
        f"node 1 is {host}: all 2 nodes have joined",
        f"node 1 is {host}: all 2 nodes have started again, attempt 2; node 0's output says why",
    ]


def test_a_line_every_ten_seconds_while_this_process_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "from torchllm.tools.launch import start_lines\n"
        "slept = iter([10.0, 10.0])\n"
        "def sleep(seconds):\n"
        "    if next(slept, None) is None: raise TimeoutError\n"
        "try:\n"
        "    start_lines._speak(sleep)\n"
        "except TimeoutError: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("slow_to_import")
    assert capsys.readouterr().err.count("importing torch: 0 s so far") == 2
    start_lines._speak(lambda seconds: None)
    assert capsys.readouterr().err == ""
