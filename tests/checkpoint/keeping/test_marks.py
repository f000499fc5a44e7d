import logging
from pathlib import Path

import pytest

from torchllm.checkpoint.manifest import (
    SUSPECT,
    CheckpointError,
    find_proven,
    mark_proven,
    mark_suspect,
    read_suspects,
    without_suspects,
)

pytestmark = pytest.mark.quick


def folders(root: Path, count: int) -> list[Path]:
    """Empty step folders, newest first."""
    made = [root / f"step-{step:08d}" for step in range(count, 0, -1)]
    for folder in made:
        folder.mkdir()
    return made


def test_marks_are_read_as_they_were_written(tmp_path: Path) -> None:
    newest, middle, oldest = folders(tmp_path, 3)
    assert (read_suspects([newest, middle, oldest]), find_proven([newest, middle, oldest])) == ({}, None)
    mark_proven(oldest, "it went on")
    mark_proven(middle, "it went on")
    mark_suspect(newest, "NaN")
    assert read_suspects([newest, middle, oldest]) == {newest: "NaN"}
    assert find_proven([newest, middle, oldest]) == middle
    assert sorted(path.name for path in newest.iterdir()) == ["suspect.json"]  # and no temporary file


def test_a_mark_that_cannot_be_read_is_still_one(tmp_path: Path) -> None:
    [folder] = folders(tmp_path, 1)
    for content in (b"", b"{", b"[1]", b'{"why": 1}', b"\xff", b"[" * 200_000):
        (folder / SUSPECT).write_bytes(content)
        assert read_suspects([folder]) == {folder: "suspect.json cannot be read"}


def test_a_mark_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mark_suspect(tmp_path / "nowhere", "NaN")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "nowhere/suspect.json" in record.getMessage()


def test_suspects_are_skipped_with_a_warning_of_each_that_is_newer(tmp_path: Path) -> None:
    newest, second, third, oldest = folders(tmp_path, 4)
    warnings: list[str] = []
    suspects = {newest: "NaN", second: "flipped tokens", oldest: "NaN"}
    assert without_suspects([newest, second, third, oldest], suspects, warnings.append) == [third]
    assert [text.split(" is skipped")[0] for text in warnings] == [
        "SUSPECT CHECKPOINT step-00000004",
        "SUSPECT CHECKPOINT step-00000003",
    ]
    assert warnings[1].endswith("flipped tokens")
    assert without_suspects([], {}, warnings.append) == []
    with pytest.raises(
        CheckpointError, match=r"every checkpoint in .* is marked as suspect: name one .*\n  step-00000004: NaN"
    ):
        without_suspects([newest], {newest: "NaN"}, warnings.append)
