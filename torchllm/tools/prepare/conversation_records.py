"""Conversations in JSON, in tables or in a data set of the hub, as records.

A record's text is JSON: the messages, and the tools that they may call.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchllm.tools.prepare.chat.messages import (
    MASKS_OF_CONVERSATIONS,
    NESTED,
    read_messages,
    read_tools,
    refuse_masks,
)
from torchllm.tools.prepare.chat.template import RefusedConversation
from torchllm.tools.prepare.record_form import RecordForm
from torchllm.tools.prepare.records import Origin, TextRecord, check_text

if TYPE_CHECKING:
    import pyarrow

TOOLS_KEY = "tools"
"""key or column that may hold descriptions of tools, as in OpenAI's form"""


class ConversationForm(RecordForm):
    """A conversation."""

    setting = "data.sources.messages_key"
    others = (TOOLS_KEY, *MASKS_OF_CONVERSATIONS)

    def record(self, fields: Mapping[str, Any], origin: Origin, is_row: bool) -> TextRecord:
        try:
            messages = read_messages(fields[self.key], self.key, is_row)
            tools = read_tools(fields.get(TOOLS_KEY), TOOLS_KEY)
            refuse_masks(fields, "", MASKS_OF_CONVERSATIONS)
            text = json.dumps({"messages": messages, "tools": tools}, ensure_ascii=False, default=str)
        except RefusedConversation as refusal:
            return TextRecord(origin, fault=refusal.fault, detail=refusal.detail)
        except RecursionError:
            return TextRecord(origin, fault=NESTED)
        return check_text(text, origin)

    def wrong_column(self, schema: "pyarrow.Schema") -> str:
        if schema.names.count(self.key) == 1:
            return ""
        return f": {self.describe_count(schema.names)}, it has: {', '.join(schema.names)} ({self.setting})"
