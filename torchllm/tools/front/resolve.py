"""Read the config of a run, plan its layout and check its files: the calls of a recipe before it imports torch.

    CONFIGS = load_configs(sys.argv[1:])          a recipe that trains
    CONFIG = load_run(sys.argv[1:], one_device=True)    a recipe that uses the weights of a run
    CONFIG = load_model(sys.argv[1:])             a recipe that uses a run's model, or a published one
    CONFIG = load_sizes(sys.argv[1:])             a recipe of one process that needs the sizes of a model, no weights

`model.from_hf` gives a run the sizes and the weights of a published model. `parallel.layout = "auto"` lets the planner
choose the layout for the machine that starts the run; with "tune" the run measures the planner's best few. A
recipe that needs none of these, nor a look at the files, calls `tools.config.load.load_config`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torchllm.config import Config, Model
from torchllm.config.errors import UserError
from torchllm.config.schema import OPTIONS
from torchllm.config.toml import shown
from torchllm.facts.parts.registry import problem_of_mixer
from torchllm.tools.config.degrees import Obstacle, obstacle_to_compiled_blocks, rank_remedy
from torchllm.tools.config.draft import Draft, parse_arguments, read_draft
from torchllm.tools.config.environment import refuse, system_errors_on_one_line
from torchllm.tools.config.idle import keys_of_other_recipes
from torchllm.tools.config.refuse import finish, refuse_unknown_mixers
from torchllm.tools.launch.compiler import AMD_DRIVER, count_gpus, lack_of_gpu_compiler

if TYPE_CHECKING:
    from torchllm.tools.front.preflight import Inspection

C = TypeVar("C", bound=Config)

BEYOND_LLAMA = (
    *(*OPTIONS, "family", "pattern", "block", "mixer", "experts"),
    *("rotary_fraction", "rope_interleaved", "rope_proportional"),
)
"""keys of [model]: with their defaults it is a Llama, or with a window a Mistral, which can be exported"""
TUNED = 4
"""layouts that parallel.layout = "tune" measures"""
MOST_OF_BYTES = 512
"""rows of a vocabulary of bytes with special tokens, at most"""


def read_configs(arguments: Sequence[str], schema: type[C], uses_epochs: bool, reads_sources: bool) -> list[C]:
    """Return the result of `start.load_configs`, from the command line."""
    draft = read_draft(arguments, schema)
    alternatives = _resolve_training(draft, uses_epochs)
    return _refuse_training(draft, alternatives, uses_epochs, reads_sources)


def _resolve_training(draft: Draft[C], uses_epochs: bool) -> list[C]:
    """Fill in the values that a config leaves open; return the other layouts that "tune" measures."""
    _resolve_model(draft)
    check_cluster(draft)  # nothing is planned for a wrong one
    check_frozen(draft)
    compiles = can_compile(draft)
    if not compiles:
        draft.config = resolve_compile(draft.config, compiles)  # before it is planned
    alternatives = plan_layout(draft)
    _note_uncompiled_blocks(draft)
    draft.config = resolve_compile(draft.config, compiles)
    if uses_epochs:
        _choose_length(draft)
    return [resolve_compile(alternative, compiles) for alternative in alternatives]


def _refuse_training(draft: Draft[C], alternatives: list[C], uses_epochs: bool, reads_sources: bool) -> list[C]:
    """Return the config, and the others with it; SystemExit(2) if the config, or this machine, does not allow a run."""
    check_export(draft)
    draft.notes += _notes_before_start(draft, is_finetuning=uses_epochs, reads_sources=reads_sources)
    if not draft.is_rank_of_launcher and not draft.config.run.dry_run and draft.layer.is_complete:
        from torchllm.tools.front.preflight import inspect_training  # of no use to ranks

        is_elsewhere = draft.arguments.gpus is not None
        inspect = partial(inspect_training, is_elsewhere=is_elsewhere, reads_sources=reads_sources)
        _inspect(partial(inspect, wrong=draft.wrong), draft)
    config = finish(draft, alternatives)
    return [config, *(replace(alternative, run=config.run) for alternative in alternatives)]


def _notes_before_start(draft: Draft[Any], is_finetuning: bool, reads_sources: bool) -> Iterator[str]:
    """Yield notes on settings that the user may not have intended. They change nothing."""
    if not draft.errors:
        yield from _longer_sequences(draft)
        yield from _single_chunk(draft)
    yield from _keys_of_other_recipes(draft, is_finetuning)
    if reads_sources:
        yield from _data_of_a_plan(draft)
    yield from _unused_amd_driver(draft)


def _longer_sequences(draft: Draft[Any]) -> Iterator[str]:
    """Note that the run trains on longer sequences than its model says."""
    config = draft.config
    if config.longest_text > config.model.max_sequence_length:
        yield draft.located(
            ("training", "sequence_length"),
            f"{config.training.sequence_length} is over model.max_sequence_length {config.model.max_sequence_length}: "
            "an export says the longer one, and a text may be as long",
        )


def _single_chunk(draft: Draft[Any]) -> Iterator[str]:
    """Note that training.loss_chunk does not divide the tokens of a micro batch."""
    training, path = draft.config.training, ("training", "loss_chunk")
    tokens = training.micro_batch_size * training.sequence_length // draft.config.parallel.cp
    if training.loss_chunk >= tokens and draft.is_asked_about(path):
        message = f"{training.loss_chunk} is not under the {tokens} tokens of a micro batch, so it divides nothing"
        yield draft.located(path, message)


def _keys_of_other_recipes(draft: Draft[Any], is_finetuning: bool) -> Iterator[str]:
    """Note, on one line, the keys that a training of this recipe does not read."""
    idle = keys_of_other_recipes(draft.config, is_finetuning)
    found = [idle_key for idle_key in idle if draft.is_asked_about(tuple(idle_key.key.split(".")))]
    if found and not draft.config.run.dry_run:
        from torchllm.tools.config.contradictions import describe_idle_keys  # of no use to most runs

        yield describe_idle_keys(found, lambda key: draft.place(tuple(key.split("."))))


def _data_of_a_plan(draft: Draft[Any]) -> Iterator[str]:
    """Note that a run of a published model's size trains on the stand-in for a corpus that plan.py writes."""
    data, vocab = draft.config.data, draft.config.model.vocab
    is_stand_in = data.tokenizer == "bytes" and all(source.kind == "stdlib" for source in data.sources)
    if is_stand_in and vocab > MOST_OF_BYTES and not draft.is_resolved and not draft.config.run.dry_run:
        yield (
            f"{draft.file}: data.sources: is Python's standard library as bytes, to try the layout, and model.vocab = "
            f"{vocab:,} is of another tokenizer: put your corpus and tokenizer in its place"
        )


