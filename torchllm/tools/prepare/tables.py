"""Tables in CSV and Arrow files. A file is in one shard, since none can be read from any byte on."""

import csv
import io
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

from torchllm.tools.prepare.file_form import foreign_form
from torchllm.tools.prepare.records import (
    EMPTY_FILE,
    WRONG_KEY,
    Origin,
    TextRecord,
    another_form,
    not_utf8,
    unreadable_file,
)
from torchllm.tools.prepare.source_files import SourceFile
from torchllm.tools.prepare.sources import ShardRange, TableFiles, TextFiles, count_of_column, is_blank
from torchllm.tools.prepare.unpack import first_bytes, most_unpacked, open_unpacked, refuse_bomb

if TYPE_CHECKING:
    import pyarrow

_KEYS = "data.sources.text_key, messages_key or delimiter"


class WholeTables(TableFiles, ABC):
    """Tables of which a shard has whole files."""

    cut_shards = TextFiles.cut_shards

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        """Yield a record per row."""
        import pyarrow

        for part in self.parts(shard):
            path = part.file.path
            part.check_unchanged()
            try:
                if is_blank(path):
                    yield TextRecord(Origin(path), fault=EMPTY_FILE)
                    continue
                size = 0
                for record in self.read(path):
                    size += record.size
                    if size > most_unpacked(part.file.size):
                        refuse_bomb(path, part.file.size)
                    yield record
            except (OSError, pyarrow.ArrowException) as error:
                yield unreadable_file(path, error)

    @abstractmethod
    def read(self, path: str) -> Iterator[TextRecord]:
        """Yield a record per row of a file. Raises OSError and pyarrow's errors."""


class ArrowFiles(WholeTables):
    """Arrow files, as `datasets` saves them (`save_to_disk`); in Arrow's stream or file format."""

    def read(self, path: str) -> Iterator[TextRecord]:
        """Yield a record per row of a file. Raises OSError and pyarrow's errors."""
        import pyarrow

        with pyarrow.memory_map(path) as file:
            begin = len(_FILE_FORMAT) if file.read(len(_FILE_FORMAT)) == _FILE_FORMAT else 0
            file.seek(begin)
            is_whole = _is_whole(file)
            file.seek(begin)
            row = 0
            for batch in pyarrow.ipc.open_stream(file):
                if detail := self.wrong_column(batch.schema):
                    yield TextRecord(Origin(path), fault=WRONG_KEY, detail=detail)
                    return
                yield from self.rows_of(batch.select(self.columns(batch.schema)), path, row)
                row += batch.num_rows
            if not is_whole:
                raise OSError("it was cut off, or joined with another file: what ends an Arrow file is not at its end")


