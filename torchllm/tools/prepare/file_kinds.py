"""The kinds of files by their names: which of a folder a source reads, and a description for a message."""

import os
from collections.abc import Iterable, Mapping

NO_SUFFIX = "without a suffix"
_COMPRESSED = (".gz", ".zst", ".zstd", ".bz2", ".lz4")
_LISTED = 3
"""kinds that a description names"""


def kind_of_file(path: str) -> str:
    """Return the kind of a file: its suffix, as ".txt" or ".jsonl.gz"; "hidden" or "without a suffix"."""
    name = os.path.basename(path).lower()
    if name.startswith("."):
        return "hidden"
    stem, suffix = os.path.splitext(name)
    if suffix in _COMPRESSED:
        suffix = os.path.splitext(stem)[1] + suffix
    return suffix or NO_SUFFIX


def _with_compressed(*suffixes: str) -> tuple[str, ...]:
    return tuple(suffix + ending for suffix in suffixes for ending in ("", *_COMPRESSED))


FILES_OF = {
    "text": (*_with_compressed(".txt", ".text", ".md", ".markdown", ".rst", ".tex"), NO_SUFFIX),
    "jsonl": _with_compressed(".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
}
"""kind of a source -> kinds of the files of a folder that it reads"""


def source_kind(kinds_of_files: Iterable[str]) -> str:
    """Return the kind of source that reads one of these kinds of files; "" if none does."""
    kinds = set(kinds_of_files)
    return next((kind for kind, read in FILES_OF.items() if kinds.intersection(read)), "")


def describe_suffixes(kind: str) -> str:
    """Return the suffixes of the uncompressed files of a folder that a source of this kind reads."""
    return " or ".join(suffix for suffix in FILES_OF[kind] if suffix.count(".") == 1)


def most_first(counts: Mapping[str, int]) -> list[str]:
    """Return kinds of files, the most frequent first."""
    return sorted(counts, key=lambda kind: (-counts[kind], kind))


def describe_kinds(counts: Mapping[str, int]) -> str:
    """Describe files by the numbers of their kinds: "3 .txt, 1 hidden"."""
    named = most_first(counts)[:_LISTED]
    described = [f"{counts[kind]:,} {kind}" for kind in named]
    unnamed = sum(counts.values()) - sum(counts[kind] for kind in named)
    if unnamed:
        described.append(f"{unnamed:,} others")
    return ", ".join(described)
