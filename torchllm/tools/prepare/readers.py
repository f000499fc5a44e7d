"""Reader of the sources that are tokenized and cached when a run starts."""

from torchllm.config import Source
from torchllm.data.corpus import SequenceSource
from torchllm.data.readers import ReaderSettings, open_corpus
from torchllm.tools.prepare.cache import plan_corpus, prepare_cached


class RawReader:
    """Reads texts and conversations: a corpus in the cache."""

    def prepare(self, source: Source, settings: ReaderSettings, earlier: bool = False) -> str:
        """See SourceReader: tokenize the source if it is not cached."""
        assert settings.tokenizer is not None
        plan = plan_corpus(
            source,
            settings.data,
            settings.tokenizer,
            settings.vocab,
            finetune=settings.finetune,
            sequence_length=settings.sequence_length,
            earlier=earlier,
        )
        return str(prepare_cached(plan, settings.data))

    def open(self, source: Source, folder: str, settings: ReaderSettings) -> SequenceSource:
        """See SourceReader."""
        return open_corpus(folder, settings)