def _unused_amd_driver(draft: Draft[Any]) -> Iterator[str]:
    """Note that the run is on the CPU of a machine that may have AMD GPUs; integrated graphics look the same."""
    config = draft.config
    if config.run.device == "auto" and not config.run.dry_run and AMD_DRIVER.exists() and count_gpus() == 0:
        yield (
            f"{draft.file}: run.device: auto is the CPU, but this machine has AMD's driver ({AMD_DRIVER}): to use its "
            "GPUs, install torch's build for ROCm, and join the group of that file"
        )


@system_errors_on_one_line()
def load_run(
    arguments: Sequence[str],
    *,
    one_device: bool = False,
    inspect: Callable[[Config], "Inspection"] | None = None,
) -> Config:
    """Return the config of a run whose weights a recipe uses: usually from its run folder.

    A forked recipe may have written it: its own keys are printed and not used. Before torch is imported it is checked
    that the run has a checkpoint, and that the tokenizer is there, or what `inspect` looks at. The rest is as in
    `tools.config.load.load_config`.
    """
    draft = read_draft(arguments, Config, one_device=one_device, uses_weights=True)
    _resolve_model(draft)
    return _finish_use(draft, inspect)


@system_errors_on_one_line()
def load_model(arguments: Sequence[str], *, inspect: "Callable[[Config], Inspection] | None" = None) -> Config:
    """Return the config of a model that one process uses: of a run, as `load_run` does, or of a published one.

    A published model is named in the place of the run, by its folder or its id on the hub, or by model.from_hf. Its
    config has no run.folder, and its own tokenizer and longest text.
    """
    name = parse_arguments(arguments, []).file
    words = list(arguments)
    if is_published_model(name):
        words[words.index(name)] = f"--model.from_hf={name}"
    draft = read_draft(words, Config, one_device=True, uses_weights=True)
    _resolve_model(draft)
    config = draft.config
    is_published = config.model.from_hf and not config.run.folder and config.checkpoint.resume in ("auto", "none")
    if not is_published:
        _note_message_of_run(draft)
        return _finish_use(draft, inspect)
    if not draft.errors:
        _take_texts_of_published_model(draft)
    config = _finish_use(draft, inspect)
    return replace(config, run=replace(config.run, folder=""))


