"""Reader of the sources that are tokenized and cached when a run starts."""

from functools import partial

from torchllm.config import Source
from torchllm.data.corpus import SequenceSource
from torchllm.data.readers import ReaderSettings, open_corpus


class RawReader:
    """Reads texts and conversations: a corpus in the cache."""

    def prepare(self, source: Source, settings: ReaderSettings, recorded: str = "") -> str:
        """See SourceReader: tokenize the source if it is not cached."""
        # Of no use to ranks that only open what one process of their node has prepared.
        from torchllm.tools.prepare.cache import prepare_raw
        from torchllm.tools.prepare.recorded import prepare_recorded

        return prepare_recorded(self, source, settings, recorded, partial(prepare_raw, source, settings))

    def open(self, source: Source, folder: str, settings: ReaderSettings) -> SequenceSource:
        """See SourceReader."""
        return open_corpus(folder, settings)
