"""Cut a long text into pieces, so that the ids of the pieces, one after another, are the ids of the whole text.

A tokenizer splits text by a regular expression before it merges bytes. Each match ends where the next begins, so a text
may be cut where a match must end, whatever follows, or must begin, whatever comes before. `CUT` finds such places for
the patterns of GPT-2 and Llama 3: none of their alternatives matches across

- the begin of a space after a character that is not a blank: a match of letters, digits or signs ends there;
- the end of a line, if neither the character before nor the one after the line end is a blank, and the one after it
  is no "/", which GPT-4o's pattern adds to the signs before a line end;
- the begin of a punctuation mark after an ideograph: a match of letters ends there.

The text before the first and third place does not end with a blank, so it does not matter that the text ends there
(`\\s+$`, `\\s+(?!\\S)`); a single line end between two other characters is a match, or the end of one, in any case.
"""

import re
from collections.abc import Callable, Iterable, Iterator

CUT = re.compile(r"(?<=\S)(?= )|(?<=\S\n)(?=[^\s/])|(?<=[\u4e00-\u9fa5])(?=[\u3001\u3002\uff0c])")
"""Python's \\s includes all blanks of the patterns (Unicode's) and more, so every place found is valid"""
PIECE = 2**18
"""longer texts, in characters, are cut; a tokenizer.json takes some 250 bytes per character while it encodes"""
LONGEST = 2**22
"""most characters that are tokenized in one piece if there is no place to cut them"""
CONTEXT = 256
"""characters on both sides of a place that decide whether a tokenizer.json may cut there"""
_WINDOW = 4096
"""the search for the last place starts with this number of characters"""

FindCut = Callable[[str, int], int]
"""(text, start) -> the last place to cut the text after `start`, 0 if there is none"""


class NoPlaceToCut(ValueError):
    """A text is too long for one piece, and has no place to cut it."""


def cut_places(text: str, start: int) -> Iterator[int]:
    """Yield the places start < i < len(text) to cut a text into text[:i] and text[i:], the last first."""
    window = _WINDOW
    stop = len(text)
    while stop > start + 1:
        begin = max(start, stop - window)
        cuts = [match.start() for match in CUT.finditer(text, begin + 1, stop)]
        yield from reversed(cuts)
        stop = begin + 1
        window *= 16


def cut_pieces(blocks: Iterable[str], find_cut: FindCut, size: int = PIECE, longest: int = LONGEST) -> Iterator[str]:
    """Yield a text, given in blocks, in pieces of about `size` characters.

    Raises NoPlaceToCut if `longest` characters have no place to cut them.
    """
    text = ""
    searched = 0
    for block in blocks:
        text += block
        if len(text) <= size:
            continue
        cut = find_cut(text, searched)
        if cut:
            yield text[:cut]
            text = text[cut:]
            searched = 0
        elif len(text) > longest:
            raise NoPlaceToCut
        else:
            searched = max(0, len(text) - CONTEXT - 1)
    if text:
        yield text
