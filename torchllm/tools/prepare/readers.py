"""Readers of sources that are prepared when a run starts, also as the run's checkpoint has recorded them."""

import logging
from collections.abc import Callable
from contextlib import suppress

from torchllm.config import Source
from torchllm.data.corpus import SequenceSource
from torchllm.data.error import DataError
from torchllm.data.readers import ReaderSettings, SourceReader, name_source, open_corpus
from torchllm.tools.prepare.plan import Rules

log = logging.getLogger(__name__)


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
                    name_source(f"data.sources.{settings.data.sources.index(source)}", source),
                )
                return earlier
    if refusal is not None:
        raise refusal
    return folder


class RawReader:
    """Reads texts and conversations, which are tokenized and cached: a corpus in the cache."""

    def prepare(self, source: Source, settings: ReaderSettings, recorded: str = "") -> str:
        """See SourceReader: tokenize the source if it is not cached."""
        # Of no use to ranks that only open what one process of their node has prepared.
        from torchllm.tools.prepare.cache import plan_corpus, prepare_cached

        def prepare(rules: Rules) -> str:
            plan = plan_corpus(source, settings, rules=rules)
            return str(prepare_cached(plan, settings.data, rules))

        return prepare_recorded(self, source, settings, recorded, prepare)

    def open(self, source: Source, folder: str, settings: ReaderSettings) -> SequenceSource:
        return open_corpus(folder, settings)
