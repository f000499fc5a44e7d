import logging
from pathlib import Path

import pytest

from torchllm.checkpoint.manifest import (
    SUSPECT,
    mark,
    read_suspects,
)

pytestmark = pytest.mark.quick


def folders(root: Path, count: int) -> list[Path]:
    """Empty step folders, newest first."""
    made = [root / f"step-{step:08d}" for step in range(count, 0, -1)]
    for folder in made:
        folder.mkdir()
    return made


def test_a_mark_that_cannot_be_read_is_still_one(tmp_path: Path) -> None:
    [folder] = folders(tmp_path, 1)
    for content in (b"", b"{", b"[1]", b'{"why": 1}', b"\xff", b"[" * 200_000):
        (folder / SUSPECT).write_bytes(content)
        assert read_suspects([folder]) == {folder: "suspect.json cannot be read"}


def test_a_mark_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mark(tmp_path / "nowhere", SUSPECT, "NaN")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "nowhere/suspect.json" in record.getMessage()
