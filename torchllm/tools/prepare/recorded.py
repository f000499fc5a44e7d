"""Go on with the corpus that a run's checkpoint recorded, whatever a new run would choose or refuse."""

import logging
from collections.abc import Callable
from contextlib import suppress

from torchllm.config import Source
from torchllm.data.error import DataError
from torchllm.data.readers import ReaderSettings, SourceReader, name_source

log = logging.getLogger(__name__)


def prepare_recorded(
    reader: SourceReader, source: Source, settings: ReaderSettings, recorded: str, prepare: Callable[[bool], str]
) -> str:
    """Return the folder of the corpus with the fingerprint `recorded`, or else of today's; "": there is none.

    prepare: makes today's corpus (False), or the one that earlier versions made (True). Raises DataError if that of
    today is refused and the earlier one has another fingerprint.
    """
    refusal: DataError | None = None
    folder = ""
    try:
        folder = prepare(False)
        if recorded in ("", reader.open(source, folder, settings).fingerprint):
            return folder
    except DataError as error:
        refusal = error
    with suppress(DataError):  # e.g. it is too large
        if recorded and reader.open(source, earlier := prepare(True), settings).fingerprint == recorded:
            log.info(
                "%s: the run goes on with the files and tokens that its corpus recorded; a new run would choose other "
                "files by their names and links, put another token before a document, or refuse them",
                name_source(settings.data.sources.index(source), source),
            )
            return earlier
    if refusal is not None:
        raise refusal
    return folder
