"""Choose the reader of a raw source of text by its kind."""

from collections.abc import Sequence

from torchllm.config import Source
from torchllm.tools.prepare.records import MASKS_OF_TOKENS
from torchllm.tools.prepare.source_files import SourceFile
from torchllm.tools.prepare.sources import (
    DelimitedTextFiles,
    HubRows,
    JsonLineFiles,
    ParquetFiles,
    RawSource,
    TextFiles,
)


def open_raw_source(source: Source, files: Sequence[SourceFile]) -> RawSource:
    """Return the reader of a source; `files` are its `source_files`.

    Raises DataError if it is a data set of the hub that cannot be loaded.
    """
    if source.kind == "hub":
        return HubRows(source, source.text_key, MASKS_OF_TOKENS)
    if source.kind == "jsonl":
        return JsonLineFiles(files, source.text_key)
    if source.kind == "parquet":
        return ParquetFiles(files, source.text_key)
    if source.kind in ("csv", "arrow"):
        from torchllm.tools.prepare.tables import ArrowFiles, CsvFiles  # with pyarrow

        return (
            ArrowFiles(files, source.text_key)
            if source.kind == "arrow"
            else CsvFiles(files, source.text_key, source.delimiter)
        )
    if source.delimiter:
        return DelimitedTextFiles(files, source.delimiter)
    return TextFiles(files)
