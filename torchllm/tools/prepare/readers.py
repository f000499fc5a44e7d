"""Readers of the sources that are no corpus yet: text, which is tokenized and cached, and tokens of other programs."""

from pathlib import Path

from torchllm.config import Source
from torchllm.data.corpus import SequenceSource
from torchllm.data.readers import ReaderSettings, open_corpus
from torchllm.tools.prepare.cache import plan_corpus, prepare_cached
from torchllm.tools.prepare.in_place import InPlaceCorpus, describe_in_place, in_place_settings


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


class InPlaceReader:
    """Reads token files of another program where they are, after describing them in the cache."""

    def prepare(self, source: Source, settings: ReaderSettings, earlier: bool = False) -> str:
        """See SourceReader: write the description if it is not cached."""
        return str(describe_in_place(source, settings.data, settings.vocab, earlier))

    def open(self, source: Source, folder: str, settings: ReaderSettings) -> SequenceSource:
        """See SourceReader."""
        return InPlaceCorpus(Path(folder), in_place_settings(source, settings.data), settings.vocab)
