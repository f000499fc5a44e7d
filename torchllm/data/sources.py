"""Read raw sources as text records, through `datasets`: a source is read once and memory-mapped afterwards.

Everything that can be wrong with a record is found here and written into the record, with file and line (or row), so
that reading continues and `data.on_bad_record` decides later. The readers of `datasets` stop at the first bad byte and
do not say where it is, hence the generators.
"""

import glob
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchllm.config import Source
from torchllm.data.error import DataError

if TYPE_CHECKING:  # 1 s of imports that a run with cached tokens never needs
    import datasets

_NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""folders of the standard library that are not read"""


class SourceFile(NamedTuple):
    """A file of a source, and what decides whether it has to be read again."""

    path: str
    size: int
    """in bytes"""
    changed_ns: int
    """time of its last change, in nanoseconds since 1970"""


class TextRecord(NamedTuple):
    """One record of a source: a document, or what is wrong with it."""

    text: str
    """empty if the record has a fault"""
    where: str
    """file, file:line, or file and row"""
    fault: str = ""
    """kind of fault, such as "not UTF-8"; empty for a good record"""
    detail: str = ""
    """of the fault, for the error message"""


def source_files(source: Source) -> list[SourceFile]:
    """Return the files of a raw source, sorted by path; a source of the hub has none.

    Raises DataError if data.sources.path matches no file.
    """
    if source.kind == "hub":
        return []
    if source.kind == "stdlib":
        return [_source_file(path) for path in _stdlib_paths()]
    pattern = os.path.expanduser(source.path)
    # A path that exists is taken literally: its name may hold characters that mean something in a glob.
    matches = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
    paths = sorted(path for path in matches if not os.path.isdir(path))
    if not paths and os.path.isdir(pattern):
        suffix = "txt" if source.kind == "text" else source.kind
        inside = os.path.join(source.path, f"*.{suffix}")
        raise DataError(f"data.sources: {source.path!r} is a folder; write {inside!r} for the files in it")
    if not paths:
        raise DataError(f"data.sources: no file matches {source.path!r} (kind {source.kind!r})")
    return [_source_file(path) for path in paths]


def _stdlib_paths() -> Iterator[str]:
    """Yield the .py files of the running Python's standard library, without tests and installed packages."""
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(name for name in folders if name not in _NOT_CORPUS)
        for name in sorted(files):
            path = os.path.join(folder, name)
            if name.endswith(".py") and os.path.isfile(path) and os.path.getsize(path):
                yield path


def _source_file(path: str) -> SourceFile:
    """Return size and time of change of a file."""
    try:
        status = os.stat(path)
    except OSError:
        return SourceFile(path, 0, 0)  # a dangling link: a bad record when it is read
    return SourceFile(path, status.st_size, status.st_mtime_ns)


def read_source(source: Source, cache: Path, processes: int = 1) -> "datasets.Dataset":
    """Read a raw source into a memory-mapped data set under `cache`; `read_records` returns its records.

    Raises DataError for what concerns more than one record: a hub data set that cannot be loaded, a missing column.
    """
    import datasets

    if source.kind == "hub":
        return _load_from_hub(source)
    files = source_files(source)
    readers = {
        "stdlib": _text_records,
        "text": _text_records,
        "jsonl": _jsonl_records,
        "parquet": _parquet_records,
    }
    features = datasets.Features({name: datasets.Value("large_string") for name in TextRecord._fields})
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    processes = min(processes, len(files))
    return datasets.Dataset.from_generator(
        readers[source.kind],
        features=features,
        cache_dir=str(cache),
        gen_kwargs={"files": files, "key": source.text_key},
        num_proc=processes if processes > 1 else None,
    )


def raw_mib(source: Source, files: Sequence[SourceFile]) -> float | None:
    """Return the size of a source, in MiB; None if it is a data set of the hub that does not say its size."""
    if source.kind != "hub":
        return sum(file.size for file in files) / 2**20
    import datasets

    with _hub_errors(source):
        splits = datasets.load_dataset_builder(source.path).info.splits or {}
        return splits[source.split].num_bytes / 2**20 if source.split in splits else None


def _load_from_hub(source: Source) -> "datasets.Dataset":
    """Load the text column of a split of a data set of the hub."""
    import datasets

    with _hub_errors(source):
        dataset = datasets.load_dataset(source.path, split=source.split)
    if source.text_key not in dataset.column_names:
        columns = ", ".join(dataset.column_names)
        raise DataError(f"data.sources: {source.path!r} has no column {source.text_key!r}, it has: {columns}")
    return dataset.select_columns([source.text_key])


