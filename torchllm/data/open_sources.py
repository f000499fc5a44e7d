"""Open data.sources on all ranks: one process per node prepares them, all open them and must read the same data."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from torchllm.config import Data, Finetune, Model, Source, Training
from torchllm.config.errors import DataError
from torchllm.config.schema import RAW_KINDS
from torchllm.data.corpus import SequenceSource, ShardStream
from torchllm.data.packing import DataRanks
from torchllm.data.readers import ReaderSettings, reader_of
from torchllm.data.shard import Split
from torchllm.data.tokenizer import describe_documents, load_tokenizer

if TYPE_CHECKING:
    from torchllm.data.verification import Verification

log = logging.getLogger(__name__)

T = TypeVar("T")


class OpenedSources(NamedTuple):
    """The sources of a run, in their order."""

    sources: list[SequenceSource]
    """of data.sources"""
    validation: list[SequenceSource]
    """of data.validation"""
    verification: "Verification | None"
    """on the rank that prepares for its node"""


def open_sources(
    data: Data, training: Training, model: Model, ranks: DataRanks, finetune: Finetune | None
) -> OpenedSources:
    """Prepare and open the sources of a run; DataError if not all ranks read the same data."""

    def prepare() -> tuple[ReaderSettings, str]:
        needs_tokenizer = any(source.kind != "synthetic" for source in data.all_sources.values())
        tokenizer = load_tokenizer(data.tokenizer) if needs_tokenizer else None
        settings = ReaderSettings(data, model.vocab, tokenizer, finetune, training.sequence_length)
        return settings, json.dumps(_prepare(data, settings)) if ranks.prepares else ""

    settings, answers = _on_all_ranks(ranks, prepare)
    folders: list[str] = json.loads(answers[ranks.preparing_rank])
    preparing_ranks = [rank for rank, answer in enumerate(answers) if answer]

    def open_all() -> tuple[OpenedSources, str]:
        opened = _open(folders, data, settings)
        sources, validation = opened[: len(data.sources)], opened[len(data.sources) :]
        verification = None
        if ranks.prepares:
            from torchllm.data.verification import Verification  # a process per node verifies

            corpora = [source for source in opened if isinstance(source, ShardStream)]
            verification = Verification(corpora, preparing_ranks.index(ranks.preparing_rank), len(preparing_ranks))
            verification.begin()
        return OpenedSources(sources, validation, verification), hashlib.sha256(
            _fingerprints(opened).encode()
        ).hexdigest()

    opened, hashes = _on_all_ranks(ranks, open_all)
    if len(set(hashes)) > 1:
        different = dict.fromkeys(ranks.gather_texts(_fingerprints([*opened.sources, *opened.validation])))
        listed = " / ".join(map(str, different))
        raise DataError(f"data.sources: not all ranks read the same data, fingerprints {listed}")
    return opened


def _fingerprints(sources: Sequence[SequenceSource]) -> str:
    return " ".join(source.fingerprint for source in sources)


def _on_all_ranks(ranks: DataRanks, action: Callable[[], tuple[T, str]]) -> tuple[T, list[str]]:
    """Call `action` on every rank; return this rank's result, and the texts of all ranks, by rank.

    Raises DataError on all ranks if it fails on one, so that no rank waits forever.
    """
    text, error, cause = "", "", None
    try:
        result, text = action()
    except Exception as problem:  # a bug must not leave the other ranks waiting either
        cause = problem
        error = str(problem) if isinstance(problem, DataError) else f"{type(problem).__name__}: {problem}"
    texts, errors = [], []
    for answer in ranks.gather_texts(json.dumps([text, error])):
        rank_text, rank_error = json.loads(str(answer))
        texts.append(rank_text)
        if rank_error:
            errors.append(rank_error)
    if errors:
        raise DataError("\n".join(dict.fromkeys(errors))) from cause  # without duplicates
    return result, texts


def _prepare(data: Data, settings: ReaderSettings) -> list[str]:
    """Return the folder that `SourceReader.prepare` made for each source."""
    sources = data.all_sources.values()
    if settings.tokenizer is not None and any(source.kind in RAW_KINDS for source in sources):
        for line in describe_documents(settings.tokenizer):
            log.info("%s", line)
    folders = []
    for source in sources:
        folders.append(reader_of(source.kind).prepare(source, settings))
        if data.packing == "best_fit":
            for length in data.lengths(settings.sequence_length):
                _open_source(source, folders[-1], settings, length)  # counts the sequences
    return folders


def _open_source(source: Source, folder: str, settings: ReaderSettings, length: int) -> SequenceSource:
    sequences = reader_of(source.kind).open(source, folder, settings)
    if settings.data.packing == "concatenate":
        return sequences
    from torchllm.data.best_fit import pack  # most runs need none

    return pack(source, sequences, settings.data, length)


def _open(folders: Sequence[str], data: Data, settings: ReaderSettings) -> list[SequenceSource]:
    """Open all sources; `folders`: of `_prepare`. Raises DataError if a source has no sequence to train on, or none."""
    opened = []
    for (key, source), folder in zip(data.all_sources.items(), folders, strict=True):
        is_trained = key.startswith("data.sources")
        splits: tuple[Split, ...] = ("train",) if is_trained else ("train", "validation")
        by_length = []
        for length, key_of_length in (data if is_trained else Data()).lengths(settings.sequence_length).items():
            by_length.append(_open_source(source, folder, settings, length))
            if not any(_count(by_length[-1], split, length, key_of_length) for split in splits):
                raise DataError(
                    f"{key.rpartition('.')[0]}: {source.path or source.kind!r} is shorter than one sequence of "
                    f"{key_of_length} = {length} tokens: lower it, or read more text"
                )
        opened.append(by_length[0])
    return opened


def _count(source: SequenceSource, split: Split, length: int, key: str) -> int:
    """Return the number of sequences of a length that `key` sets. Raises DataError if it can only have another one."""
    try:
        return source.count(split, length)
    except DataError as error:
        of_stage = f"{key} = {length}: " * key.startswith("data.stage")
        raise DataError(f"{of_stage}{error}") from None
