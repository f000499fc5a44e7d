"""A start is not silent while torch is imported."""

from pathlib import Path

import pytest

from torchllm.runtime import launcher_notes
from torchllm.tools.launch import rank_notes, start_lines

pytestmark = pytest.mark.quick


def test_a_line_every_ten_seconds_until_a_rank_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(launcher_notes.FOLDER, raising=False)  # before the first attempt
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            monkeypatch.setenv(launcher_notes.FOLDER, str(tmp_path))
        if len(slept) == 3:
            rank_notes.join(1)

    monkeypatch.setattr(start_lines.time, "monotonic", lambda: sum(slept))
    start_lines._speak(sleep)
    assert slept == [10.0, 10.0, 10.0]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["importing torch: 10 s so far", "importing torch: 20 s so far"]
