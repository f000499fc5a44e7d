"""Export a run into a new folder: its weights, configs, tokenizer and model card; or the adapter that it trained."""

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from torchllm.checkpoint.manifest import CheckpointError, Manifest
from torchllm.checkpoint.state import WEIGHTS
from torchllm.config import Config
from torchllm.data.tokenizer import Tokenizer, load_tokenizer
from torchllm.tools.config.compare import check_frozen_weights
from torchllm.tools.hub.adapter import ADAPTER_KIND, model_weights, read_updates, write_adapter
from torchllm.tools.hub.by_key import WeightReader, read_mean
from torchllm.tools.hub.config_json import family_to_export
from torchllm.tools.hub.exported import (
    checkpoints_to_export,
    has_its_tokenizer,
    published_origin,
    without_padding,
)
from torchllm.tools.hub.families.family import HubFamily
from torchllm.tools.hub.hf_writer import (
    new_folder,
    weight_bytes,
    write_configs,
    write_generation_config,
    write_weights,
)
from torchllm.tools.hub.model_card import CardFacts, write_model_card
from torchllm.tools.hub.text_facts import TextFacts, text_facts
from torchllm.tools.hub.weights import AVERAGED_WEIGHTS
from torchllm.tools.prepare.tokenizer_json import write_tokenizer

log = logging.getLogger(__name__)


class ExportedModel(NamedTuple):
    """A folder that transformers reads, or of an adapter, which peft reads."""

    folder: Path
    architecture: str
    """class of transformers, of the model that an adapter belongs to"""
    facts: CardFacts


def export_model(config: Config, final: Path | str, *, ema: bool = False) -> ExportedModel:
    """Write the weights of a run as a model of transformers into the folder `final`, which must not exist.

    Low-rank updates are merged into their weights. ema: their moving average (optimizer.ema_decay) instead.
    Raises CheckpointError if there is no such checkpoint, the folder cannot be written, or the frozen weights are gone,
    DamagedCheckpoint if the files have changed since they were written, NoFamily if no family of models has this form,
    DataError if nothing says how the run's conversations were written. Then nothing is left.
    """
    settings = config.export
    checkpoints = open_checkpoints(config, ema)
    manifest = checkpoints[0].manifest
    origin = published_origin(manifest.record)
    tokenizer = load_tokenizer(config.data.tokenizer)
    trained = replace(config.model, max_sequence_length=config.longest_text)
    model = without_padding(trained, tokenizer.vocab, origin)
    family = family_to_export(model, origin.model_type)
    tensors = list(family.stored_tensors(model))
    dtype = getattr(torch, settings.dtype)
    path = Path(final)
    weights = {checkpoint.folder: model_weights(config, checkpoint) for checkpoint in checkpoints}
    with new_folder(path, weight_bytes(tensors, dtype)) as folder:
        write_weights(folder, tensors, partial(read_mean, weights), dtype)
        texts, missing_tokenizer = export_texts(config, manifest, tokenizer, family, folder)
        write_configs(folder, model, family, settings.dtype, texts)
        steps = [checkpoint.manifest.step for checkpoint in checkpoints]
        facts = CardFacts(steps, path.name, origin.name, missing_tokenizer)
        write_model_card(folder, facts)
    return ExportedModel(path, family.architecture, facts)


def export_adapter(config: Config, final: Path | str, *, ema: bool = False) -> ExportedModel:
    """Write the low-rank updates of a run as an adapter of peft into the folder `final`, which must not exist.

    The rest is as in `export_model`; there is one checkpoint, because a mean of low-rank updates has another rank. Also
    raises CheckpointError for the text model of a model of text and more.
    """
    (checkpoint,) = open_checkpoints(config, ema)
    manifest = checkpoint.manifest
    check_frozen_weights(manifest.record, config)
    origin = published_origin(manifest.record)
    if origin.text_part_of:  # FOOTGUN: peft leaves updates out whose modules have other names there, with a warning
        raise CheckpointError(
            f"export.adapter: {config.model.from_hf} is a {origin.text_part_of}, whose modules have other names than "
            "those of the text model that was trained: export without it, which merges the updates"
        )
    updates = read_updates(checkpoint)
    family = family_to_export(config.model, origin.model_type)
    tokenizer = load_tokenizer(config.data.tokenizer)
    dtype = getattr(torch, config.export.dtype)
    path = Path(final)
    base = config.model.from_hf
    with new_folder(path, sum(factor.numel() for factor in updates.values()) * dtype.itemsize) as folder:
        write_adapter(folder, config, family, updates, base, dtype)
        texts, missing_tokenizer = export_texts(config, manifest, tokenizer, family, folder)
        if texts is not None:
            write_generation_config(folder, texts)
        facts = CardFacts([manifest.step], path.name, base, missing_tokenizer, ADAPTER_KIND, is_adapter=True)
        write_model_card(folder, facts)
    return ExportedModel(path, family.architecture, facts)


def open_checkpoints(config: Config, ema: bool) -> list[WeightReader]:
    """Return the checkpoints that are exported, the newest first. Raises as `export_model` does."""
    prefix = AVERAGED_WEIGHTS if ema else WEIGHTS
    return [WeightReader(folder, prefix) for folder in checkpoints_to_export(config)]


class ExportedTexts(NamedTuple):
    """The texts' properties in an exported folder."""

    facts: TextFacts | None
    """None: there are no tokenizer files"""
    missing_tokenizer: str
    """why there are none; "" if there are"""


def export_texts(
    config: Config, manifest: Manifest, tokenizer: Tokenizer, family: HubFamily, folder: Path
) -> ExportedTexts:
    """Write the files of a run's tokenizer, with the run's chat template, into an exported folder.

    manifest: of the checkpoint. A warning tells where transformers 5 reads these files otherwise. Raises DataError if
    nothing says how the run's conversations were written.
    """
    if not has_its_tokenizer(config.model, tokenizer.vocab):
        return ExportedTexts(
            None,
            f"data.tokenizer = {tokenizer.name!r} has {tokenizer.vocab} ids, but model.vocab is {config.model.vocab}: "
            "it is not the tokenizer of this model; name that in data.tokenizer, or put its files into the folder",
        )
    facts = text_facts(config, manifest, tokenizer)
    write_tokenizer(tokenizer, folder, config.longest_text, facts.chat)
    pattern = family.tokenizer_pattern
    if pattern and json.dumps(pattern) not in (folder / "tokenizer.json").read_text("utf-8"):
        log.warning(
            "AutoTokenizer of transformers 5 gives other ids than this run, because it cuts the texts of each %s model "
            "by one pattern: load the tokenizer by transformers.PreTrainedTokenizerFast.from_pretrained",
            family.model_type,
        )
    return ExportedTexts(facts, "")
