"""Marks in a rendered conversation: characters that say what a piece of it is, and are removed before it is encoded.

A chat template is a program that returns one text. What the text does not show is put into it by marks: which parts the
model generates (`{% generation %}` blocks), and which words of a message look like special tokens but were written by
somebody. Marks are private-use characters (Unicode plane 16), which a message must not hold.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

GENERATED_BEGIN, GENERATED_END = "\U0010fff0", "\U0010fff1"
"""around what a template says that the model generates"""
PLAIN_BEGIN, PLAIN_END = "\U0010fff2", "\U0010fff3"
"""around words of a message that look like special tokens"""
FENCE = "\U0010fff4"
"""around special tokens of the template, where words of a message look like them (see `encoder.ChatEncoder`)"""
MARKS = (GENERATED_BEGIN, GENERATED_END, PLAIN_BEGIN, PLAIN_END, FENCE)

_MARK = re.compile(f"[{''.join(MARKS)}]")


class TextSpan(NamedTuple):
    """The characters start <= i < end of a text."""

    start: int
    end: int


class RenderedChat(NamedTuple):
    """What a chat template made of a conversation."""

    text: str
    """without marks"""
    generated: Sequence[TextSpan]
    """`{% generation %}` blocks, in order"""
    plain: Sequence[TextSpan]
    """words of messages that look like special tokens, in order"""


def read_marks(marked: str) -> RenderedChat:
    """Return a rendered text without its marks, and what they said.

    A mark whose partner the template cut off is dropped.
    """
    parts: list[str] = []
    opened: dict[str, int] = {}
    spans: dict[str, list[TextSpan]] = {GENERATED_BEGIN: [], PLAIN_BEGIN: []}
    begin_of = {GENERATED_END: GENERATED_BEGIN, PLAIN_END: PLAIN_BEGIN}
    position = 0
    start = 0
    for match in _MARK.finditer(marked):
        parts.append(marked[start : match.start()])
        position += match.start() - start
        start = match.end()
        mark = match.group()
        if mark in spans:
            opened[mark] = position
        elif begin_of.get(mark) in opened:
            begin = begin_of[mark]
            spans[begin].append(TextSpan(opened.pop(begin), position))
    parts.append(marked[start:])
    return RenderedChat("".join(parts), spans[GENERATED_BEGIN], spans[PLAIN_BEGIN])


def has_marks(value: Any) -> bool:
    """Return whether a value of JSON holds a character that is a mark."""
    return _MARK.search(json.dumps(value, ensure_ascii=False)) is not None


class SpecialWords:
    """Finds special tokens, by their text, in what somebody has written."""

    def __init__(self, special: Sequence[str]) -> None:
        """`special`: the text of each special token of the tokenizer."""
        self._pattern = special_pattern(special)

    def mark(self, value: Any) -> Any:
        """Return a value of JSON in whose texts each special token is between marks; keys stay as they are."""
        if isinstance(value, str):
            return self._pattern.sub(rf"{PLAIN_BEGIN}\g<0>{PLAIN_END}", value)
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, dict):
            return {key: self.mark(item) for key, item in value.items()}
        return value


def special_pattern(special: Sequence[str]) -> re.Pattern[str]:
    """Return what matches any of these tokens, the longest first; nothing if there is none."""
    longest_first = sorted(special, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
