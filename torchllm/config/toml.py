"""Values as TOML, and as messages show wrong ones."""

import datetime
import json
from typing import Any


def toml_value(value: bool | int | float | str | tuple[Any, ...] | list[Any]) -> str:
    """Return one value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # JSON's escapes are TOML's, except that TOML wants DEL escaped too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)


def shown(value: object) -> str:
    """Return a wrong value for a message, on one line and not too long."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, (datetime.date, datetime.time)):
        return f"the date or time {value}"
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print the longest ones
        return "a number of more than 64 bits"
    assert isinstance(value, (bool, int, float, str)), value
    text = toml_value(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."