@contextmanager
def _hub_errors(source: Source) -> Iterator[None]:
    """Turn any error, from an unknown name to a missing network, into a DataError that names the source."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"data.sources: cannot load split {source.split!r} of {source.path!r}: {reason}") from error


def read_records(dataset: "datasets.Dataset", source: Source, start: int, stop: int) -> list[TextRecord]:
    """Return the records start <= i < stop of a data set that `read_source` returned."""
    columns: dict[str, list[Any]] = dataset[start:stop]
    if source.kind != "hub":
        fields = zip(columns["text"], columns["where"], columns["fault"], columns["detail"], strict=True)
        return [TextRecord(*values) for values in fields]
    texts = columns[source.text_key]
    name = f"{source.path}[{source.split}]"
    return [_checked_record(text, f"{name} row {number}") for number, text in enumerate(texts, start=start)]


def _checked_record(text: object, where: str, whole_file: bool = False) -> TextRecord:
    """Return a record of `text`, with its fault if it has one; for a whole file `where` gets the line of the fault."""
    if not isinstance(text, str):
        return TextRecord("", where, "not text", f" but {type(text).__name__}")
    if not text.strip():
        return TextRecord("", where, "empty document")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        return TextRecord("", f"{where}:{line}" if whole_file else where, "NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        return TextRecord("", where, "half of a surrogate pair", " (not Unicode text)")
    return TextRecord(text, where)


def _not_utf8(raw: bytes, error: UnicodeDecodeError, path: str, line: int) -> TextRecord:
    """Return the record of bytes that are not UTF-8 and begin in `line` of a file; it names the line of the error."""
    line += raw.count(b"\n", 0, error.start)
    return TextRecord("", f"{path}:{line}", "not UTF-8", f" (byte 0x{raw[error.start]:02x})")


def _text_records(files: Sequence[SourceFile], key: str) -> Iterator[dict[str, str]]:
    """Yield a record per text file."""
    for path, _, _ in files:
        try:
            raw = Path(path).read_bytes()
            record = _checked_record(raw.decode("utf-8-sig"), path, whole_file=True)
        except OSError as error:
            record = TextRecord("", path, "unreadable file", f" ({error.strerror})")
        except UnicodeDecodeError as error:
            record = _not_utf8(raw, error, path, line=1)
        yield record._asdict()


def _jsonl_records(files: Sequence[SourceFile], key: str) -> Iterator[dict[str, str]]:
    """Yield a record per line of JSON; blank lines are none."""
    for path, _, _ in files:
        empty = True
        try:
            with open(path, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        empty = False
                        yield _json_record(line, path, number, key)._asdict()
            if empty:
                yield TextRecord("", path, "empty file")._asdict()
        except OSError as error:
            yield TextRecord("", path, "unreadable file", f" ({error.strerror})")._asdict()


def _json_record(line: bytes, path: str, number: int, key: str) -> TextRecord:
    """Return the record of line `number` of a file, whose text is under `key`."""
    where = f"{path}:{number}"
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return _not_utf8(line, error, path, number)
    except (ValueError, RecursionError) as error:
        return TextRecord("", where, "broken JSON", f" ({error})")
    if not isinstance(fields, dict):
        return TextRecord("", where, "not a JSON object", f" but {type(fields).__name__}")
    if key not in fields:
        names = ", ".join(fields) or "nothing"
        return TextRecord("", where, "wrong key", f": no {key!r}, it has: {names} (data.sources.text_key)")
    return _checked_record(fields[key], where)


def _parquet_records(files: Sequence[SourceFile], key: str) -> Iterator[dict[str, str]]:
    """Yield a record per row of the column `key`."""
    import pyarrow
    import pyarrow.parquet

    for path, _, _ in files:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                number = 0
                if key not in names:
                    detail = f": no column {key!r}, it has: {', '.join(names)}"
                    yield TextRecord("", path, "wrong key", detail)._asdict()
                    continue
                for batch in file.iter_batches(batch_size=1000, columns=[key]):
                    for text in batch.column(0).to_pylist():
                        yield _checked_record(text, f"{path} row {number}")._asdict()
                        number += 1
                if not number:
                    yield TextRecord("", path, "empty file")._asdict()
        except (OSError, pyarrow.ArrowException) as error:
            yield TextRecord("", path, "unreadable file", f" ({error})")._asdict()
