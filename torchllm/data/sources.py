"""Raw sources of text: their files, how they are cut into shards, and the records of a shard.

A source is one line of positions: the bytes of its files, one file after another, or the rows of a data set of the hub.
A shard is a range of positions. It holds the records that begin in the range: whole text files, lines of JSON, row
groups of parquet files. So the cut depends on the files and their sizes alone, nothing has to be read to find it, and
any process can read any shard of one large file.
"""

import glob
import json
import os
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from torchllm.config import Source
from torchllm.data.error import DataError
from torchllm.data.records import BLOCK, Origin, TextRecord, check_text, not_utf8, read_text_file, unreadable_file

if TYPE_CHECKING:  # 1 s of imports that a run with cached tokens never needs
    import datasets
    import pyarrow.parquet

_NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""folders of the standard library that are not read"""


class SourceFile(NamedTuple):
    """A file of a source, and what decides whether it has to be read again."""

    path: str
    size: int
    """in bytes"""
    changed_ns: int
    """time of its last change, in nanoseconds since 1970"""


class ShardRange(NamedTuple):
    """The part start <= position < stop of a source that is written as shard `number`."""

    number: int
    start: int
    stop: int


class RawSource(Protocol):
    """A source that can be read from any position."""

    unit: str
    """what a position counts: B (bytes) or rows"""
    total: int
    """positions are 0 <= position < total"""
    mib: float
    """size in MiB"""

    def cut_shards(self, count: int) -> list[ShardRange]:
        """Return about `count` ranges of about the same length that cover all positions, in order."""

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        """Yield the records that begin in a shard."""


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


def open_raw_source(source: Source, files: Sequence[SourceFile]) -> RawSource:
    """Return the reader of a source; `files` are its `source_files`.

    Raises DataError if it is a data set of the hub that cannot be loaded.
    """
    if source.kind == "hub":
        return HubRows(source)
    if source.kind == "jsonl":
        return JsonLineFiles(files, source.text_key)
    if source.kind == "parquet":
        return ParquetFiles(files, source.text_key)
    return TextFiles(files)


def _even_cuts(total: int, count: int) -> list[int]:
    """Return where to cut `total` positions into `count` ranges."""
    return [total * number // count for number in range(count + 1)]


def _ranges_between(cuts: Sequence[int]) -> list[ShardRange]:
    """Return the ranges between neighbouring cuts, without empty ones."""
    cuts = sorted(set(cuts))
    return [ShardRange(number, start, stop) for number, (start, stop) in enumerate(pairwise(cuts))]


class FilePart(NamedTuple):
    """The bytes start <= byte < stop of a file."""

    file: SourceFile
    start: int
    stop: int

    def check_unchanged(self) -> None:
        """Raise DataError if the file is not as it was listed, for then the shards would not fit together."""
        if _source_file(self.file.path) != self.file:
            raise DataError(f"{self.file.path} was changed after the preparation had begun: start it again")


class SourceFiles:
    """The files of a source, one after another. A file of n bytes has n + 1 positions, so that an empty one has one."""

    unit = "B"

    def __init__(self, files: Sequence[SourceFile]) -> None:
        """`files` are in the order of the corpus."""
        self.files = files
        sizes = [file.size + 1 for file in files]
        self._begins = np.cumsum([0, *sizes])
        """position at which each file begins, and the total"""
        self.total = int(self._begins[-1])
        self.mib = self.total / 2**20

    def cut_shards(self, count: int) -> list[ShardRange]:
        """Return ranges of the same length."""
        return _ranges_between(_even_cuts(self.total, count))

    def parts(self, shard: ShardRange) -> Iterator[FilePart]:
        """Yield the parts of files that a shard covers."""
        index = int(np.searchsorted(self._begins, shard.start, side="right")) - 1
        while index < len(self.files) and self._begins[index] < shard.stop:
            begin = int(self._begins[index])
            file = self.files[index]
            start = max(0, shard.start - begin)
            stop = min(file.size + 1, shard.stop - begin)
            yield FilePart(file, start, stop)
            index += 1


class TextFiles(SourceFiles):
    """A source in which each file is one document."""

    def cut_shards(self, count: int) -> list[ShardRange]:
        """Return ranges of whole files; they are fewer than `count` if there are large files."""
        following = np.searchsorted(self._begins, _even_cuts(self.total, count))
        return _ranges_between(self._begins[following].tolist())

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        """Yield a record per file."""
        for part in self.parts(shard):
            part.check_unchanged()
            yield read_text_file(part.file.path)


class JsonLineFiles(SourceFiles):
    """A source in which each line is a document in JSON; blank lines are none."""

    def __init__(self, files: Sequence[SourceFile], key: str) -> None:
        """The text of a document is under `key`."""
        super().__init__(files)
        self.key = key

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        """Yield a record per line that begins in a shard."""
        for part in self.parts(shard):
            part.check_unchanged()
            try:
                with open(part.file.path, "rb", buffering=BLOCK) as lines:
                    if part.start == 0 and _is_blank(lines):
                        yield TextRecord(Origin(part.file.path), fault="empty file")
                    else:
                        yield from self._records_of(part, lines)
            except OSError as error:
                yield unreadable_file(part.file.path, error)

    def _records_of(self, part: FilePart, lines: BinaryIO) -> Iterator[TextRecord]:
        """Yield a record per line that begins in a part of a file."""
        offset = _next_line(lines, part.start, part.stop)
        while offset < part.stop:
            line = lines.readline()
            if not line:
                break
            record = None if line.isspace() else _json_record(line, part.file.path, offset, self.key)
            offset += len(line)
            del line  # may be as large as memory allows
            if record is not None:
                yield record


def _is_blank(file: BinaryIO) -> bool:
    """Return whether a file holds nothing but blanks; read no more of it than that needs."""
    while block := file.read(BLOCK):
        if not block.isspace():
            return False
    return True


def _next_line(file: BinaryIO, start: int, stop: int) -> int:
    """Seek to the first line that begins at `start` or later, and return its offset; any offset >= stop if none does.

    A line over many ranges is passed over in blocks, by each of them.
    """
    if start == 0:
        file.seek(0)
        return 0
    offset = start - 1
    file.seek(offset)
    while offset < stop:
        rest_of_line = file.readline(BLOCK)
        offset += len(rest_of_line)
        if rest_of_line.endswith(b"\n"):
            return offset
        if not rest_of_line:
            break
    return stop


def _json_record(line: bytes, path: str, byte: int, key: str) -> TextRecord:
    """Return the record of a line that begins at `byte` of a file; its text is under `key`."""
    origin = Origin(path, byte=byte)
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return not_utf8(path, byte + error.start, error.object[error.start])
    except (ValueError, RecursionError) as error:
        return TextRecord(origin, fault="broken JSON", detail=f" ({error})")
    if not isinstance(fields, dict):
        return TextRecord(origin, fault="not a JSON object", detail=f" but {type(fields).__name__}")
    if key not in fields:
        names = ", ".join(fields) or "nothing"
        return TextRecord(origin, fault="wrong key", detail=f": no {key!r}, it has: {names} (data.sources.text_key)")
    return check_text(fields[key], origin)


_ROWS_PER_BATCH = 1000
"""rows of a parquet file that are in memory at a time, at most"""


class ParquetFiles(SourceFiles):
    """A source in which each row of the files is a document. A row group is in the shard in which it begins."""

    def __init__(self, files: Sequence[SourceFile], key: str) -> None:
        """The text of a document is in the column `key`."""
        super().__init__(files)
        self.key = key

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        """Yield a record per row of the row groups that begin in a shard."""
        import pyarrow
        import pyarrow.parquet

        for part in self.parts(shard):
            path = part.file.path
            part.check_unchanged()
            try:
                with pyarrow.parquet.ParquetFile(path, buffer_size=BLOCK) as file:
                    names = file.schema_arrow.names
                    if self.key in names:
                        yield from self._records_of(part, file)
                    elif part.start == 0:
                        detail = f": no column {self.key!r}, it has: {', '.join(names)}"
                        yield TextRecord(Origin(path), fault="wrong key", detail=detail)
            except (OSError, pyarrow.ArrowException) as error:
                yield unreadable_file(path, error)

    def _records_of(self, part: FilePart, file: "pyarrow.parquet.ParquetFile") -> Iterator[TextRecord]:
        """Yield a record per row of the row groups that begin in a part of a file."""
        metadata = file.metadata
        path = part.file.path
        if metadata.num_rows == 0 and part.start == 0:
            yield TextRecord(Origin(path), fault="empty file")
        row = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if part.start <= _group_begin(group, part.file.size) < part.stop:
                yield from self._rows_of(file, number, path, row)
            row += group.num_rows

    def _rows_of(self, file: "pyarrow.parquet.ParquetFile", number: int, path: str, row: int) -> Iterator[TextRecord]:
        """Yield the records of row group `number`, whose first row is `row` of the file."""
        group = file.metadata.row_group(number)
        bytes_per_row = group.total_byte_size / max(1, group.num_rows)
        rows = min(_ROWS_PER_BATCH, max(1, int(BLOCK / max(1.0, bytes_per_row))))
        for batch in file.iter_batches(batch_size=rows, row_groups=[number], columns=[self.key]):
            for text in batch.column(0).to_pylist():
                yield check_text(text, Origin(path, row=row))
                row += 1


def _group_begin(group: "pyarrow.parquet.RowGroupMetaData", size: int) -> int:
    """Return the offset of a row group's first page in a file of `size` bytes."""
    column = group.column(0)
    begin: int = column.dictionary_page_offset or column.data_page_offset
    return min(begin, size)


