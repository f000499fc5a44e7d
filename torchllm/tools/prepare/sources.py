"""Raw sources in files: how they are cut into shards, and the records of a shard.

A source is one line of positions: the bytes of its files, one file after another, or the files of a data set of the
hub. A shard is a range of positions. It holds the records that begin in the range: whole text files, lines of JSON,
row groups of parquet files, documents between delimiters, all rows of a file of the hub. So the cut depends on the
files and their sizes alone, nothing has to be read to find it, and any process can read any shard of one large file.
"""

import codecs
import json
import logging
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from torchllm.config.errors import DataError
from torchllm.config.files import is_url
from torchllm.tools.prepare.file_form import foreign_form, is_json_array
from torchllm.tools.prepare.record_form import RecordForm
from torchllm.tools.prepare.records import (
    BLOCK,
    EMPTY_FILE,
    WRONG_KEY,
    Origin,
    TextRecord,
    another_form,
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
    open_file,
    open_unpacked,
)

if TYPE_CHECKING:  # 1 s of imports that a run with cached tokens never needs
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


def even_cuts(total: int, count: int) -> list[int]:
    """Return where to cut `total` positions into `count` ranges."""
    return [total * number // count for number in range(count + 1)]


def ranges_between(cuts: Sequence[int]) -> list[ShardRange]:
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


class SourceFiles(ABC):
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
        return ranges_between(even_cuts(self.total, count))

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

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        """Yield the records that begin in a shard; of a file that cannot be read, its fault."""
        for part in self.parts(shard):
            part.check_unchanged()
            try:
                yield from self.read(part)
            except OSError as error:
                yield unreadable_file(part.file.path, error)
            if is_url(part.file.path):  # it was read in several requests
                part.check_unchanged()

    @abstractmethod
    def read(self, part: FilePart) -> Iterator[TextRecord]:
        """Yield the records that begin in a part of a file. Raises OSError."""


class TextFiles(SourceFiles):
    """A source whose files are one document each."""

    def cut_shards(self, count: int) -> list[ShardRange]:
        """Return ranges of whole files; they are fewer than `count` if there are large files."""
        following = np.searchsorted(self._begins, even_cuts(self.total, count))
        return ranges_between(self._begins[following].tolist())

    def read(self, part: FilePart) -> Iterator[TextRecord]:
        yield read_text_file(part.file.path)


class _WithLines(SourceFiles):
    """Files of many records each, which can be read from any byte on.

    Compressed files are an exception: the shard of their first byte has all of them.
    """

    def read(self, part: FilePart) -> Iterator[TextRecord]:
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
            with open_file(path, BLOCK) as file:
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
    """A source whose lines are records in JSON; blank lines are skipped."""

    def __init__(self, files: Sequence[SourceFile], form: RecordForm) -> None:
        """`form`: of a record."""
        super().__init__(files)
        self.form = form

    def foreign_form(self, path: str) -> str:
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
            origin = Origin(part.file.path, byte=offset)
            record = None if line.isspace() else self._record(parse_json(line, origin), origin)
            offset += len(line)
            del line  # may be as large as memory allows
            if record is not None:
                yield record

    def _elements(self, path: str) -> Iterator[TextRecord]:
        """Yield a record per element of a file that is one JSON array."""
        with open_unpacked(path) as file:
            elements = parse_json(file.read(), Origin(path, byte=0))
        for row, fields in enumerate([elements] if isinstance(elements, TextRecord) else elements):
            yield self._record(fields, Origin(path, row=row))

    def _record(self, value: Any, origin: Origin) -> TextRecord:
        """Return the record of a value of JSON, or of the fault that a TextRecord has already."""
        if isinstance(value, TextRecord):
            return value
        if isinstance(value, dict):
            return self.form.record_of_object(value, origin)
        return TextRecord(origin, fault="not a JSON object", detail=f" but {type(value).__name__}")


_LARGEST_ARRAY = 2**30
"""bytes of a file that is one JSON array; as Python objects it needs about ten times the memory"""


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


def parse_json(content: bytes, origin: Origin) -> Any:
    """Return the value in bytes of a file, or a TextRecord with their fault."""
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return not_utf8(origin.name, (origin.byte or 0) + error.start, error.object[error.start])
    except (ValueError, RecursionError) as error:
        return TextRecord(origin, fault="broken JSON", detail=f" ({error})")


_ROWS_PER_BATCH = 256
"""rows of a parquet file that are in memory at a time, at most"""
_DICTIONARY_BYTES = 2**28
"""bytes of a batch, at most, if each of its rows is all of the column's dictionary"""


class TableFiles(SourceFiles):
    """A source whose records are rows of tables."""

    def __init__(self, files: Sequence[SourceFile], form: RecordForm) -> None:
        """`form`: of a record."""
        super().__init__(files)
        self.form = form

    def read(self, part: FilePart) -> Iterator[TextRecord]:
        import pyarrow

        try:
            yield from self.read_rows(part)
        except pyarrow.ArrowException as error:
            raise OSError(str(error)) from error

    @abstractmethod
    def read_rows(self, part: FilePart) -> Iterator[TextRecord]:
        """Yield a record per row that begins in a part of a file. Raises OSError and pyarrow's errors."""

    def rows_of(self, batch: "pyarrow.RecordBatch", path: str, row: int) -> Iterator[TextRecord]:
        """Yield the records of a batch, whose first row is `row` of the file."""
        for values in zip(*batch.columns, strict=True):  # not all as Python objects at once
            fields = {name: value.as_py() for name, value in zip(batch.schema.names, values, strict=True)}
            yield self.form.record(fields, Origin(path, row=row), is_row=True)
            row += 1


class ParquetFiles(TableFiles):
    """Parquet files. A row group belongs to the shard of its first byte."""

    def read_rows(self, part: FilePart) -> Iterator[TextRecord]:
        import pyarrow.parquet

        path = part.file.path
        content = open_file(path, BLOCK) if is_url(path) else path
        with pyarrow.parquet.ParquetFile(content, buffer_size=BLOCK) as file:
            if not (detail := self.form.wrong_column(file.schema_arrow)):
                yield from self._records_of(part, file)
            elif part.start == 0:
                yield TextRecord(Origin(path), fault=WRONG_KEY, detail=detail)

    def _records_of(self, part: FilePart, file: "pyarrow.parquet.ParquetFile") -> Iterator[TextRecord]:
        """Yield a record per row of the row groups that begin in a part of a file."""
        metadata = file.metadata
        path = part.file.path
        if metadata.num_rows == 0 and part.start == 0:
            yield TextRecord(Origin(path), fault=EMPTY_FILE)
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
        columns = self.form.columns(file.schema_arrow.names)
        longest = 1  # bytes of a text that a dictionary holds once, and a batch in each of its rows
        for chunk in (group.column(number) for number in range(group.num_columns)):
            if chunk.has_dictionary_page and chunk.path_in_schema.split(".")[0] in columns:
                longest = max(longest, chunk.total_uncompressed_size)
        rows = max(1, min(_ROWS_PER_BATCH, int(BLOCK / max(1.0, bytes_per_row)), _DICTIONARY_BYTES // longest))
        for batch in file.iter_batches(batch_size=rows, row_groups=[number], columns=columns):
            yield from self.rows_of(batch, path, row)
            row += batch.num_rows


def _group_begin(group: "pyarrow.parquet.RowGroupMetaData", size: int) -> int:
    """Return the offset of a row group's first page in a file of `size` bytes."""
    column = group.column(0)
    begin: int = column.dictionary_page_offset or column.data_page_offset
    return min(begin, size)
