"""Conversations in JSON, in tables or in a data set of the hub, as records.

A record's text is JSON: the messages, and the tools that they may call.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchllm.config import Source
from torchllm.tools.prepare.chat.messages import (
    ALPACA,
    MASKS_OF_CONVERSATIONS,
    NESTED,
    BadConversation,
    read_alpaca,
    read_messages,
    read_tools,
    refuse_masks,
)
from torchllm.tools.prepare.chat.template import Conversation
from torchllm.tools.prepare.records import Origin, TextRecord, check_text
from torchllm.tools.prepare.source_files import SourceFile
from torchllm.tools.prepare.sources import (
    HubRows,
    JsonLineFiles,
    ParquetFiles,
    RawSource,
    TableFiles,
    count_of_column,
)
from torchllm.tools.prepare.tables import ArrowFiles, CsvFiles

if TYPE_CHECKING:
    import pyarrow

TOOLS_KEY = "tools"
"""key or column that may hold descriptions of tools, as in OpenAI's form"""
_OTHER_KEYS = (TOOLS_KEY, *ALPACA, *MASKS_OF_CONVERSATIONS)


def open_conversations(source: Source, files: Sequence[SourceFile]) -> RawSource:
    """Return the reader of a source of conversations; `files` are its `source_files`.

    Raises DataError if it is a data set of the hub that cannot be loaded.
    """
    if source.kind == "hub":
        return ConversationRows(source)
    key = source.messages_key
    if source.kind == "parquet":
        return ConversationParquet(files, key)
    if source.kind == "arrow":
        return ConversationArrow(files, key)
    if source.kind == "csv":
        return ConversationCsv(files, key, source.delimiter)
    return ConversationLines(files, source.messages_key)


class ConversationLines(JsonLineFiles):
    """A source whose lines are conversations in JSON."""

    def record_of(self, fields: dict[str, Any], origin: Origin) -> TextRecord:
        """Return the record of an object."""
        return check_conversation(fields, self.key, origin)


class _ConversationTable(TableFiles):
    """A source whose conversations are rows of tables."""

    def wrong_column(self, schema: "pyarrow.Schema") -> str:
        """Return that the column of the conversations is missing; "" if it is not."""
        if schema.names.count(self.key) == 1:
            return ""
        found = count_of_column(schema.names, self.key)
        return f": {found}, it has: {', '.join(schema.names)} (data.sources.messages_key)"

    def columns(self, schema: "pyarrow.Schema") -> list[str]:
        """Return the names of the columns that are read."""
        return [name for name in schema.names if name == self.key or name in _OTHER_KEYS]

    def record(self, fields: Mapping[str, Any], origin: Origin) -> TextRecord:
        """Return the record of a row."""
        return check_conversation(fields, self.key, origin, has_columns=True)


class ConversationParquet(_ConversationTable, ParquetFiles):
    """A source whose conversations are rows of parquet files."""


class ConversationArrow(_ConversationTable, ArrowFiles):
    """A source whose conversations are rows of Arrow files."""


class ConversationCsv(_ConversationTable, CsvFiles):
    """A source whose conversations are rows of CSV files, in Alpaca's form."""


class ConversationRows(HubRows):
    """A source whose conversations are rows of a split of a data set of the hub."""

    def __init__(self, source: Source) -> None:
        """Look at its files. Raises DataError if that fails, or the column `source.messages_key` is missing."""
        super().__init__(source, source.messages_key, _OTHER_KEYS)

    def record(self, fields: Mapping[str, Any], origin: Origin) -> TextRecord:
        """Return the record of a row."""
        return check_conversation(fields, self.key, origin, has_columns=True)


def check_conversation(fields: Mapping[str, Any], key: str, origin: Origin, has_columns: bool = False) -> TextRecord:
    """Return the record of a row whose messages should be under `key`. has_columns: as in `read_messages`."""
    if key not in fields:
        names = ", ".join(fields) or "nothing"
        detail = f": no {key!r}, it has: {names} (data.sources.messages_key)"
        return TextRecord(origin, fault="wrong key", detail=detail)
    try:
        if isinstance(fields[key], str) and fields.get("output") is not None:
            messages = read_alpaca(fields, key)
        else:
            messages = read_messages(fields[key], key, has_columns)
        tools = read_tools(fields.get(TOOLS_KEY), TOOLS_KEY)
        refuse_masks(fields, "", MASKS_OF_CONVERSATIONS)
        text = json.dumps({"messages": messages, "tools": tools}, ensure_ascii=False, default=str)
    except BadConversation as bad:
        return TextRecord(origin, fault=bad.fault, detail=bad.detail)
    except RecursionError:
        return TextRecord(origin, fault=NESTED)
    return check_text(text, origin)


def conversation_of(record: TextRecord) -> Conversation:
    """Return the conversation of a record without a fault."""
    return Conversation(**json.loads(record.text))
