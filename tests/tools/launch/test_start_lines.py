"""A start is not silent while torch is imported."""

import importlib
import os
from pathlib import Path

import pytest

from torchllm.config.environment import RANK_NOTES
from torchllm.tools.launch import launcher_notes, start_lines

pytestmark = pytest.mark.quick


def test_a_line_every_ten_seconds_until_a_rank_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RANK_NOTES, str(tmp_path))
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            launcher_notes.join(1)

    monkeypatch.setattr(start_lines.time, "monotonic", lambda: sum(slept))
    start_lines._speak(start_lines._ranks_import, sleep)
    assert slept == [10.0, 10.0, 10.0]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["importing torch: 10 s so far", "importing torch: 20 s so far"]


def test_another_node_says_that_it_has_joined_and_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    for attempt in (1, 2):
        start_lines.say_that_nodes_have_joined(1, 2, attempt)
    host = os.uname().nodename
    assert capsys.readouterr().err.splitlines() == [
        f"node 1 is {host}: all 2 nodes have joined",
        f"node 1 is {host}: all 2 nodes have started again, attempt 2; node 0's output says why",
    ]


def test_a_process_without_a_launcher_sees_whether_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "from torchllm.tools.launch import start_lines\n"
        "slept = iter([10.0, 10.0])\n"
        "def sleep(seconds):\n"
        "    if next(slept, None) is None: raise TimeoutError\n"
        "try:\n"
        "    start_lines._speak(start_lines._this_imports, sleep)\n"
        "except TimeoutError: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("slow_to_import")
    assert capsys.readouterr().err.count("importing torch: 0 s so far") == 2
    start_lines._speak(start_lines._this_imports, lambda seconds: None)
    assert capsys.readouterr().err == ""