def _note_message_of_run(draft: Draft[Config]) -> None:
    """Note that a chat answers the prompt of the run's config, not the user's input."""
    settings, path = draft.config.generate, ("generate", "prompt")
    if settings.chat and settings.prompt and not settings.prompts_file and not draft.is_overridden(path):
        draft.notes.append(
            draft.located(path, f"{shown(settings.prompt)} is the message: --generate.prompt= answers what you type")
        )


def is_published_model(name: str) -> bool:
    """Return whether a name in the place of a run means a model of Hugging Face. SystemExit(2) if a folder is neither.

    A path that does not exist may be an id of the hub.
    """
    from torchllm.tools.hub.files import CONFIG_JSON  # of no use to other runs
    from torchllm.tools.hub.hub import is_hub_id

    if not os.path.isdir(name):
        return is_hub_id(name) and not name.endswith(".toml")
    is_published = (Path(name) / CONFIG_JSON).is_file()
    if not is_published:
        refuse([f"{name}: is neither a run, which has a config.toml, nor a published model, which has a {CONFIG_JSON}"])
    return is_published


def _take_texts_of_published_model(draft: Draft[Any]) -> None:
    """Give a draft the tokenizer of its published model, unless another is named, and the length of its texts."""
    from torchllm.tools.hub.hub import find_hub_model

    config = draft.config
    if ("data", "tokenizer") not in draft.layer.origins:
        folder = find_hub_model(config.model.from_hf, weights=False, may_download=False).folder
        config = replace(config, data=replace(config.data, tokenizer=str(folder / "tokenizer.json")))
    training = replace(config.training, sequence_length=config.model.max_sequence_length)
    draft.config = replace(config, training=training)


def _finish_use(draft: Draft[Config], inspect: "Callable[[Config], Inspection] | None") -> Config:
    """Check the draft of a recipe that uses the weights of a model, and return its config."""
    if draft.is_readable:
        from torchllm.tools.hub.resolve import take_trained_model  # of no use to a training

        take_trained_model(draft)
    check_frozen(draft)
    draft.config = resolve_compile(draft.config, can_compile(draft))
    if (draft.one_device or os.environ.get("RANK", "0") == "0") and draft.is_readable:
        from torchllm.tools.front.preflight import inspect_used_model

        _inspect(inspect or inspect_used_model, draft)
    config = finish(draft)
    from torchllm.tools.launch.compile_cache import choose_compile_cache  # of no use to a check of a run's config
    from torchllm.tools.launch.start_lines import say_while_this_imports

    if "flex" in config.model.attention_kernels:  # the only part that such a recipe compiles without start_runtime
        choose_compile_cache(Path(config.run.folder), nodes=1)
    say_while_this_imports()
    return config


