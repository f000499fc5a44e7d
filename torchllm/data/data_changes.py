"""Compare data and stages of a checkpoint and of the run that resumes from it."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchllm.config import Data
from torchllm.config.errors import DataError
from torchllm.config.files import cache_root
from torchllm.config.paths import same_path
from torchllm.config.schema import RAW_KINDS
from torchllm.data.corpus import Corpus
from torchllm.data.corpus_header import HEADER
from torchllm.data.epoch_limits import mixed_by_size
from torchllm.data.order import PlannedStage
from torchllm.data.readers import describe_source, name_source
from torchllm.data.stages import limit_epochs, past_mixtures

log = logging.getLogger(__name__)


def data_differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], saved_settings: Mapping[str, Any], data: Data
) -> list[str]:
    """Return a line for each difference that would change the sequences of the saved run.

    saved, current: fingerprints, as TrainLoader makes them. saved_settings: [data] in the config of the checkpoint, {}
    if that is not known. data: [data] of this run.
    """
    differences = _source_differences(saved["sources"], current["sources"], saved_settings.get("sources", []), data)
    saved_tokenizers, tokenizers = saved["tokenizer"], current["tokenizer"]
    if saved_tokenizers and tokenizers and saved_tokenizers != tokenizers:  # synthetic sources have none
        differences.append(_tokenizer_difference(saved_settings.get("tokenizer"), data.tokenizer))
    saved_packing, packing = (fingerprint.get("packing", "concatenate") for fingerprint in (saved, current))
    if saved_packing != packing:
        differences.append(f'data.packing: "{saved_packing}" in the checkpoint, "{packing}" now')
    for key in ("sequence_length", "seed"):
        if saved[key] != current[key]:
            differences.append(f"{key}: {saved[key]} in the checkpoint, {current[key]} now")
    return differences


def _source_differences(
    saved: list[list[Any]], current: list[list[Any]], saved_settings: list[dict[str, Any]], data: Data
) -> list[str]:
    """Return a line for each difference from the saved sources.

    saved, current: [fingerprint, weight] of each. saved_settings: the table of each; [] if that is not known.
    """
    saved_names = [describe_source(settings["kind"], settings["path"]) for settings in saved_settings]
    names = [name_source(f"data.sources.{index}", source) for index, source in enumerate(data.sources)]
    lines = []
    for index in range(min(len(saved), len(current))):  # the number of sources may have changed
        (saved_fingerprint, saved_weight), (fingerprint, weight) = saved[index], current[index]
        settings = data.sources[index]
        if saved_fingerprint != fingerprint:
            saved_source = saved_settings[index] if saved_settings else asdict(settings)
            if saved_source["kind"] != settings.kind or not same_path(saved_source["path"], settings.path):
                lines.append(f"{names[index]}: in the checkpoint it is {saved_names[index]}")
            else:
                lines.append(f"{names[index]}: its tokens are others: its files have changed, or how they are read")
            if settings.kind in RAW_KINDS:
                lines.append(_advise_earlier_corpus(index, data, saved_fingerprint))
        if saved_weight != weight:
            lines.append(f"{names[index]}: weight {saved_weight} in the checkpoint, {weight} now")
    if len(saved) != len(current):
        lines.append(f"data.sources: {len(saved)} in the checkpoint, {len(current)} now")
        lines += [f"only in the checkpoint: {name}" for name in saved_names[len(current) :]]
        lines += [f"only now: {name}" for name in names[len(saved) :]]
    return lines


def _tokenizer_difference(saved: str | None, current: str) -> str:
    """Describe how the tokenizer differs from the saved one, whose data.tokenizer is None if it is not known."""
    if saved is None or saved == current:
        return f"data.tokenizer {current!r} is another one than in the checkpoint: its file has changed"
    return f"data.tokenizer: {saved!r} in the checkpoint, {current!r} now"


def _advise_earlier_corpus(index: int, data: Data, fingerprint: str) -> str:
    """Return advice how to go on with the checkpoint's corpus if its raw source now gives another corpus."""
    folders = cached_corpora(data, fingerprint)
    path = json.dumps(str(folders[0])) if folders else f"its folder (it is not in the cache, {cache_root(data)})"
    return (
        f"the checkpoint was trained on a corpus of other files or settings, or of an earlier version of torchllm; to "
        f'go on with that corpus, set kind = "tokens" and path = {path} in data.sources.{index}'
    )


def cached_corpora(data: Data, fingerprint: str) -> list[Path]:
    """Return the folders in the cache that hold the corpus with this fingerprint, of any version."""
    folders = []
    for header in sorted(cache_root(data).glob(f"*/{HEADER}")):
        try:
            cached = Corpus(header.parent)
        except DataError:
            continue
        if cached.fingerprint == fingerprint:
            folders.append(cached.folder)
    return folders


def stages_from_state(state: Mapping[str, Any], sources: int) -> list[PlannedStage]:
    """Return the stages in the state of a loader; the run may have more sources by now."""
    if "stages" not in state:
        raise DataError("the checkpoint was trained on an iterable (IterableLoader), not on data.sources")
    stages = []
    for until, end, weights, *length in state["stages"]:
        padding = [0.0] * (sources - len(weights))
        stages.append(PlannedStage(until, end, (*weights, *padding), *length))
    return stages


def mixture_as_in(saved: Sequence[PlannedStage], mixture: Data, data: Data, sizes: Sequence[int]) -> Data:
    """Return settings with the weights of a checkpoint if the run has chosen none: equal ones, or by size.

    A run with finetune.epochs draws its sources by size, others equally often; a resumed run may change that. mixture:
    settings of this run, returned if the checkpoint has other weights. sizes: of the sources.
    """
    for possible in (mixture, data, mixed_by_size(data, sizes)):
        if saved[0].weights == tuple(source.weight for source in possible.sources):
            if possible is not mixture:
                log.info("data: the sources have the shares of the checkpoint, %s", list(saved[0].weights))
            return possible
    return mixture


def limits_that_differ(
    stages: Sequence[PlannedStage],
    sizes: Mapping[int, Sequence[int]],
    max_epochs: Sequence[float],
    state: Mapping[str, Any],
) -> list[str]:
    """Return a line if another max_epochs would change the sequences of the run that saved a state."""
    saved = state["fingerprint"].get("max_epochs", [])
    saved = [*saved, *[0.0] * (len(max_epochs) - len(saved))]
    saved_mixtures, mixtures = (
        past_mixtures(limit_epochs(stages, sizes, limits).stages, state["sequences"]) for limits in (saved, max_epochs)
    )
    if saved_mixtures == mixtures:
        return []
    return [f"data.sources: max_epochs {saved} in the checkpoint, {max_epochs} now: one was reached by then"]
