"""The forms of a source's records: texts here, conversations in `conversation_records.py`.

A reader of files, or of the hub, hands each object of JSON and each row of a table to a form.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchllm.tools.prepare.records import MASKS_OF_TOKENS, WRONG_KEY, Origin, TextRecord, check_document

if TYPE_CHECKING:
    import pyarrow


class RecordForm(ABC):
    """How an object or a row becomes a record."""

    setting: str
    """name of `key` in the config"""
    others: Sequence[str]
    """other keys that are read, where they are there"""

    def __init__(self, key: str) -> None:
        """`key`: of the content of a record, in an object or among the columns."""
        self.key = key

    @abstractmethod
    def record(self, fields: Mapping[str, Any], origin: Origin, is_row: bool) -> TextRecord:
        """Return the record of an object that has the key; is_row: of a row of a table."""

    @abstractmethod
    def wrong_column(self, schema: "pyarrow.Schema") -> str:
        """Return why a table has no column of such records; "" if it has one."""

    def record_of_object(self, fields: Mapping[str, Any], origin: Origin) -> TextRecord:
        """Return the record of an object of JSON."""
        if self.key in fields:
            return self.record(fields, origin, is_row=False)
        names = ", ".join(fields) or "nothing"
        return TextRecord(origin, fault=WRONG_KEY, detail=f": no {self.key!r}, it has: {names} ({self.setting})")

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return the names of a table's columns that are read."""
        return [name for name in names if name == self.key or name in self.others]

    def describe_count(self, names: Sequence[str]) -> str:
        """Return how many columns of a table have the name that one should have."""
        count = names.count(self.key)
        return f"{count} columns are named {self.key!r}" if count else f"no column {self.key!r}"


_TEXT_TYPES = ("string", "large_string", "string_view", "null")
"""arrow's names of the types of a column of texts; all rows of a column of type null lack one"""
_LIST = re.compile(r"(large_|fixed_size_)?list")


class TextForm(RecordForm):
    """A text, or the ids of its tokens."""

    setting = "data.sources.text_key"
    others = MASKS_OF_TOKENS

    def record(self, fields: Mapping[str, Any], origin: Origin, is_row: bool) -> TextRecord:
        return check_document(fields, self.key, origin)

    def wrong_column(self, schema: "pyarrow.Schema") -> str:
        listed = ", ".join(f"{field.name} ({field.type})" for field in schema)
        if schema.names.count(self.key) != 1:
            advice = ' = "input_ids" trains on the tokens as they are' if "input_ids" in schema.names else ""
            return f": {self.describe_count(schema.names)}, it has: {listed} ({self.setting}{advice})"
        column = schema.field(self.key).type
        values = getattr(column, "value_type", column) if str(column).startswith("dictionary") else column
        if str(values) in _TEXT_TYPES or (_LIST.match(str(values)) and "int" in str(values.value_type)):
            return ""
        return f": the column {self.key!r} is no text, it has: {listed} ({self.setting})"
