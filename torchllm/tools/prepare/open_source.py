"""Choose the reader of a raw source by its kind."""

from collections.abc import Sequence

from torchllm.config import Source
from torchllm.tools.prepare.hub_rows import HubRows
from torchllm.tools.prepare.record_form import RecordForm, TextForm
from torchllm.tools.prepare.source_files import SourceFile
from torchllm.tools.prepare.sources import (
    DelimitedTextFiles,
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
        return HubRows(source, _form_of(source))
    if source.kind == "jsonl":
        return JsonLineFiles(files, _form_of(source))
    if source.kind == "parquet":
        return ParquetFiles(files, _form_of(source))
    if source.delimiter:
        return DelimitedTextFiles(files, source.delimiter)
    return TextFiles(files)


def _form_of(source: Source) -> RecordForm:
    if not source.messages_key:
        return TextForm(source.text_key)
    from torchllm.tools.prepare.conversation_records import ConversationForm  # with packages for templates

    return ConversationForm(source.messages_key)
