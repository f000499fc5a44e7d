"""Choose the files of a raw source: Python's standard library, or the files at data.sources.path."""

import os
import sysconfig
from collections.abc import Iterator

from torchllm.config import Source
from torchllm.tools.prepare.source_files import ChosenFiles, SourceFile, stat_file

_NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""folders of the standard library that are not read"""


def source_files(source: Source, by_name: bool = True) -> list[SourceFile]:
    """Return all files of a raw source that are read, those that are held out by their names last."""
    chosen = choose_files(source, by_name)
    return [*chosen.train, *chosen.held_out]


def choose_files(source: Source, by_name: bool = True) -> ChosenFiles:
    """Return the files of a raw source, sorted by path; a source of the hub has none.

    by_name: False for data.validation, which is read whole. DataError if data.sources.path has none to train on.
    """
    if source.kind == "hub":
        return ChosenFiles([], [])
    if source.kind == "stdlib":
        return ChosenFiles([stat_file(path) for path in _stdlib_paths()], [])
    from torchllm.tools.prepare.files_at_path import files_at_path  # Python's own files and the hub need no search

    return files_at_path(source, by_name)


def _stdlib_paths() -> Iterator[str]:
    """Yield the .py files of the running Python's standard library, without tests and installed packages."""
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(name for name in folders if name not in _NOT_CORPUS)
        for name in sorted(files):
            path = os.path.join(folder, name)
            if name.endswith(".py") and os.path.isfile(path) and os.path.getsize(path):
                yield path
