"""Which files torchllm chose before it left out test sets, held out by name in all kinds and followed links.

A run that began with them goes on with them. These rules never change.
"""

import glob
import os
import re
from pathlib import Path

from torchllm.config import Source
from torchllm.tools.prepare.chosen_files import choose_files
from torchllm.tools.prepare.source_files import ChosenFiles, stat_file

_SUFFIXES = {"jsonl": (".jsonl", ".ndjson", ".json"), "parquet": (".parquet",)}
_HELD_OUT = re.compile(r"(^|[^a-z])(val|valid|validation)([^a-z]|$)", re.IGNORECASE)
"""in the name of a token file, or for MDS of its folder"""


def earlier_files(source: Source) -> ChosenFiles:
    """Return the files of a raw source: all are trained, and nothing behind a link to a folder is."""
    if source.kind in ("hub", "stdlib"):
        return choose_files(source)
    pattern = source.path
    matches = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
    if matches == [pattern] and os.path.isdir(pattern):
        paths = []
        suffixes = _SUFFIXES.get(source.kind, ("",))
        for inside, folders, names in os.walk(pattern):
            folders[:] = [name for name in folders if not name.startswith(".")]
            taken = [name for name in names if not name.startswith(".") and name.endswith(suffixes)]
            paths += [os.path.join(inside, name) for name in taken]
    else:
        paths = [path for path in matches if not os.path.isdir(path)]
    return ChosenFiles([stat_file(path) for path in sorted(paths)], [])


def earlier_token_files(source: Source, pattern: str) -> ChosenFiles:
    """Return the token files of another program; pattern: of their names. A test set is trained."""
    path = Path(source.path)
    if source.kind == "megatron" and not path.exists() and path.with_name(path.name + ".idx").is_file():
        found = [path.with_name(path.name + ".idx")]
    elif path.is_dir():
        found = sorted(path.rglob(pattern))
    elif path.exists():
        found = [path.with_suffix(".idx") if source.kind == "megatron" else path]
    else:
        found = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).match(pattern))
    files = ChosenFiles([], [])
    for file in found:
        name = file.parent.name if source.kind == "mds" else file.name
        split = files.held_out if _HELD_OUT.search(name) else files.train
        split.append(stat_file(str(file)))
    return files if files.train else ChosenFiles(files.held_out, [])
