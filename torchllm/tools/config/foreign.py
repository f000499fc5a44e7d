"""The keys of other programs: torchtitan, transformers, Megatron-LM, nanochat and litgpt (foreign_keys.toml)."""

import difflib
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

PROGRAMS = {"huggingface": "transformers", "megatron": "Megatron-LM"}
"""Names of programs that differ from the names of their tables."""


class Equal(NamedTuple):
    """Our equivalent of another program's key."""

    key: str = ""
    """our key, or section without a dot; "": there is none"""
    remark: str = ""
    """why there is none, or how to set it by hand; "": the value can be taken over or computed"""
    changes: bool = False
    """whether training differs without it"""


@cache
def foreign_keys() -> dict[str, dict[str, Equal]]:
    """Return our equivalent of each key of other programs, by program and key."""
    tables = tomllib.loads(Path(__file__).with_name("foreign_keys.toml").read_text(encoding="utf-8"))
    return {
        program: {key: _equal(text) for keys, text in table.items() for key in keys.split()}
        for program, table in tables.items()
    }


def _equal(text: str) -> Equal:
    if text.startswith("no: "):
        return Equal("", text.removeprefix("no: "))
    if text.startswith("lost: "):
        return Equal("", text.removeprefix("lost: "), changes=True)
    if text.startswith("differs: "):
        return Equal("", f"the architecture differs ({text.removeprefix('differs: ')}): the losses of both will differ")
    key, _, remark = text.partition("; ")
    return Equal(key, remark)


def foreign_hint(key: str, value: Any, cutoff: float = 1.0) -> str:
    """Return our equivalent of another program's key, as a sentence; "" if no program has it.

    `value` is a table if the key names a section: its keys are translated too. cutoff: how like the
    spelling must be, 1.0 for the same.
    """
    for program, table in foreign_keys().items():
        key = next(iter(difflib.get_close_matches(key[:100], table, n=1, cutoff=cutoff)), key)
        equal = table.get(key)
        is_section = isinstance(value, dict)
        if equal is None or (is_section and (not equal.key or "." in equal.key)):
            continue
        theirs = f"{PROGRAMS.get(program, program)}'s {key}"
        if not equal.key:
            return f"{theirs} has no equal here: {equal.remark}"
        inner = [table.get(f"{key}.{name}", Equal()).key for name in value] if is_section else []
        ours = ", ".join(dict.fromkeys(name for name in inner if name)) or equal.key
        return f"{theirs} is {ours}" + (f": {equal.remark}" if equal.remark else "")
    return ""