_REVISION_FOLDERS = 3
"""of the path of the copy of a data set: its configuration (with a hash of local files), its version, its commit"""
_HUB_ROWS = 64
"""rows of a data set of the hub that are in memory at a time"""


class HubRows:
    """The rows of a split of a data set of the hub, memory-mapped by `datasets`."""

    unit = "rows"

    def __init__(self, source: Source) -> None:
        """Load the data set. Raises DataError if that fails, or the column `source.text_key` is missing."""
        self.name = f"{source.path}[{source.split}]"
        self.dataset = _load_from_hub(source)
        self.total = len(self.dataset)
        self.mib = self.dataset.data.nbytes / 2**20

    def cut_shards(self, count: int) -> list[ShardRange]:
        """Return ranges of equally many rows."""
        return _ranges_between(_even_cuts(self.total, count))

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        """Yield a record per row."""
        for start in range(shard.start, shard.stop, _HUB_ROWS):
            stop = min(start + _HUB_ROWS, shard.stop)
            columns: dict[str, list[Any]] = self.dataset[start:stop]
            (texts,) = columns.values()
            for row, text in enumerate(texts, start=start):
                yield check_text(text, Origin(self.name, row=row))


def raw_mib(source: Source, files: Sequence[SourceFile]) -> float | None:
    """Return the size of a source, in MiB; None if it is a data set of the hub that does not say its size."""
    if source.kind != "hub":
        return sum(file.size for file in files) / 2**20
    import datasets

    with _hub_errors(source):
        splits = datasets.load_dataset_builder(source.path).info.splits or {}
        return splits[source.split].num_bytes / 2**20 if source.split in splits else None


