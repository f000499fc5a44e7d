"""Tables in CSV and Arrow files, read by pyarrow. A file is in one shard, since none can be read from any byte on."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

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
from torchllm.tools.prepare.sources import ShardRange, TableFiles, TextFiles, is_blank
from torchllm.tools.prepare.unpack import first_bytes, most_unpacked, open_unpacked, refuse_bomb

if TYPE_CHECKING:
    import pyarrow

_KEYS = "data.sources.text_key, messages_key or delimiter"
_CSV_BLOCK = 2**24
"""bytes of a CSV file that are parsed at a time: a row has no more"""


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
            if any(_is_compressed(memoryview(message.metadata)) for message in _messages(file)):
                raise OSError("its values are compressed, to an unknown size: write it as parquet")
            file.seek(begin)
            row = 0
            for batch in pyarrow.ipc.open_stream(file):
                if detail := self.wrong_column(batch.schema):
                    yield TextRecord(Origin(path), fault=WRONG_KEY, detail=detail)
                    return
                yield from self.rows_of(batch.select(self.columns(batch.schema)), path, row)
                row += batch.num_rows


_FILE_FORMAT = b"ARROW1\0\0"
"""a file in Arrow's file format is these bytes, a stream and a table of contents"""


def _messages(file: Any) -> Iterator[Any]:
    """Yield the messages of an Arrow stream, without their values."""
    import pyarrow

    reader = pyarrow.ipc.MessageReader.open_stream(file)
    while True:
        try:
            yield reader.read_next_message()
        except StopIteration:
            return


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
        """Yield a record per row of a file. Raises OSError and pyarrow's errors."""
        import pyarrow
        from pyarrow.csv import ConvertOptions

        if form := foreign_form(first_bytes(path)):
            yield another_form(path, form)
            return
        wrong: list[TextRecord] = []
        with open_unpacked(path) as file:
            schema = self._open(path, file, wrong, ConvertOptions()).schema
        if schema.names.count(self.key) != 1:
            detail = f": no column {self.key!r}, it has: {', '.join(schema.names)} ({_KEYS})"
            yield TextRecord(Origin(path), fault=WRONG_KEY, detail=detail)
            return
        wrong.clear()
        options = ConvertOptions(
            column_types=dict.fromkeys(schema.names, pyarrow.binary()),
            include_columns=self.columns(schema),
            strings_can_be_null=False,
        )
        row = 0
        with open_unpacked(path) as file:
            for batch in self._open(path, file, wrong, options):
                yield from self.rows_of(batch, path, row)
                row += batch.num_rows
                yield from wrong
                wrong.clear()
        yield from wrong

    def _open(self, path: str, file: Any, wrong: list[TextRecord], options: Any) -> "pyarrow.csv.CSVStreamingReader":
        """Open a file; `wrong` gets the rows with too few or too many cells."""
        from pyarrow import csv

        def skip(row: Any) -> str:
            detail = f": {row.actual_columns} cells in place of {row.expected_columns}: {row.text[:60]!r}"
            wrong.append(TextRecord(Origin(path), fault="another number of cells", detail=detail))
            return "skip"

        is_tabbed = ".tsv" in path.rpartition("/")[2].lower()
        delimiter = self.delimiter or ("\t" if is_tabbed else ",")
        parsing = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip)
        reading = csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK)
        return csv.open_csv(file, read_options=reading, parse_options=parsing, convert_options=options)

    def rows_of(self, batch: "pyarrow.RecordBatch", path: str, row: int) -> Iterator[TextRecord]:
        """Yield the records of a batch, whose first row is `row` of the file."""
        for values in zip(*batch.columns, strict=True):
            origin = Origin(path, row=row)
            row += 1
            try:
                cells = [value.as_py().decode() for value in values]
                yield self.record(dict(zip(batch.schema.names, cells, strict=True)), origin)
            except UnicodeDecodeError as error:
                yield not_utf8(path, 0, error.object[error.start])._replace(origin=origin)
