"""Raw sources of text: how their files are cut into shards, and the records of a shard.

A source is one line of positions: the bytes of its files, one file after another, or the files of a data set of the
hub. A shard is a range of positions. It holds the records that begin in the range: whole text files, lines of JSON,
row groups of parquet files, documents between delimiters, all rows of a file of the hub. So the cut depends on the
files and their sizes alone, nothing has to be read to find it, and any process can read any shard of one large file.
"""

import codecs
import json
import logging
import os
import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from torchllm.config import Source
from torchllm.data.error import DataError
from torchllm.tools.prepare.corpus_writer import replacing
from torchllm.tools.prepare.file_form import foreign_form, is_json_array
from torchllm.tools.prepare.records import (
    BLOCK,
    EMPTY_FILE,
    MASKS_OF_TOKENS,
    WRONG_KEY,
    Origin,
    TextRecord,
    another_form,
    check_document,
    check_text,
    not_utf8,
    read_text_file,
    unreadable_file,
)
from torchllm.tools.prepare.source_files import SourceFile, stat_file
from torchllm.tools.prepare.unpack import (
    LONGEST,
    compression_of_file,
    first_bytes,
    limit_fsspec,
    most_unpacked,
    open_unpacked,
    refuse_bomb,
)

if TYPE_CHECKING:  # 1 s of imports that a run with cached tokens never needs
    import datasets
    import pyarrow
    import pyarrow.parquet

log = logging.getLogger(__name__)


class ShardRange(NamedTuple):
    """The part start <= position < stop of a source that is written as shard `number`."""

    number: int
    start: int
    stop: int


class RawSource(Protocol):
    """A source that can be read from any position."""

    unit: str
    """unit of positions: B (bytes) or files"""
    total: int
    """positions are 0 <= position < total"""
    mib: float
    """size in MiB"""

    def cut_shards(self, count: int) -> list[ShardRange]:
        """Return about `count` ranges of about the same length that cover all positions, in order."""

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        """Yield the records that begin in a shard."""


