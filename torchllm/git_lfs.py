"""Detect pointers of git-lfs: small text files in place of files that were not fetched."""

from pathlib import Path

_FIRST_LINE = b"version https://git-lfs.github.com/spec/"
_LARGEST = 1024
"""bytes of a pointer, by the specification"""


def why_pointer(path: str | Path, size: int) -> str:
    """Return advice if a file of `size` bytes is only a pointer; "" if it is none."""
    if not len(_FIRST_LINE) < size < _LARGEST:
        return ""
    try:
        with open(path, "rb") as file:
            if file.read(len(_FIRST_LINE)) != _FIRST_LINE:
                return ""
    except OSError:
        return ""
    return "is a pointer of git-lfs in place of the file: run `git lfs pull` in its folder, or download it again"