@overload
def load_sizes(arguments: Sequence[str]) -> Config: ...
@overload
def load_sizes(arguments: Sequence[str], schema: type[C]) -> C: ...
@system_errors_on_one_line()
def load_sizes(arguments: Sequence[str], schema: type[Any] = Config) -> Any:
    """Return the config of a recipe that runs in one process and reads no weights; [model] may be a published one's.

    It may have sections of the fork that RECIPE names. The rest is as in `tools.config.load.load_config`.
    """
    from torchllm.tools.proof.recipe import lines_on_fork, schema_of_fork  # of no use to a training

    try:
        schema = schema_of_fork(schema)
    except UserError as error:
        refuse([str(error)])
    draft: Draft[Any] = read_draft(arguments, schema, one_device=True)
    draft.errors += lines_on_fork(schema, draft.layer.table)
    _resolve_model(draft, reads_weights=False)
    check_frozen(draft)
    return finish(draft)


def _resolve_model(draft: Draft[Any], *, reads_weights: bool = True) -> None:
    """Import the fork that blocks and mixers need, and fill in [model] from the published model of `model.from_hf`.

    reads_weights: the recipe needs the weights, too, unless it is a dry run. SystemExit(2) if there is no such mixer.
    """
    model = draft.config.model
    if model.block or any(map(problem_of_mixer, model.views)):
        from torchllm.facts.block_kinds import block_kind  # these are of no use to other runs
        from torchllm.tools.proof.recipe import import_parts

        try:
            import_parts(model)
            block_kind(model)
        except UserError as error:
            draft.report(("model", "block"), str(error).removeprefix("model.block: "))
    refuse_unknown_mixers(draft)
    if draft.config.model.from_hf and draft.is_readable:
        from torchllm.tools.hub.resolve import resolve_published_model

        resolve_published_model(draft, reads_weights=reads_weights)


def _inspect(inspect: Callable[[Config], "Inspection"], draft: Draft[Any]) -> None:
    """Add the findings on this machine to a draft, also folders of other users that cannot be read."""
    try:
        inspection = inspect(draft.config)
    except PermissionError as error:
        draft.errors.append(f"{error.filename}: cannot be read: {error.strerror}")
        return
    for problem in inspection.problems:
        draft.report(problem.path, problem.message)
    draft.notes += [f"not checked: {line}" for line in inspection.unchecked]


def check_cluster(draft: Draft[Any]) -> None:
    """Report faults of `cluster.name` and of its file."""
    name = draft.config.cluster.name
    if name:
        from torchllm.tools.planner.cluster import read_cluster, unknown_cluster  # of no use to other runs

        if unknown := unknown_cluster(name):
            draft.report(("cluster", "name"), unknown)
        else:
            read_cluster(name, draft.errors)


def check_frozen(draft: Draft[Any]) -> None:
    """Report a `model.frozen` that matches no parameter, or all."""
    model = draft.config.model
    if model.frozen and draft.is_readable:
        from torchllm.facts.frozen import problem_of_frozen  # of no use to other runs
        from torchllm.facts.shapes import parameter_shapes

        if problem := problem_of_frozen(model.frozen, parameter_shapes(model)):
            draft.report(("model", "frozen"), problem)


def check_export(draft: Draft[Any]) -> None:
    """Note that the trained model cannot be exported to Hugging Face, if so."""
    model = draft.config.model
    if draft.errors or all(getattr(model, key) == getattr(Model, key) for key in BEYOND_LLAMA):
        return
    from torchllm.tools.hub.config_json import why_no_family  # of no use to most runs

    reasons = why_no_family(model)
    if not reasons:
        return
    draft.notes.append(f"{draft.file}: [model] trains, but cannot be exported to Hugging Face: {reasons[0]}")


