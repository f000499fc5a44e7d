"""The source of an export: its checkpoints, their origin, and the rows of the embedding. No torch."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchllm.checkpoint.manifest import (
    CheckpointError,
    read_manifest,
    read_suspects,
    step_folders,
    step_of,
    without_suspects,
)
from torchllm.config import Config, Model

log = logging.getLogger("torchllm")

MOST_PADDING = 2048
"""rows that a vocabulary has more than its tokenizer at most, to be divided by ranks and tiles: gpt-oss has 1,069"""


@dataclass(frozen=True)
class PublishedOrigin:
    """The published model from whose weights a run has started; all empty if there is none."""

    name: str = ""
    """folder or id on the hub"""
    model_type: str = ""
    """as its config.json names its family"""
    vocab: int = 0
    """rows of its embedding"""
    text_part_of: str = ""
    """class of the model that it was the text model of; empty: it was the whole model"""


def checkpoints_to_export(config: Config) -> list[Path]:
    """Return the `export.average` step folders to average for an export, newest first.

    They end with the newest that is not suspect, or with the one that `checkpoint.resume` names. Raises CheckpointError
    if there are fewer.
    """
    resume = config.checkpoint.resume
    root = Path(config.run.folder) / "checkpoints"
    if resume in ("auto", "none"):
        folders = step_folders(root)
    else:
        named = Path(resume)
        root = named.parent
        older = [folder for folder in step_folders(root) if step_of(folder) < read_manifest(named).step]
        folders = [named, *older]
    usable = without_suspects(folders, read_suspects(folders), log.warning)
    if len(usable) < config.export.average:
        raise CheckpointError(
            f"export.average: {config.export.average} checkpoints are to be averaged, {root} holds {len(usable)}: "
            "lower it, or keep more in the run (checkpoint.keep, checkpoint.interval)"
        )
    return usable[: config.export.average]


def published_origin(record: Mapping[str, Any]) -> PublishedOrigin:
    """Return the published model that the weights of a checkpoint started from, maybe through other runs.

    record: of the checkpoint's manifest.
    """
    initial = record.get("initial")
    while isinstance(initial, Mapping):
        if "model_type" in initial:
            name, model_type, vocab = str(initial["from"]), str(initial["model_type"]), int(initial["vocab"])
            return PublishedOrigin(name, model_type, vocab, str(initial.get("text_part_of", "")))
        initial = initial.get("initial")
    return PublishedOrigin()


def has_its_tokenizer(model: Model, tokenizer_vocab: int) -> bool:
    """Return whether a tokenizer may be the model's: the embedding has a row for each of its ids, and few others."""
    return tokenizer_vocab <= model.vocab <= tokenizer_vocab + MOST_PADDING


def without_padding(model: Model, tokenizer_vocab: int, origin: PublishedOrigin) -> Model:
    """Return the model without the rows of embedding and head that no token has.

    A published model keeps the rows that it came with, and those that a larger tokenizer has added.
    """
    model = replace(model, vocab_padding=0)
    if origin.vocab:
        rows = origin.vocab
        if tokenizer_vocab <= model.vocab:
            rows = max(rows, tokenizer_vocab)
        return replace(model, vocab=min(rows, model.vocab))
    if has_its_tokenizer(model, tokenizer_vocab):
        return replace(model, vocab=tokenizer_vocab)
    return model
