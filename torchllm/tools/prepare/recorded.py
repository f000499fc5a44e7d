"""Go on with the corpus that a run's checkpoint recorded, whatever a new run would choose or refuse."""

import logging
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

from torchllm.config import Source
from torchllm.data.error import DataError
from torchllm.data.readers import ReaderSettings, SourceReader, name_source

log = logging.getLogger(__name__)


class Rules(IntEnum):
    """Rules of the versions of torchllm that make a corpus of a source. A run goes on by the rules of its beginning."""

    FIRST = 1
    """test sets are trained, folders behind links are not searched, and a document may begin with another token"""
    ALL_FILES = 2
    """a folder of text is all its files, torchllm's own output is read, of few documents none may be held out, and tool
    calls stay as they are written"""
    ONE_BEGIN = 3
    """of several begins of a document, the last is put"""
    NOW = 4


def prepare_recorded(
    reader: SourceReader, source: Source, settings: ReaderSettings, recorded: str, prepare: Callable[[Rules], str]
) -> str:
    """Return the folder of the corpus with the fingerprint `recorded`, or else of today's; "": there is none.

    prepare: makes the corpus by these rules. Raises DataError if today's is refused and earlier ones have other
    fingerprints.
    """
    refusal: DataError | None = None
    folder = ""
    try:
        folder = prepare(Rules.NOW)
        if recorded in ("", reader.open(source, folder, settings).fingerprint):
            return folder
    except DataError as error:
        refusal = error
    for rules in (Rules.ONE_BEGIN, Rules.ALL_FILES, Rules.FIRST) if recorded else ():
        with suppress(DataError):  # e.g. it is too large
            if reader.open(source, earlier := prepare(rules), settings).fingerprint == recorded:
                log.info(
                    "%s: the run goes on with the files and tokens that its corpus recorded; a new run would choose or "
                    "hold out others, put another token before a document, write tool calls otherwise, or refuse them",
                    name_source(settings.data.sources.index(source), source),
                )
                return earlier
    if refusal is not None:
        raise refusal
    return folder
