"""Reader of the sources that are tokenized and cached when a run starts."""

from functools import partial

from torchllm.config import Source
from torchllm.data.corpus import SequenceSource
from torchllm.data.readers import ReaderSettings, open_corpus
from torchllm.tools.prepare.cache import plan_corpus, prepare_cached
from torchllm.tools.prepare.earlier_files import Rules
from torchllm.tools.prepare.recorded import prepare_recorded


class RawReader:
    """Reads texts and conversations: a corpus in the cache."""

    def prepare(self, source: Source, settings: ReaderSettings, recorded: str = "") -> str:
        """See SourceReader: tokenize the source if it is not cached."""
        assert settings.tokenizer is not None
        plan = partial(
            plan_corpus,
            source,
            settings.data,
            settings.tokenizer,
            settings.vocab,
            finetune=settings.finetune,
            sequence_length=settings.sequence_length,
        )

        def prepare(rules: Rules) -> str:
            return str(prepare_cached(plan(rules=rules), settings.data, rules))

        return prepare_recorded(self, source, settings, recorded, prepare)

    def open(self, source: Source, folder: str, settings: ReaderSettings) -> SequenceSource:
        """See SourceReader."""
        return open_corpus(folder, settings)
