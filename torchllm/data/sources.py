"""Raw sources as rows of text, through `datasets`: read once, memory-mapped afterwards.

Everything that can be wrong with a record is found here and written into its row, with file and line (or row), so that
reading goes on and `data.on_bad_record` decides later. `datasets` readers of its own stop at the first bad byte and do
not say where, hence the generators.
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

SourceFile = tuple[str, int, int]
"""path, bytes, time of the last change in ns: what decides whether a file has to be read again"""
_NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class TextRecord(NamedTuple):
    """One record. `bad` is empty, or the kind of fault ("not UTF-8"), with `detail` for the message."""

    text: str
    where: str
    bad: str = ""
    detail: str = ""


def source_files(source: Source) -> list[SourceFile]:
    """The files of a local raw source, sorted; DataError when there is none. A hub source has none: []."""
    if source.kind == "hub":
        return []
    if source.kind == "stdlib":
        paths = list(_stdlib())
    else:
        pattern = os.path.expanduser(source.path)
        found = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
        paths = sorted(path for path in found if not os.path.isdir(path))
        if not paths:
            raise DataError(f"data.sources: no file matches {source.path!r} (kind {source.kind!r})")
    return [_stat(path) for path in paths]


def _stdlib() -> Iterator[str]:
    """The .py files of the running interpreter's standard library, without its tests and what is installed into it."""
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(name for name in folders if name not in _NOT_CORPUS)
        for name in sorted(files):
            path = os.path.join(folder, name)
            if name.endswith(".py") and os.path.isfile(path) and os.path.getsize(path):
                yield path


def _stat(path: str) -> SourceFile:
    try:
        found = os.stat(path)
    except OSError:
        return path, 0, 0  # a dangling link: a bad record when it is read
    return path, found.st_size, found.st_mtime_ns


def read_source(source: Source, cache: Path, processes: int = 1) -> "datasets.Dataset":
    """A raw source as a memory-mapped data set under `cache`; `read_records` reads it.

    DataError for what is not a matter of one record: a hub set that cannot be had, a column that does not exist.
    """
    import datasets

    if source.kind == "hub":
        return _hub(source)
    files = source_files(source)
    read = {"stdlib": _text_rows, "text": _text_rows, "jsonl": _jsonl_rows, "parquet": _parquet_rows}[source.kind]
    features = datasets.Features({name: datasets.Value("large_string") for name in TextRecord._fields})
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets.Dataset.from_generator(
        read,
        features=features,
        cache_dir=str(cache),
        gen_kwargs={"files": files, "key": source.text_key},
        num_proc=min(processes, len(files)) if min(processes, len(files)) > 1 else None,
    )


def raw_mib(source: Source, files: Sequence[SourceFile]) -> float | None:
    """MiB of text that a source would have to read; None for a hub set that does not say."""
    if source.kind != "hub":
        return sum(size for _, size, _ in files) / 2**20
    import datasets

    with _naming(source):
        splits = datasets.load_dataset_builder(source.path).info.splits or {}
        return splits[source.split].num_bytes / 2**20 if source.split in splits else None


def _hub(source: Source) -> "datasets.Dataset":
    import datasets

    with _naming(source):
        found = datasets.load_dataset(source.path, split=source.split)
    if source.text_key not in found.column_names:
        columns = ", ".join(found.column_names)
        raise DataError(f"data.sources: {source.path!r} has no column {source.text_key!r}, it has: {columns}")
    return found.select_columns([source.text_key])


@contextmanager
def _naming(source: Source) -> Iterator[None]:
    """Anything, from a name that does not exist to a dead network, as an error that names the source."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"data.sources: cannot load split {source.split!r} of {source.path!r}: {reason}") from error


def read_records(dataset: "datasets.Dataset", source: Source, start: int, stop: int) -> list[TextRecord]:
    """Rows start <= i < stop of what `read_source` gave."""
    columns: dict[str, list[Any]] = dataset[start:stop]
    if source.kind != "hub":
        return [TextRecord(*values) for values in zip(*(columns[name] for name in TextRecord._fields), strict=True)]
    texts = columns[source.text_key]
    return [_checked(text, f"{source.path}[{source.split}] row {start + i}") for i, text in enumerate(texts)]


def _checked(text: object, where: str, whole_file: bool = False) -> TextRecord:
    """A row, with its fault if the text has one; the line is added to `where` when the text is a whole file."""
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
    line += raw.count(b"\n", 0, error.start)
    return TextRecord("", f"{path}:{line}", "not UTF-8", f" (byte 0x{raw[error.start]:02x})")


def _text_rows(files: Sequence[SourceFile], key: str) -> Iterator[dict[str, str]]:
    for path, _, _ in files:
        try:
            raw = Path(path).read_bytes()
            row = _checked(raw.decode("utf-8-sig"), path, whole_file=True)
        except OSError as error:
            row = TextRecord("", path, "unreadable file", f" ({error.strerror})")
        except UnicodeDecodeError as error:
            row = _not_utf8(raw, error, path, line=1)
        yield row._asdict()


def _jsonl_rows(files: Sequence[SourceFile], key: str) -> Iterator[dict[str, str]]:
    for path, _, _ in files:
        empty = True
        try:
            with open(path, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():  # a blank line is no record
                        empty = False
                        yield _json_row(line, path, number, key)._asdict()
            if empty:
                yield TextRecord("", path, "empty file")._asdict()
        except OSError as error:
            yield TextRecord("", path, "unreadable file", f" ({error.strerror})")._asdict()


def _json_row(line: bytes, path: str, number: int, key: str) -> TextRecord:
    where = f"{path}:{number}"
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return _not_utf8(line, error, path, number)
    except (ValueError, RecursionError) as error:
        return TextRecord("", where, "broken JSON", f" ({error})")
    if not isinstance(record, dict):
        return TextRecord("", where, "not a JSON object", f" but {type(record).__name__}")
    if key not in record:
        return TextRecord(
            "", where, "wrong key", f": no {key!r}, it has: {', '.join(record) or 'nothing'} (data.sources.text_key)"
        )
    return _checked(record[key], where)


def _parquet_rows(files: Sequence[SourceFile], key: str) -> Iterator[dict[str, str]]:
    import pyarrow
    import pyarrow.parquet

    for path, _, _ in files:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                names, number = file.schema_arrow.names, 0
                if key not in names:
                    yield TextRecord(
                        "", path, "wrong key", f": no column {key!r}, it has: {', '.join(names)}"
                    )._asdict()
                    continue
                for batch in file.iter_batches(batch_size=1000, columns=[key]):
                    for text in batch.column(0).to_pylist():
                        yield _checked(text, f"{path} row {number}")._asdict()
                        number += 1
                if not number:
                    yield TextRecord("", path, "empty file")._asdict()
        except (OSError, pyarrow.ArrowException) as error:
            yield TextRecord("", path, "unreadable file", f" ({error})")._asdict()
