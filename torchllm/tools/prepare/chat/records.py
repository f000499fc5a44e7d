"""Conversations in JSON, in tables or in a data set of the hub, as records.

A record's text is JSON: the messages, and the tools that they may call.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
from torchllm.tools.prepare.record_form import RecordForm
from torchllm.tools.prepare.records import Origin, TextRecord, check_text

if TYPE_CHECKING:
    import pyarrow

TOOLS_KEY = "tools"
"""key or column that may hold descriptions of tools, as in OpenAI's form"""


class ConversationForm(RecordForm):
    """A conversation."""

    setting = "data.sources.messages_key"
    others = (TOOLS_KEY, *ALPACA, *MASKS_OF_CONVERSATIONS)

    def record(self, fields: Mapping[str, Any], origin: Origin, is_row: bool) -> TextRecord:
        """Return the record of an object that has the key."""
        return check_conversation(fields, self.key, origin, has_columns=is_row)

    def wrong_column(self, schema: "pyarrow.Schema") -> str:
        """Return that the column of the conversations is missing; "" if it is not."""
        if schema.names.count(self.key) == 1:
            return ""
        return f": {self.describe_count(schema.names)}, it has: {', '.join(schema.names)} ({self.setting})"


def check_conversation(fields: Mapping[str, Any], key: str, origin: Origin, has_columns: bool = False) -> TextRecord:
    """Return the record of an object with messages under `key`. has_columns: as in `read_messages`."""
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