def _even_cuts(total: int, count: int) -> list[int]:
    """Return where to cut `total` positions into `count` ranges."""
    return [total * number // count for number in range(count + 1)]


def _ranges_between(cuts: Sequence[int]) -> list[ShardRange]:
    """Return the ranges between neighboring cuts, without empty ones."""
    cuts = sorted(set(cuts))
    return [ShardRange(number, start, stop) for number, (start, stop) in enumerate(pairwise(cuts))]


class FilePart(NamedTuple):
    """The bytes start <= byte < stop of a file."""

    file: SourceFile
    start: int
    stop: int

    def check_unchanged(self) -> None:
        """Raise DataError if the file is not as it was listed, for then the shards would not fit together."""
        if stat_file(self.file.path) != self.file:
            raise DataError(f"{self.file.path} was changed after the preparation had begun: start it again")


class SourceFiles:
    """The files of a source, one after another. A file of n bytes has n + 1 positions, so that an empty one has one."""

    unit = "B"

    def __init__(self, files: Sequence[SourceFile]) -> None:
        """`files` are in the order of the corpus."""
        self.files = files
        sizes = [file.size + 1 for file in files]
        self._begins = np.cumsum([0, *sizes])
        """first position of each file, and the total"""
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
    """A source whose files are one document each."""

    def cut_shards(self, count: int) -> list[ShardRange]:
        """Return ranges of whole files; they are fewer than `count` if there are large files."""
        following = np.searchsorted(self._begins, _even_cuts(self.total, count))
        return _ranges_between(self._begins[following].tolist())

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        """Yield a record per file."""
        for part in self.parts(shard):
            part.check_unchanged()
            yield read_text_file(part.file.path)


class _WithLines(SourceFiles, ABC):
    """Files of many records each, which can be read from any byte on.

    Compressed files are an exception: the shard of their first byte has all of them.
    """

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        """Yield a record per document that begins in a shard."""
        for part in self.parts(shard):
            part.check_unchanged()
            try:
                yield from self._read(part)
            except OSError as error:
                yield unreadable_file(part.file.path, error)

    def _read(self, part: FilePart) -> Iterator[TextRecord]:
        """Yield the records of a part of a file. Raises OSError."""
        path = part.file.path
        is_compressed = compression_of_file(path) != ""
        if is_compressed:
            if part.start > 0:
                return
            part = part._replace(stop=sys.maxsize)
        if form := self.foreign_form(path):
            if part.start == 0:
                yield another_form(path, form)
        elif part.start == 0 and is_blank(path):
            yield TextRecord(Origin(path), fault=EMPTY_FILE)
        elif is_compressed:
            with open_unpacked(path) as file:
                yield from self._records_of(part, file, LONGEST)
        else:
            with open(path, "rb", buffering=BLOCK) as file:
                yield from self._records_of(part, file, sys.maxsize)

    def foreign_form(self, path: str) -> str:
        """Return the form of a file, with advice, if it is known not to be of this kind; else "". Raises OSError."""
        return foreign_form(first_bytes(path))

    @abstractmethod
    def _records_of(self, part: FilePart, file: BinaryIO, longest: int) -> Iterator[TextRecord]:
        """Yield a record per document that begins in a part. Raises OSError if one has over `longest` bytes."""


class _ReadAhead:
    """The bytes of a file from an offset on; only bytes that were asked for are in memory."""

    def __init__(self, file: BinaryIO, offset: int, longest: int) -> None:
        if offset:
            file.seek(offset)
        self.offset = offset
        """of the first byte in memory"""
        self.content = bytearray()
        self._file = file
        self._longest = longest

    def read(self) -> bool:
        """Read more; return False at the end of the file. Raises OSError if that would be over `longest` bytes."""
        if len(self.content) > self._longest:
            raise OSError(f"no delimiter in {self._longest:,} bytes")
        block = self._file.read(BLOCK)
        self.content += block
        return bool(block)

    def drop(self, count: int) -> None:
        """Forget the first `count` bytes."""
        del self.content[:count]
        self.offset += count


_NO_DELIMITER = "set it to what is between two documents, or to nothing"


class DelimitedTextFiles(_WithLines):
    """A source of text files with a delimiter between documents; documents of blanks are none.

    A file without it is one document, whose origin is the file and no byte of it.

    Where delimiters overlap, as blank lines in a row do, a document ends at the first and the next begins after the
    last. So it does not depend on the cut where a document begins.
    """

    def __init__(self, files: Sequence[SourceFile], delimiter: str) -> None:
        """`delimiter`: between two documents, such as a blank line: two line ends."""
        super().__init__(files)
        self.delimiter = delimiter.encode()

    def refuse_undivided(self, name: str) -> None:
        """Raise DataError if the delimiter is in none of the files. name: of the source.

        The fault of a file that cannot be read, or is of another form, is told when it is read.
        """
        paths = [file.path for file in self.files]
        with suppress(OSError):
            if any(self.foreign_form(path) or self._divides(path) for path in paths) or all(map(is_blank, paths)):
                return
            advice = next(filter(None, (self._advice(first_bytes(path, BLOCK)) for path in paths)), _NO_DELIMITER)
            delimiter = json.dumps(self.delimiter.decode())
            raise DataError(
                f"data.sources: {name!r}: the delimiter {delimiter} is in none of the files, so each would be one "
                f"document: {advice}"
            )

    def _advice(self, head: bytes) -> str:
        """Return the delimiter that was probably meant, by the first bytes of a file; "" if that is not known."""
        unix = self.delimiter.replace(rb"\r", b"\r").replace(rb"\n", b"\n").replace(b"\r\n", b"\n")
        for meant in (unix, unix.replace(b"\n", b"\r\n")):
            if meant != self.delimiter and meant in head:
                spelled = json.dumps(meant.decode())
                return f"set it to {spelled}, which is there (on a command line in both quotes: '{spelled}')"
        if unix == b"\n\n" and re.search(rb"\n[ \t]+\n", head):
            return r"blank lines hold blanks there, so remove these: sed -i 's/[ \t]*$//' FILE"
        return ""

    def _divides(self, path: str) -> bool:
        """Return whether the delimiter is in a file. Raises OSError."""
        seen = b""
        with open_unpacked(path) as file:
            while block := file.read(BLOCK):
                seen = seen[-len(self.delimiter) :] + block
                if self.delimiter in seen:
                    return True
        return False

    def _records_of(self, part: FilePart, file: BinaryIO, longest: int) -> Iterator[TextRecord]:
        if not self._divides(part.file.path):
            if part.start == 0:
                yield read_text_file(part.file.path)
            return
        ahead = _ReadAhead(file, max(0, part.start - len(self.delimiter)), longest)
        if part.start > 0 and not self._drop_to_begin(ahead, part.start, part.stop):
            return
        while ahead.offset < part.stop:
            end = self._find(ahead, 0)
            content = bytes(ahead.content if end is None else ahead.content[:end])
            if content and not content.isspace():
                yield _decoded_record(content, part.file.path, ahead.offset)
            if end is None:
                return
            ahead.drop(end)
            if not self._drop_to_begin(ahead, ahead.offset + 1, part.stop):
                return

    def _find(self, ahead: _ReadAhead, start: int) -> int | None:
        """Return where the first delimiter from `start` on begins, reading as far as that needs; None if there is none.

        The bytes that could be of one that overlaps it are in memory, too.
        """
        while True:
            found = ahead.content.find(self.delimiter, start)
            if found >= 0 and found + 2 * len(self.delimiter) <= len(ahead.content):
                return found
            start = found if found >= 0 else max(start, len(ahead.content) - len(self.delimiter) + 1)
            if not ahead.read():
                return found if found >= 0 else None

    def _drop_to_begin(self, ahead: _ReadAhead, start: int, stop: int) -> bool:
        """Drop bytes before the first document that begins at `start` or later; return whether one begins before stop.

        The content begins at a delimiter that ends at `start` or later, or before all of these.
        """
        size = len(self.delimiter)
        while ahead.offset + size < stop:
            found = self._find(ahead, 0)
            if found is None:
                ahead.drop(len(ahead.content))
                return False
            following = ahead.content.find(self.delimiter, found + 1, found + 2 * size - 1)
            is_last = following < 0
            if is_last and ahead.offset + found + size >= start:
                ahead.drop(found + size)
                return ahead.offset < stop
            ahead.drop(found + 1)
        return False


def _decoded_record(content: bytes, path: str, offset: int) -> TextRecord:
    """Return the record of a document that begins at a byte of a file."""
    if offset == 0:
        content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        return not_utf8(path, offset + error.start, content[error.start])
    return check_text(text, Origin(path, byte=offset))


class JsonLineFiles(_WithLines):
    """A source whose lines are documents in JSON; blank lines are skipped."""

    def __init__(self, files: Sequence[SourceFile], key: str) -> None:
        """The text of a document is under `key`."""
        super().__init__(files)
        self.key = key

    def foreign_form(self, path: str) -> str:
        """Return the form of a file, with advice, if it is known not to be of this kind; else "". Raises OSError."""
        if form := super().foreign_form(path):
            return form
        with open_unpacked(path) as content:
            if _is_array(path) and len(content.read(_LARGEST_ARRAY + 1)) > _LARGEST_ARRAY:
                return f"a JSON array of over {_LARGEST_ARRAY:,} bytes: jq -c '.[]' FILE > LINES.jsonl makes it lines"
        return ""

    def _records_of(self, part: FilePart, file: BinaryIO, longest: int) -> Iterator[TextRecord]:
        if _is_array(part.file.path):
            if part.start == 0:
                yield from self._elements(part.file.path)
            return
        offset = _next_line(file, part.start, part.stop)
        while offset < part.stop:
            line = file.readline(longest)
            if not line:
                break
            if len(line) == longest:
                raise OSError(f"a line of over {longest:,} bytes")
            record = None if line.isspace() else self.record(line, part.file.path, offset)
            offset += len(line)
            del line  # may be as large as memory allows
            if record is not None:
                yield record

    def record(self, line: bytes, path: str, byte: int) -> TextRecord:
        """Return the record of a line that begins at `byte` of a file."""
        fields = parse_json_line(line, path, byte)
        return fields if isinstance(fields, TextRecord) else self.record_of(fields, Origin(path, byte=byte))

    def _elements(self, path: str) -> Iterator[TextRecord]:
        """Yield a record per element of a file that is one JSON array."""
        with open_unpacked(path) as file:
            elements = parse_json(file.read(), Origin(path, byte=0))
        for row, fields in enumerate([elements] if isinstance(elements, TextRecord) else elements):
            if isinstance(fields, TextRecord):
                yield fields
            elif isinstance(fields, dict):
                yield self.record_of(fields, Origin(path, row=row))
            else:
                yield _no_object(fields, Origin(path, row=row))

    def record_of(self, fields: dict[str, Any], origin: Origin) -> TextRecord:
        """Return the record of an object."""
        if self.key not in fields:
            names = ", ".join(fields) or "nothing"
            detail = f": no {self.key!r}, it has: {names} (data.sources.text_key)"
            return TextRecord(origin, fault=WRONG_KEY, detail=detail)
        return check_document(fields, self.key, origin)


_LARGEST_ARRAY = 2**30
"""bytes of a file that is one JSON array; Python's objects of it need about ten times as many"""


def _is_array(path: str) -> bool:
    """Return whether a file is one JSON array. Raises OSError."""
    is_list = first_bytes(path).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    return is_list and is_json_array(first_bytes(path, BLOCK))


def is_blank(path: str) -> bool:
    """Return whether a file holds nothing but blanks; read no more of it than that needs. Raises OSError."""
    with open_unpacked(path) as file:
        while block := file.read(BLOCK):
            if not block.isspace():
                return False
    return True


def _next_line(file: BinaryIO, start: int, stop: int) -> int:
    """Seek to the first line that begins at `start` or later, and return its offset; any offset >= stop if none does.

    A line over many ranges is passed over in blocks, by each of them.
    """
    if start == 0:
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


def parse_json_line(line: bytes, path: str, byte: int) -> dict[str, Any] | TextRecord:
    """Return the object in a line that begins at `byte` of a file, or a record with the fault of the line."""
    origin = Origin(path, byte=byte)
    fields = parse_json(line, origin)
    return fields if isinstance(fields, (dict, TextRecord)) else _no_object(fields, origin)


def parse_json(content: bytes, origin: Origin) -> Any:
    """Return the value in bytes of a file, or a TextRecord with their fault."""
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return not_utf8(origin.name, (origin.byte or 0) + error.start, error.object[error.start])
    except (ValueError, RecursionError) as error:
        return TextRecord(origin, fault="broken JSON", detail=f" ({error})")


def _no_object(value: object, origin: Origin) -> TextRecord:
    return TextRecord(origin, fault="not a JSON object", detail=f" but {type(value).__name__}")


_ROWS_PER_BATCH = 1000
"""rows of a parquet file that are in memory at a time, at most"""
_REPEATED_IN_MEMORY = 2**28
"""bytes of the rows that are in memory at a time if each of them is the longest text of a dictionary"""
_TEXT_TYPES = ("string", "large_string", "string_view", "null")
"""arrow's names of the types of a column of texts; all rows of a column of type null lack one"""


class TableFiles(SourceFiles):
    """A source whose rows are documents."""

    def __init__(self, files: Sequence[SourceFile], key: str) -> None:
        """The text of a document, or its token ids, are in the column `key`."""
        super().__init__(files)
        self.key = key

    def columns(self, schema: "pyarrow.Schema") -> list[str]:
        """Return the names of the columns that are read."""
        others = MASKS_OF_TOKENS if _LIST.match(str(schema.field(self.key).type)) else ()
        return [name for name in schema.names if name == self.key or name in others]

    def record(self, fields: Mapping[str, Any], origin: Origin) -> TextRecord:
        """Return the record of a row."""
        return check_document(fields, self.key, origin)

    def rows_of(self, batch: "pyarrow.RecordBatch", path: str, row: int) -> Iterator[TextRecord]:
        """Yield the records of a batch, whose first row is `row` of the file."""
        for values in zip(*batch.columns, strict=True):  # not all as Python objects at once
            fields = {name: value.as_py() for name, value in zip(batch.schema.names, values, strict=True)}
            yield self.record(fields, Origin(path, row=row))
            row += 1

    def wrong_column(self, schema: "pyarrow.Schema") -> str:
        """Return why the column of the texts cannot be read; "" if it can."""
        listed = ", ".join(f"{field.name} ({field.type})" for field in schema)
        if schema.names.count(self.key) != 1:
            advice = ' = "input_ids" trains on the tokens as they are' if "input_ids" in schema.names else ""
            return f": {count_of_column(schema.names, self.key)}, it has: {listed} (data.sources.text_key{advice})"
        column = schema.field(self.key).type
        values = getattr(column, "value_type", column) if str(column).startswith("dictionary") else column
        if str(values) in _TEXT_TYPES or (_LIST.match(str(values)) and "int" in str(values.value_type)):
            return ""
        return f": the column {self.key!r} is no text, it has: {listed} (data.sources.text_key)"


def count_of_column(names: Sequence[str], key: str) -> str:
    """Return how many columns of a table have a name that one should have."""
    count = names.count(key)
    return f"{count} columns are named {key!r}" if count else f"no column {key!r}"


_LIST = re.compile(r"(large_|fixed_size_)?list")


class ParquetFiles(TableFiles):
    """Parquet files. A row group belongs to the shard of its first byte."""

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        """Yield a record per row of the row groups that begin in a shard."""
        import pyarrow
        import pyarrow.parquet

        for part in self.parts(shard):
            path = part.file.path
            part.check_unchanged()
            try:
                with pyarrow.parquet.ParquetFile(path, buffer_size=BLOCK) as file:
                    if detail := self.wrong_column(file.schema_arrow):
                        if part.start == 0:
                            yield TextRecord(Origin(path), fault=WRONG_KEY, detail=detail)
                    else:
                        yield from self._records_of(part, file)
            except (OSError, pyarrow.ArrowException) as error:
                yield unreadable_file(path, error)

    def _records_of(self, part: FilePart, file: "pyarrow.parquet.ParquetFile") -> Iterator[TextRecord]:
        """Yield a record per row of the row groups that begin in a part of a file."""
        metadata = file.metadata
        path = part.file.path
        if metadata.num_rows == 0 and part.start == 0:
            yield TextRecord(Origin(path), fault=EMPTY_FILE)
        row = text_bytes = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if part.start <= _group_begin(group, part.file.size) < part.stop:
                for record in self._rows_of(file, number, path, row):
                    text_bytes += record.size
                    if text_bytes > most_unpacked(part.file.size):
                        refuse_bomb(path, part.file.size)
                    yield record
            row += group.num_rows

    def _rows_of(self, file: "pyarrow.parquet.ParquetFile", number: int, path: str, row: int) -> Iterator[TextRecord]:
        """Yield the records of row group `number`, whose first row is `row` of the file."""
        group = file.metadata.row_group(number)
        bytes_per_row = group.total_byte_size / max(1, group.num_rows)
        columns = self.columns(file.schema_arrow)
        longest = max(1, *(_longest_repeated(path, group, name) for name in columns))
        rows = max(1, min(_ROWS_PER_BATCH, int(BLOCK / max(1.0, bytes_per_row)), _REPEATED_IN_MEMORY // longest))
        for batch in file.iter_batches(batch_size=rows, row_groups=[number], columns=columns):
            yield from self.rows_of(batch, path, row)
            row += batch.num_rows


def _longest_repeated(path: str, group: "pyarrow.parquet.RowGroupMetaData", key: str) -> int:
    """Return the bytes of a row group's dictionary: the longest text that may be stored once for several rows.

    The size of the dictionary is in the header of its page, in Thrift's compact form: the byte 0x15 and a number, which
    is the type of the page, then 0x15 and the size. Raises OSError.
    """
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema != key or not column.has_dictionary_page:
            continue
        with open(path, "rb") as file:
            file.seek(column.dictionary_page_offset)
            header = file.read(16)
        most: int = column.total_uncompressed_size
        if header[:1] != b"\x15" or header[2:3] != b"\x15":
            return most
        size = shift = 0
        for byte in header[3:]:
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        return min(size >> 1, most)  # a number n is stored as 2 n
    return 0


def _group_begin(group: "pyarrow.parquet.RowGroupMetaData", size: int) -> int:
    """Return the offset of a row group's first page in a file of `size` bytes."""
    column = group.column(0)
    begin: int = column.dictionary_page_offset or column.data_page_offset
    return min(begin, size)


_REVISION_FOLDERS = 3
"""of the path of the copy of a data set: its configuration (with a hash of local files), its version, its commit"""
_COMMIT = re.compile("[0-9a-f]{40}")
_HUB_ROWS = 64
"""rows of a data set of the hub that are in memory as Python objects at a time"""
_HUB_PARQUET_ROWS = 16
"""rows of a parquet file of the hub that are unpacked at a time: all may be the longest text of a dictionary"""


class HubRows:
    """The rows of a split of a data set of the hub, read from its files over the network; no copy of it is kept.

    A position is one of the files: they are the smallest parts that `datasets` reads without those before them.
    """

    unit = "files"

    def __init__(self, source: Source, key: str, optional: Sequence[str] = ()) -> None:
        """Open a data set with the column `key`, and the columns of `optional` that it has.

        `source.revision` is the commit (see `pin_hub_source`). Raises DataError if the set or the column is missing.
        """
        self.source = source
        self.name = f"{source.path}[{source.split}]"
        self.key = key
        self.dataset = _stream_from_hub(source, key, optional)
        self.total = self.dataset.num_shards
        self.mib = (_split_bytes(self.dataset.info, source) or 0) / 2**20
        """0 if the set does not say its size"""

    def cut_shards(self, count: int) -> list[ShardRange]:
        """Return ranges of files, one for each if there are fewer than `count`, or the set does not say its size."""
        ranges = min(count, self.total) if self.mib else self.total
        return _ranges_between(_even_cuts(self.total, ranges))

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        """Yield a record per row."""
        for number in range(shard.start, shard.stop):
            name = f"{self.name} file {number}" if self.total > 1 else self.name
            text_bytes = 0
            for row, fields in enumerate(self._rows_of(number)):
                record = self.record(fields, Origin(name, row=row))
                text_bytes += record.size
                if text_bytes > most_unpacked(0) and text_bytes > most_unpacked(self._largest_file):
                    refuse_bomb(name, self._largest_file)
                yield record

    @cached_property
    def _largest_file(self) -> int:
        """Size in bytes of the largest file of the set. Raises DataError if the hub does not say it."""
        source = self.source
        if os.path.exists(source.path):
            return max(os.path.getsize(path) for path in Path(source.path).rglob("*") if path.is_file())
        import huggingface_hub

        with _hub_errors(source):
            info = huggingface_hub.HfApi().dataset_info(source.path, revision=source.revision, files_metadata=True)
            return max(file.size or 0 for file in info.siblings or ())

    def _rows_of(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield the columns of each row of a file. Raises DataError if it cannot be read."""
        limit_fsspec()
        file = self.dataset.shard(num_shards=self.total, index=number)
        with _hub_errors(self.source):
            for columns in file.iter(batch_size=_HUB_ROWS):
                for values in zip(*columns.values(), strict=True):
                    yield dict(zip(columns, values, strict=True))

    def record(self, fields: Mapping[str, Any], origin: Origin) -> TextRecord:
        """Return the record of a row."""
        return check_document(fields, self.key, origin)


def _hub_name(source: Source) -> tuple[str, str | None]:
    """Return the id of a data set and its configuration, as `datasets` takes them."""
    return source.path, source.subset or None


def raw_mib(source: Source, files: Sequence[SourceFile]) -> float | None:
    """Return the size of a source, in MiB; None if it is a data set of the hub that does not say its size."""
    if source.kind != "hub":
        return sum(file.size for file in files) / 2**20
    import datasets

    with _hub_errors(source):
        info = datasets.load_dataset_builder(*_hub_name(source), revision=source.revision or None).info
    size = _split_bytes(info, source)
    return None if size is None else size / 2**20


def _split_bytes(info: "datasets.DatasetInfo", source: Source) -> int | None:
    """Return the size of the source's split in bytes, if the data set says it."""
    splits = info.splits or {}
    return splits[source.split].num_bytes if source.split in splits else None


def pin_hub_source(source: Source, pins: Path) -> Source:
    """Return a source of the hub with the commit of its revision, which is asked of the hub once.

    pins: folder that remembers the commit, so that every later start reads the same rows, also if the branch has moved
    on. A folder of files that stands for a data set has no commit. Raises DataError if the hub cannot be asked.
    """
    if os.path.exists(source.path) or _COMMIT.fullmatch(source.revision):
        return source
    name = f"{source.path}@{source.revision or 'newest'}"
    pin = pins / name.replace("/", "--")
    try:
        if not pin.exists():
            commit = _ask_commit(source)
            pins.mkdir(parents=True, exist_ok=True)
            with replacing([pin]) as (file,):
                file.write(commit.encode())
        commit = pin.read_text()
    except OSError as error:
        raise DataError(
            f"{pin} cannot be written: {error.strerror or error}. Set data.cache to another folder"
        ) from error
    log.info("data.sources: %s is commit %s; delete %s to take a newer one", name, commit, pin)
    return replace(source, revision=commit)


def _ask_commit(source: Source) -> str:
    """Return the commit of a data set's revision. Raises DataError if the hub cannot be asked, or has none."""
    import huggingface_hub

    with _hub_errors(source):
        info = huggingface_hub.HfApi().dataset_info(source.path, revision=source.revision or None)
        if info.sha is None:
            raise ValueError("the hub names no commit")
        return info.sha


def hub_folder_version(source: Source) -> str:
    """Return a version of a folder that stands for a data set of the hub: new files, new version; "" if it is none."""
    import datasets

    if not os.path.exists(source.path):
        return ""
    with _hub_errors(source):
        builder = datasets.load_dataset_builder(*_hub_name(source))
    return "/".join(Path(builder.cache_dir).parts[-_REVISION_FOLDERS:])


def _stream_from_hub(source: Source, key: str, optional: Sequence[str]) -> "datasets.IterableDataset":
    """Open the column `key` of a split of a data set of the hub, and the columns of `optional` that it has."""
    import datasets

    limit_fsspec()
    with _hub_errors(source):
        builder = datasets.load_dataset_builder(*_hub_name(source), revision=source.revision or None)
        if hasattr(builder.config, "batch_size"):
            builder.config.batch_size = _HUB_PARQUET_ROWS
        dataset = builder.as_streaming_dataset(split=source.split)
        names = dataset.column_names
        if names is None:  # known from the rows only
            names = list(next(iter(dataset), {}))
    if key not in names:
        raise DataError(f"data.sources: {source.path!r} has no column {key!r}, it has: {', '.join(names)}")
    return dataset.select_columns([key, *(column for column in optional if column in names)])


@contextmanager
def _hub_errors(source: Source) -> Iterator[None]:
    """Turn any error, from an unknown name to a missing network, into a DataError that names source and cause."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = _first_line(error)
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if cause is not error:
            reason += f": {_first_line(cause)}"
        if type(cause) in (OSError, PermissionError):  # of the disk: the network's errors have other classes
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