def hub_revision(source: Source) -> str:
    """Return what the data in a data set of the hub depends on: its configuration, version and commit.

    It is asked of the hub; without network, of the copy that the library `datasets` has. Raises DataError if there is
    neither.
    """
    import datasets

    with _hub_errors(source):
        builder = datasets.load_dataset_builder(source.path)
    return "/".join(Path(builder.cache_dir).parts[-_REVISION_FOLDERS:])


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
    """Turn any error, from an unknown name to a missing network, into a DataError that names source and cause."""
    try:
        yield
    except Exception as error:
        reason = _first_line(error)
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if cause is not error:
            reason += f": {_first_line(cause)}"
        if type(cause) in (OSError, PermissionError):  # of the disk: those of the network are classes of their own
            reason += f" ({_describe_hub_folders()})"
        raise DataError(f"data.sources: cannot load split {source.split!r} of {source.path!r}: {reason}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _describe_hub_folders() -> str:
    """Return where data sets of the hub are kept, and how to change that."""
    import datasets
    import huggingface_hub

    folders = [datasets.config.HF_DATASETS_CACHE, huggingface_hub.constants.HF_HUB_CACHE]
    described = []
    for folder in map(Path, folders):
        existing = folder
        while not existing.exists():
            existing = existing.parent
        described.append(f"{folder}, {shutil.disk_usage(existing).free / 2**20:,.0f} MiB free")
    return f"data sets are kept in {' and '.join(described)}; HF_HOME=FOLDER in the environment names another place"
