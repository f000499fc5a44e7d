"""Give a run the [model] of a published model, `model.from_hf`, before torch is imported. No torch."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torchllm.checkpoint.manifest import CheckpointError, read_manifest, step_folders
from torchllm.config import Config, Kinds, Model
from torchllm.config.keys import KeyPath
from torchllm.tools.config.compare import config_changes
from torchllm.tools.config.draft import Draft
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.hub.config_json import form_of
from torchllm.tools.hub.files import HubConfig, check_tensors, find_hub_files, read_hub_config
from torchllm.tools.hub.hub import find_hub_model
from torchllm.tools.hub.safetensors_header import HubFileError

C = TypeVar("C", bound=Config)
FROM_HF = ("model", "from_hf")


def resolve_published_model(draft: Draft[Any], *, reads_weights: bool) -> None:
    """Fill in [model] from the published model that `model.from_hf` names, or from the run's newest checkpoint.

    reads_weights: the recipe needs the weights, too, unless it is a dry run.
    """
    config = draft.config
    if config.checkpoint.initial and not _choose_initial_weights(draft):
        draft.report(("checkpoint", "initial"), "model.from_hf names initial weights, too: remove one of the keys")
        return
    reads_weights = reads_weights and not config.run.dry_run and not draft.config.checkpoint.initial
    if not _resolve_from_checkpoint(draft):
        resolve_from_hf(draft, weights=reads_weights, may_download=not draft.is_rank_of_launcher)
    if draft.config.checkpoint.initial:  # the sizes are known by now
        draft.config = replace(draft.config, model=replace(draft.config.model, from_hf=""))


def _resolve_from_checkpoint(draft: Draft[Any]) -> bool:
    """Fill in [model] from the checkpoint that the run goes on from; return whether there is one."""
    checkpoint = _checkpoint_to_resume(draft.config)
    if checkpoint is not None:
        with suppress(CheckpointError):  # a damaged one is passed over when it is loaded
            recorded = read_manifest(checkpoint).record["config"]["model"]
            resolve_from_record(draft, recorded, str(checkpoint))
            return True
    return False


def take_trained_model(draft: Draft[Config]) -> None:
    """Take the keys of [model] that the weights were trained with, where the run's config has others by now.

    A run may have been resumed with another window, say: its older checkpoints are of the model before. Keys of the
    command line stay.
    """
    checkpoint = _checkpoint_to_resume(draft.config)
    if checkpoint is None:
        return
    try:
        recorded = read_manifest(checkpoint).record.get("config", {})
    except CheckpointError:  # a damaged one is passed over when it is loaded
        return
    if "model" not in recorded:  # of a recipe that records no config
        return
    faults: list[ConfigError] = []
    trained: Model = read_table(Model, recorded["model"], faults)
    unreadable = {fault.path[0] for fault in faults}  # values of another version
    of_run, given = draft.config.model, draft.arguments.overrides
    taken: dict[str, Any] = {}
    for change in config_changes(recorded, draft.config):
        section, name, *_ = change.key.split(".")
        is_of_run = change.key in given or name == "from_hf" or name in unreadable
        if section == "model" and change.changes_function and not is_of_run:
            draft.notes.append(
                f"{change}: {checkpoint.name} is read as it was trained; the command line may set the key"
            )
            taken[name] = getattr(trained, name)
    if "kinds" in taken:
        taken["kinds"] = _with_given_keys(taken["kinds"], of_run.kinds, given)
    draft.config = replace(draft.config, model=replace(of_run, **taken))


def _with_given_keys(trained: Kinds, of_run: Kinds, given: Iterable[str]) -> Kinds:
    """Return the kinds of a checkpoint with the keys that the command line gives: "model.kinds.local.window"."""
    kinds = {kind: dict(keys) for kind, keys in trained.items()}
    for path in (key.split(".") for key in given if key.startswith("model.kinds.")):
        if len(path) == 4 and path[2] in kinds:
            kinds[path[2]][path[3]] = of_run[path[2]][path[3]]
    return Kinds(kinds)


def _choose_initial_weights(draft: Draft[Any]) -> bool:
    """Take the initial weights that the command line chooses, where a file names others; return False if none does."""
    initial, from_hf = ("checkpoint", "initial"), ("model", "from_hf")
    if draft.is_overridden(initial) == draft.is_overridden(from_hf):
        return False
    if draft.is_overridden(initial):
        draft.notes.append(draft.located(from_hf, "gives the sizes only: the command line sets checkpoint.initial"))
    else:
        draft.notes.append(draft.located(initial, "is not read: the command line sets model.from_hf"))
        checkpoint = replace(draft.config.checkpoint, initial="")
        draft.config = replace(draft.config, checkpoint=checkpoint)
    return True


def _checkpoint_to_resume(config: Config) -> Path | None:
    """Return the step folder that the run would go on from, if it verifies; None if it starts fresh."""
    if config.checkpoint.resume not in ("auto", "none"):
        return Path(config.checkpoint.resume)
    folders = step_folders(Path(config.run.folder) / "checkpoints") if config.run.folder else []
    return folders[0] if folders else None


def resolve_from_hf(draft: Draft[C], *, weights: bool, may_download: bool) -> None:
    """Fill in the unset keys of [model] from the config.json of the model that `model.from_hf` names.

    A key with another value is an error if the weights fix it, else a note. weights: look at the files with the
    weights, too. may_download: False in a rank of a run whose check has downloaded the files.
    """
    try:
        found = find_hub_model(draft.config.model.from_hf, weights=weights, may_download=may_download)
        config = read_hub_config(found.folder)
    except HubFileError as error:
        _report_lines(draft, str(error).split("\n"))
        return
    fill_unwritten(draft, config.model, str(config.path))
    draft.config = replace(draft.config, model=replace(draft.config.model, from_hf=found.pinned))
    _compare_written(draft, config)
    _compare_written_kinds(draft, config)
    _pad_vocab(draft)
    if config.read.unknown_fields:
        draft.notes.append(f"{config.path}: not known and not used: {', '.join(config.read.unknown_fields)}")
    if weights and may_download and not draft.errors:
        files = find_hub_files(found.folder, config)
        draft.notes += files.notes
        is_tying_chosen = "tied_embeddings" in _written(draft)
        _report_lines(draft, check_tensors(files, config, draft.config.model, is_tying_chosen=is_tying_chosen))


def resolve_from_record(draft: Draft[C], recorded: dict[str, object], checkpoint: str) -> None:
    """Fill in the unset keys of [model] from the checkpoint that the run goes on from.

    recorded: [model] as the checkpoint's manifest has it; a key that it lacks or that is none now has its default.
    """
    model: Model = read_table(Model, recorded, [])
    fill_unwritten(draft, model, checkpoint)
    name = draft.config.model.from_hf
    if model.from_hf.partition("@")[0] == name.partition("@")[0]:  # the same one, pinned
        draft.config = replace(draft.config, model=replace(draft.config.model, from_hf=model.from_hf))
    if not draft.uses_weights and not draft.config.trained.only_updates:  # else its weights are in no checkpoint
        draft.notes.append(draft.located(FROM_HF, f"is not read: the run goes on from {checkpoint}"))


def fill_unwritten(draft: Draft[C], model: Model, source: str) -> None:
    """Set the unset keys of [model] to their values in `model`, which `source` describes."""
    written = _written(draft) | {"from_hf", "attention", "frozen"}
    values = {key: value for key, value in vars(model).items() if key not in written}
    ours = draft.config.model.kinds
    pattern = values.get("pattern", draft.config.model.pattern)
    kinds = {name: keys for name, keys in model.kinds.items() if name in pattern}
    draft.published |= {("model", key): source for key in values}
    draft.published |= {("model", "kinds", name, key): source for name, keys in kinds.items() for key in keys}
    values["kinds"] = Kinds({name: kinds.get(name, {}) | ours.get(name, {}) for name in kinds | ours})
    draft.config = replace(draft.config, model=replace(draft.config.model, **values))


def _written(draft: Draft[C]) -> set[str]:
    """Return the keys of [model] that a file or the command line gives a value."""
    return set(draft.layer.table.get("model", {}))


def _compare_written(draft: Draft[C], config: HubConfig) -> None:
    """Report, or note, keys whose values differ from the published model."""
    model = draft.config.model
    theirs = form_of(config.model)
    if model.upcycle and config.model.experts:
        message = f"copies layers of a dense model, but the model of {config.path} has experts: remove the key"
        draft.report(("model", "upcycle"), message)
    ours = form_of(replace(model, experts=0) if model.upcycle else model)
    written = _written(draft)
    for key in sorted(written & theirs.keys()):
        path = ("model", key)
        if ours[key] == theirs[key] or f"model.{key}" in draft.wrong:
            continue
        if isinstance(theirs[key], tuple) and "pattern" not in written:
            keys = " or ".join(f"model.kinds.{kind}.{key}" for kind in config.model.kinds)
            draft.report(path, f"the blocks of {config.path} differ in it: set {keys}")
        elif key not in config.read.fixed:
            _note_other(draft, path, ours[key], theirs[key], config.path)
        elif key == "vocab" and ours[key] > theirs[key]:
            new = ours[key] - theirs[key]
            draft.notes.append(draft.located(path, f"{new} rows more than in {config.path}: they start at random"))
        elif key == "tied_embeddings" and theirs[key]:
            draft.notes.append(draft.located(path, f"the head has separate weights, against {config.path}"))
        elif key == "experts" and not theirs[key]:
            draft.report(path, f"the weights of {config.path} are dense: remove the key, or set model.upcycle = true")
        else:
            _report_fixed(draft, path, ours[key], theirs[key], config)


def _compare_written_kinds(draft: Draft[C], config: HubConfig) -> None:
    """Note a pattern, and keys of kinds of blocks, that differ from the published model."""
    model, published = draft.config.model, config.model
    table = draft.layer.table.get("model", {})
    if "pattern" in table and model.pattern != published.pattern:
        _note_other(draft, ("model", "pattern"), list(model.pattern), list(published.pattern), config.path)
    for kind in table.get("kinds", {}):
        theirs = published.of_kind(kind) if kind in published.kinds else published
        for key, value in draft.config.model.kinds[kind].items():
            path = ("model", "kinds", kind, key)
            published_value = getattr(theirs, key)
            if key not in table["kinds"][kind] or value == published_value:
                continue
            if key in config.read.fixed:
                _report_fixed(draft, path, value, published_value, config)
            else:
                _note_other(draft, path, value, published_value, config.path)


def _report_fixed(draft: Draft[C], path: KeyPath, ours: Any, theirs: Any, config: HubConfig) -> None:
    """Report a key that the published weights decide."""
    field = config.read.fixed[path[-1]]
    draft.report(path, f"is {ours}, but the weights have {theirs} ({field} in {config.path}): remove the key")


def _note_other(draft: Draft[C], path: KeyPath, ours: Any, theirs: Any, source: Path) -> None:
    """Note that a key has another value than in the published model. A tuple has the values of all blocks."""
    shown = []
    for value in (ours, theirs):
        values = dict.fromkeys(value) if isinstance(value, tuple) else [value]
        shown.append(" or ".join(map(str, values)))
    draft.notes.append(draft.located(path, f"{shown[0]} is used, not the {shown[1]} of {source}"))


def _pad_vocab(draft: Draft[C]) -> None:
    """Let tp ranks share the rows of the embedding evenly, unless their number is written."""
    tp = draft.config.parallel.tp
    vocab = draft.config.model.vocab
    if _written(draft) & {"vocab", "vocab_padding"} or vocab % tp == 0:
        return
    model = replace(draft.config.model, vocab_padding=-vocab % tp)
    draft.notes.append(
        f"{draft.file}: model.vocab: {vocab} rows are padded to {model.vocab_rows}, a multiple of parallel.tp; the "
        "softmax leaves the others out"
    )
    draft.config = replace(draft.config, model=model)


def _report_lines(draft: Draft[C], lines: list[str]) -> None:
    """Add each line as an error of model.from_hf."""
    for line in lines:
        draft.report(FROM_HF, line)
