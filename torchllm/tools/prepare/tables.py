"""Tables in CSV and Arrow files. A file is in one shard, since none can be read from any byte on."""

import csv
import io
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

from torchllm.tools.prepare.file_form import foreign_form
from torchllm.tools.prepare.record_form import RecordForm
from torchllm.tools.prepare.records import (
    EMPTY_FILE,
    MASKS_OF_TOKENS,
    WRONG_KEY,
    Origin,
    TextRecord,
    another_form,
    not_utf8,
)
from torchllm.tools.prepare.source_files import SourceFile
from torchllm.tools.prepare.sources import FilePart, TableFiles, TextFiles, is_blank
from torchllm.tools.prepare.unpack import first_bytes, open_unpacked

if TYPE_CHECKING:
    import pyarrow

_KEYS = "data.sources.text_key, messages_key or delimiter"


class WholeTables(TableFiles):
    """Tables of which a shard has whole files."""

    cut_shards = TextFiles.cut_shards

    def read_rows(self, part: FilePart) -> Iterator[TextRecord]:
        path = part.file.path
        if is_blank(path):
            yield TextRecord(Origin(path), fault=EMPTY_FILE)
        else:
            yield from self.read_table(path)

    @abstractmethod
    def read_table(self, path: str) -> Iterator[TextRecord]:
        """Yield a record per row of a file. Raises OSError and pyarrow's errors."""


class ArrowFiles(WholeTables):
    """Arrow files, as `datasets` saves them (`save_to_disk`); in Arrow's stream or file format."""

    def read_table(self, path: str) -> Iterator[TextRecord]:
        import pyarrow

        row = 0
        with pyarrow.memory_map(path) as file:
            for batch in _batches(file):
                if detail := self.form.wrong_column(batch.schema):
                    yield TextRecord(Origin(path), fault=WRONG_KEY, detail=detail)
                    return
                yield from self.rows_of(batch.select(self.form.columns(batch.schema.names)), path, row)
                row += batch.num_rows


def _batches(file: "pyarrow.NativeFile") -> "Iterator[pyarrow.RecordBatch]":
    """Yield the batches of rows of an Arrow file. Raises OSError, and pyarrow's errors, if it is not whole.

    A reader stops without a word behind the last whole batch, so what follows the batches is looked at.
    """
    import pyarrow

    begin = len(_FILE_BEGIN) if file.read(len(_FILE_BEGIN)) == _FILE_BEGIN else 0
    file.seek(begin)
    yield from pyarrow.ipc.open_stream(file)
    end = file.tell()
    file.seek(max(0, end - len(_STREAM_END)))
    is_whole = file.read(len(_STREAM_END)) == _STREAM_END
    size = file.size()
    if begin:  # a table of contents, its size and ARROW1
        file.seek(max(end, size - 10))
        tail = file.read()
        is_whole &= tail.endswith(b"ARROW1") and int.from_bytes(tail[-10:-6], "little") == size - end - 10
    else:
        is_whole &= size == end
    if not is_whole:
        raise OSError("it was cut off, or joined with another file: what ends an Arrow file is not at its end")


_FILE_BEGIN = b"ARROW1\0\0"
"""a file in Arrow's file format is these bytes, a stream and a table of contents"""
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


class CsvFiles(WholeTables):
    """CSV and TSV files with a line of column names; values are text."""

    def __init__(self, files: Sequence[SourceFile], form: RecordForm, delimiter: str) -> None:
        """`form`: of a record; `delimiter`: between two cells, "" for the usual one."""
        super().__init__(files, form)
        self.delimiter = delimiter

    def read_table(self, path: str) -> Iterator[TextRecord]:
        if form := foreign_form(first_bytes(path)):
            yield another_form(path, form)
            return
        is_tabbed = ".tsv" in path.rpartition("/")[2].lower()
        with open_unpacked(path) as file, io.TextIOWrapper(file, "utf-8-sig", _KEEP_BYTES, newline="") as text:
            rows = _csv_rows(text, self.delimiter or ("\t" if is_tabbed else ","))
            header = next(rows, _CsvRow([]))
            names = header.cells
            if names.count(self.form.key) != 1:
                listed = f": {self.form.describe_count(names)}, it has: {', '.join(names)} ({_KEYS})"
                yield TextRecord(Origin(path), fault=header.fault or WRONG_KEY, detail=header.detail or listed)
                return
            masks = {*MASKS_OF_TOKENS} - {self.form.key}  # of ids, which cells are not
            columns = [name for name in self.form.columns(names) if name not in masks]
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
        return self.form.record(fields, origin, is_row=True)


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
