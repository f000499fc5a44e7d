"""Opens the sources of data.sources: one reader per kind.

Token corpora and random tokens are read here. Readers of other kinds are registered (`torchllm/data/registry.py`).
"""

from pathlib import Path
from typing import NamedTuple, Protocol

from torchllm.config import Data, Finetune, Source
from torchllm.config.errors import DataError
from torchllm.config.files import cache_root, is_url
from torchllm.data.corpus import Corpus, SequenceSource
from torchllm.data.registry import READERS
from torchllm.data.tokenizer import Tokenizer


class ReaderSettings(NamedTuple):
    """The part of the config that determines the sequences of a source."""

    data: Data
    vocab: int
    """model.vocab"""
    tokenizer: Tokenizer | None
    """None only if every source is synthetic"""
    finetune: Finetune | None = None
    """how conversations become tokens; None: they are an error"""
    sequence_length: int = 0
    """training.sequence_length, for conversations"""


def verified_records(data: Data) -> Path:
    """Return the folder with the records of verified files."""
    return cache_root(data) / "verified"


class SourceReader(Protocol):
    """Reads the sources of a kind."""

    def prepare(self, source: Source, settings: ReaderSettings) -> str:
        """Make the input of `open`, e.g. a corpus in the cache, if it is missing; return its folder, or "".

        One process per node calls it. Raises DataError.
        """
        return ""

    def open(self, source: Source, folder: str, settings: ReaderSettings) -> SequenceSource:
        """Open a source; `folder` is the result of `prepare`. Raises DataError if it does not fit the run."""


class TokensReader(SourceReader):
    """Reads a corpus folder that recipes/prepare.py has written."""

    def prepare(self, source: Source, settings: ReaderSettings, recorded: str = "") -> str:
        return corpus_folder(source.path, settings.data)

    def open(self, source: Source, folder: str, settings: ReaderSettings) -> SequenceSource:
        return open_corpus(folder if is_url(source.path) else source.path, settings)


class SyntheticReader(SourceReader):
    """Makes random tokens."""

    def open(self, source: Source, folder: str, settings: ReaderSettings) -> SequenceSource:
        from torchllm.data.synthetic import Synthetic  # of no use to other runs

        tokenizer = settings.tokenizer
        return Synthetic(settings.vocab if tokenizer is None else min(settings.vocab, tokenizer.vocab))


READERS |= {"tokens": TokensReader, "synthetic": SyntheticReader}


def reader_of(kind: str) -> SourceReader:
    """Return the reader of a kind of sources."""
    if kind not in READERS:
        raise DataError(f"data.sources: kind {kind!r} has no reader: import torchllm.recipe, which registers all")
    reader: SourceReader = READERS[kind]()
    return reader


def name_source(key: str, source: Source) -> str:
    """Return the name of a source in errors: data.sources.0 (text 'a/*.txt')."""
    return f"{key} ({describe_source(source.kind, source.path)})"


def describe_source(kind: str, path: str) -> str:
    """Describe a source: text 'a/*.txt'."""
    return f"{kind} {path!r}" if path else kind


def corpus_folder(path: str, data: Data) -> str:
    """Return the folder of the description of a corpus: its own, or for a URL a copy in the cache. Raises DataError."""
    if not is_url(path):
        return path
    from torchllm.data.remote_shards import copy_description  # most runs need none

    return str(copy_description(path, cache_root(data)))


def open_corpus(folder: str, settings: ReaderSettings) -> Corpus:
    """Open a corpus folder. Raises DataError if its tokenizer is not the run's, or a token is not under its vocab."""
    data, tokenizer, vocab = settings.data, settings.tokenizer, settings.vocab
    assert tokenizer is not None, "only random tokens need none"
    corpus = Corpus(folder, verified_records(data))
    if corpus.header.tokenizer != tokenizer.fingerprint:
        raise DataError(
            f"{corpus.folder} holds tokens of {corpus.header.tokenizer!r}, but data.tokenizer is "
            f"{data.tokenizer!r} ({tokenizer.fingerprint!r}): set it to the one the tokens were made with"
        )
    if corpus.is_packed and not data.document_mask:
        raise DataError(
            f"{corpus.folder} holds conversations, and several are packed into a sequence: set data.document_mask = "
            "true, or each would attend to the conversations before it"
        )
    largest = corpus.header.max_token
    if largest >= vocab:
        raise DataError(
            f"{corpus.folder} holds token id {largest} >= model.vocab = {vocab}: raise model.vocab "
            f"(data.tokenizer has {tokenizer.vocab} ids)"
        )
    return corpus
