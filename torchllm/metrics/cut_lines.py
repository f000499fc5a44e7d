"""Cuts lines off a file of JSON lines: see `JsonLines` in `sinks.py`."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger("torchllm")

BLOCK = 2**16
"""bytes of a file that are read at once from its end"""


def cut_lines_after(path: Path, start: int) -> None:
    """Cut off all behind the last record of a step up to `start`."""
    with path.open("r+b") as file:
        length = cut_position(file, start)
        if length < file.seek(0, os.SEEK_END):
            os.ftruncate(file.fileno(), length)
            os.fsync(file.fileno())


def cut_position(file: BinaryIO, start: int) -> int:
    """Return the length of a metrics.jsonl up to its last record of a step up to `start`."""
    length = file.seek(0, os.SEEK_END)
    for line in lines_from_end(file):
        step = _step_of(line)
        if step is not None and step <= start:
            break
        length -= len(line)
        if step is None:
            log.warning(
                "%s: %d bytes from byte %d on are not the record of a step; dropped", file.name, len(line), length
            )
    return length


def lines_from_end(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends, the last one first; the file is read in blocks from its end."""
    position = file.seek(0, os.SEEK_END)
    unfinished = b""
    """the begin of the earliest line read so far, as far as it was read"""
    while position > 0:
        size = min(BLOCK, position)
        position -= size
        file.seek(position)
        first, *lines = (file.read(size) + unfinished).splitlines(keepends=True)
        yield from reversed(lines)
        unfinished = first
    if unfinished:
        yield unfinished


def _step_of(line: bytes) -> int | None:
    """Return the step of a line of metrics.jsonl; None if the line is no record, or not complete."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) and line.endswith(b"\n") else None