def can_compile(draft: Draft[Any]) -> bool:
    """Return whether "auto" in [compile] means true: on a GPU with a compiler. Note the part that a GPU lacks.

    A dry run is of the machines that cluster.name describes, which are taken to have a compiler.
    """
    config = draft.config
    keys = ", ".join(f"compile.{key}" for key in _auto_keys(config))
    if not keys or draft.errors or config.run.device == "cpu":
        return False
    if config.run.dry_run and config.cluster.name:
        from torchllm.tools.planner.cluster import read_cluster  # of no use to other runs

        hardware = read_cluster(config.cluster.name, [])
        return hardware is not None and hardware.gpu != "CPU"
    if count_gpus() == 0:
        return False
    lack = lack_of_gpu_compiler()
    if lack:
        draft.notes.append(f"{draft.file}: {keys}: auto is false: {lack}")
    return not lack


def resolve_compile(config: C, compiles: bool) -> C:
    """Return a config where no key of [compile] is "auto". compiles: result of `can_compile`."""
    obstacle = _obstacle_to_compiled_blocks(config)
    values: dict[str, bool] = dict.fromkeys(_auto_keys(config), compiles)
    if "block" in values and obstacle is not None:
        values["block"] = False
    return replace(config, compile=replace(config.compile, **values))


def _auto_keys(config: Config) -> list[str]:
    """Return the keys of [compile] that are "auto"."""
    return [key for key in ("block", "loss") if getattr(config.compile, key) == "auto"]


def _obstacle_to_compiled_blocks(config: Config) -> Obstacle | None:
    parallel = config.parallel
    return obstacle_to_compiled_blocks(parallel.pp, parallel.schedule, parallel.cp, config.recompute.mode)


def _note_uncompiled_blocks(draft: Draft[Any]) -> None:
    """Note that the layout leaves the blocks uncompiled, if compile.block is "auto"."""
    obstacle = _obstacle_to_compiled_blocks(draft.config)
    if draft.config.compile.block == "auto" and obstacle is not None:
        draft.notes.append(f"{draft.file}: compile.block: auto is false: {obstacle.why}; to compile, {obstacle.remedy}")


def _choose_length(draft: Draft[Any]) -> None:
    """Take the steps that the command line gives instead of a file's epochs; note which of the two keys does nothing.

    Where one file gives both, the epochs decide, and nothing is said of a resolved file, which has both.
    """
    config, epochs, steps = draft.config, ("finetune", "epochs"), ("training", "steps")
    if not config.finetune.epochs:
        return
    if draft.is_overridden(steps) and not draft.is_overridden(epochs):
        draft.config = replace(config, finetune=replace(config.finetune, epochs=0.0))
        draft.notes.append(draft.located(epochs, "does nothing in this run: the command line sets training.steps"))
        return
    files_with_either = [file for file in draft.layer.files if {epochs, steps} & file.origins.keys()]
    # A file's epochs replace the steps of its base, without a note.
    is_chosen = draft.is_overridden(steps) or (bool(files_with_either) and steps in files_with_either[-1].origins)
    if is_chosen and draft.is_asked_about(steps):
        draft.notes.append(draft.located(steps, "does nothing in this run: finetune.epochs decides"))


def plan_layout(draft: Draft[C]) -> list[C]:
    """Give a draft whose layout is open the planner's best one; return the others that "tune" measures.

    Nothing is planned for a draft with errors.
    """
    kind = draft.config.parallel.layout
    if kind == "manual" or draft.errors or draft.ranks is None:
        return []
    path = ("parallel", "layout")
    if draft.ranks.world is None:
        draft.report(path, f"is {kind}, but the number of ranks is unknown: {rank_remedy(draft.config.run)}")
        return []

    from torchllm.tools.planner.search.auto import choose_layouts  # of no use to other runs

    written = set()
    for section, table in draft.layer.table.items():
        written |= {f"{section}.{key}" for key in table}
    try:
        configs, line = choose_layouts(draft.config, draft.ranks.world, written, TUNED if kind == "tune" else 1)
    except UserError as error:
        draft.report(path, str(error))
        return []
    draft.notes.append(f"layout: {line}")
    draft.config, *alternatives = configs
    return alternatives