_FILE_FORMAT = b"ARROW1\0\0"
"""a file in Arrow's file format is these bytes, a stream and a table of contents"""
_FILE_END = struct.Struct("<i6s")
"""the end of that table: its bytes, without this end, and ARROW1"""
_STREAM_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""the end of a stream; the second: before Arrow 0.15"""
_LONGEST_END = 64
"""bytes of the end of a stream, and of padding that may follow it"""


def _is_whole(file: "pyarrow.NativeFile") -> bool:
    """Return whether the end of an Arrow file, which is at its first message, is where it belongs.

    A reader stops without a word behind the last whole message. Raises OSError if its values are compressed.
    """
    import pyarrow

    is_file = file.tell() > 0
    reader = pyarrow.ipc.MessageReader.open_stream(file)
    while True:
        end = file.tell()
        try:
            message = reader.read_next_message()
        except StopIteration:
            break
        if _is_compressed(memoryview(message.metadata)):
            raise OSError("its values are compressed, to an unknown size: write it as parquet")
    file.seek(end)
    if not is_file:
        return file.read(_LONGEST_END) in _STREAM_ENDS
    table_end = file.size() - _FILE_END.size
    if table_end < end:
        return False
    file.seek(table_end)
    table_bytes, magic = _FILE_END.unpack(file.read())
    return magic == b"ARROW1" and 0 <= table_end - table_bytes - end <= _LONGEST_END


def _is_compressed(message: memoryview) -> bool:
    """Return whether a message of Arrow is of a batch of rows with compressed values.

    It is a flatbuffer: `Message` has the batch as field 2, `RecordBatch` its compression as field 3, and
    `DictionaryBatch` a RecordBatch as field 1 (format/Message.fbs of Apache Arrow).
    """

    def number(place: int, size: int) -> int:
        return int.from_bytes(message[place : place + size], "little", signed=size == 4)

    def field(table: int, index: int) -> int:
        """Return the place of a field; 0 if it is not set."""
        fields = table - number(table, 4)
        place = 4 + 2 * index
        offset = number(fields + place, 2) if place < number(fields, 2) else 0
        return table + offset if offset else 0

    root = number(0, 4)
    kind, header = field(root, 1), field(root, 2)
    kind = message[kind] if kind else 0
    if kind not in (_DICTIONARY, _RECORDS):
        return False
    batch = header + number(header, 4)
    if kind == _DICTIONARY:
        batch = field(batch, 1)
        batch += number(batch, 4)
    return field(batch, 3) > 0


_DICTIONARY, _RECORDS = 2, 3
"""kinds of messages that hold values"""


class CsvFiles(WholeTables):
    """CSV and TSV files with a line of column names; values are text."""

    def __init__(self, files: Sequence[SourceFile], key: str, delimiter: str) -> None:
        """The text of a document is in the column `key`; `delimiter`: between two cells, "" for the usual one."""
        super().__init__(files, key)
        self.delimiter = delimiter

    def read(self, path: str) -> Iterator[TextRecord]:
        """Yield a record per row of a file. Raises OSError."""
        import pyarrow

        if form := foreign_form(first_bytes(path)):
            yield another_form(path, form)
            return
        is_tabbed = ".tsv" in path.rpartition("/")[2].lower()
        with open_unpacked(path) as file, io.TextIOWrapper(file, "utf-8-sig", _KEEP_BYTES, newline="") as text:
            rows = _csv_rows(text, self.delimiter or ("\t" if is_tabbed else ","))
            header = next(rows, _CsvRow([]))
            names = header.cells
            if names.count(self.key) != 1:
                listed = f": {count_of_column(names, self.key)}, it has: {', '.join(names)} ({_KEYS})"
                yield TextRecord(Origin(path), fault=header.fault or WRONG_KEY, detail=header.detail or listed)
                return
            columns = self.columns(pyarrow.schema([(name, pyarrow.string()) for name in names]))
            for number, row in enumerate(rows):
                yield self._record_of_row(names, columns, row, Origin(path, row=number))

    def _record_of_row(
        self, names: Sequence[str], columns: Sequence[str], row: "_CsvRow", origin: Origin
    ) -> TextRecord:
        """Return the record of a row of a file with the columns `names`, of which `columns` are read."""
        if row.fault:
            return TextRecord(origin, fault=row.fault, detail=row.detail)
        if len(row.cells) != len(names):
            detail = f": {len(row.cells)} cells in place of {len(names)}: {row.shown}"
            return TextRecord(origin, fault="another number of cells", detail=detail)
        fields = {name: cell for name, cell in zip(names, row.cells, strict=True) if name in columns}
        for cell in fields.values():
            try:
                cell.encode()
            except UnicodeEncodeError as error:
                byte = ord(cell[error.start]) - _FIRST_KEPT
                return not_utf8(origin.name, 0, byte)._replace(origin=origin)
        return self.record(fields, origin)


_KEEP_BYTES = "surrogateescape"
"""how text is decoded: a byte that is not UTF-8 becomes the character _FIRST_KEPT + byte"""
_FIRST_KEPT = 0xDC00
_LONGEST_CELL = 2**24
"""characters of a cell, and of a line, of a CSV file, at most"""
_SHOWN = 60
"""characters of a line that an error shows"""


class _CsvRow(NamedTuple):
    """A row of a CSV file, or its fault."""

    cells: list[str]
    line: str = ""
    """the first of its lines"""
    fault: str = ""
    detail: str = ""

    @property
    def shown(self) -> str:
        """Return the beginning of its first line, for an error message."""
        return repr(self.line.rstrip("\r\n")[:_SHOWN])


class _RowLines:
    """The lines of a CSV file. Those that were read for a row can be read again."""

    def __init__(self, file: TextIO) -> None:
        self.of_row: list[str] = []
        self._file = file
        self._again: deque[str] = deque()

    def __iter__(self) -> "_RowLines":
        return self

    def __next__(self) -> str:
        """Return the next line. Raises OSError if it is too long."""
        line = self._again.popleft() if self._again else self._file.readline(_LONGEST_CELL)
        if not line:
            raise StopIteration
        if len(line) == _LONGEST_CELL:
            raise OSError(f"a line of over {_LONGEST_CELL:,} characters")
        self.of_row.append(line)
        return line

    def end_row(self, lines: int) -> None:
        """End a row that has the first `lines` of the lines that were read for it."""
        self._again.extendleft(reversed(self.of_row[lines:]))
        self.of_row.clear()


def _csv_rows(file: TextIO, delimiter: str) -> Iterator[_CsvRow]:
    """Yield the rows of a CSV file, without empty lines.

    Where a quote that opens a cell is not closed as it should be, one line is a row with that fault, and reading goes
    on in the next line: all rows up to the next quote, or to the end of the file, would be in that cell.
    """
    csv.field_size_limit(_LONGEST_CELL)
    lines = _RowLines(file)
    while True:
        try:
            for cells in csv.reader(lines, delimiter=delimiter, strict=True):
                if cells:
                    yield _CsvRow(cells, lines.of_row[0])
                lines.end_row(len(lines.of_row))
            return
        except csv.Error:
            row = _CsvRow([], lines.of_row[0], fault="a quote without its end")
            detail = (
                f": in {row.shown} a quote opens a cell, and none in {_LONGEST_CELL:,} characters closes it before "
                f"{delimiter!r} or a line end (inside such a cell a quote is written twice)"
            )
            yield row._replace(detail=detail)
            lines.end_row(1)
