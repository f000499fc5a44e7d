"""Conversations in JSON lines or in a data set of the hub, as records.

A record's text is JSON: the messages, and the tools that they may call.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchllm.config import Source
from torchllm.tools.prepare.chat.examples import Conversation
from torchllm.tools.prepare.chat.messages import (
    MASKS_OF_CONVERSATIONS,
    NESTED,
    BadConversation,
    read_messages,
    read_tools,
    refuse_masks,
)
from torchllm.tools.prepare.records import Origin, TextRecord, check_text
from torchllm.tools.prepare.source_files import SourceFile
from torchllm.tools.prepare.sources import HubRows, JsonLineFiles, RawSource, parse_json_line

TOOLS_KEY = "tools"
"""key or column that may hold descriptions of tools, as in OpenAI's form"""


def open_conversations(source: Source, files: Sequence[SourceFile]) -> RawSource:
    """Return the reader of a source of conversations; `files` are its `source_files`.

    Raises DataError if it is a data set of the hub that cannot be loaded.
    """
    if source.kind == "hub":
        return ConversationRows(source)
    return ConversationLines(files, source.messages_key)


class ConversationLines(JsonLineFiles):
    """A source whose lines are conversations in JSON."""

    def record(self, line: bytes, path: str, byte: int) -> TextRecord:
        """Return the record of a line that begins at `byte` of a file."""
        fields = parse_json_line(line, path, byte)
        if isinstance(fields, TextRecord):
            return fields
        return check_conversation(fields, self.key, Origin(path, byte=byte))


class ConversationRows(HubRows):
    """A source whose conversations are rows of a split of a data set of the hub."""

    def __init__(self, source: Source) -> None:
        """Look at its files. Raises DataError if that fails, or the column `source.messages_key` is missing."""
        super().__init__(source, source.messages_key, [TOOLS_KEY])

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
