"""The reader of sources that are tokenized when a run starts."""

from torchllm.config import Source
from torchllm.data.corpus import SequenceSource
from torchllm.data.readers import ReaderSettings, open_corpus


class RawReader:
    """Reads texts and conversations, which are tokenized and cached: a corpus in the cache."""

    def prepare(self, source: Source, settings: ReaderSettings) -> str:
        """See SourceReader: tokenize the source if it is not cached."""
        # Not needed by ranks that only open a corpus prepared by one process of their node.
        from torchllm.tools.prepare.cache import plan_corpus, prepare_cached

        return str(prepare_cached(plan_corpus(source, settings), settings.data))

    def open(self, source: Source, folder: str, settings: ReaderSettings) -> SequenceSource:
        return open_corpus(folder, settings)
