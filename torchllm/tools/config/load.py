"""Load the config of a run: a TOML file with its bases, overrides from the command line, and the number of ranks.

All errors are found at once, before torch is imported, and printed on one line each:

    train_configs/x.toml:12: parallel.tp: 3 does not divide model.heads = 8

The process then exits with status 2. No value is coerced, and an unknown key is an error.

`load_config` does it all. `torchllm.tools.front.resolve` plans the layout between its two halves: `read_draft` reads
the files, the overrides and the environment; `refuse.finish` checks the values against each other.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

from torchllm.config.schema import Config
from torchllm.config.toml import shown, toml_value
from torchllm.tools.config.draft import TRAINING_ONLY, Draft, override, parse_arguments
from torchllm.tools.config.environment import Ranks, read_ranks, system_errors_on_one_line
from torchllm.tools.config.handed import HANDED
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.config.toml_files import Layer, read_files

C = TypeVar("C", bound=Config)


@overload
def load_config(arguments: Sequence[str], *, one_device: bool = False) -> Config: ...
@overload
def load_config(arguments: Sequence[str], schema: type[C], *, one_device: bool = False) -> C: ...
@system_errors_on_one_line()
def load_config(arguments: Sequence[str], schema: type[Any] = Config, *, one_device: bool = False) -> Any:
    """Return the checked config, with its degrees and its run folder filled in.

    `arguments` are `[CONFIG.toml] [--section.key=value ...] [--check] [--gpus=N] [--json] [--help]`. `schema` may add
    sections to `Config`. `one_device`: the recipe runs in one process; degrees of files become 1, and the command line
    may set none. A recipe whose layout the planner may choose calls `torchllm.tools.front.start.load_configs`: here
    parallel.layout is "manual".

    --check prints the settings of run_train.sh, as lines NPROC=, RUN_FOLDER=, SAMPLE=, START_TIMEOUT= and optionally
    RESTARTS=, STOPPED_EXIT_STATUS=, ON_EVENT=, DRY_RUN= and, if some nodes wait, TRAINING_NODES= and WAIT_REASON=. It
    ends with SystemExit(0), as --help does. Without --check the process must be a rank, except for a dry run: more than
    one rank needs WORLD_SIZE in the environment.
    SystemExit(2) after the lines on stderr if there are errors. TypeError if `schema` has a field no TOML can fill.
    """
    draft: Draft[Any] = read_draft(arguments, schema, one_device=one_device)
    layout = draft.config.parallel.layout
    if layout != "manual":
        draft.report(("parallel", "layout"), f"is {shown(layout)}, but this recipe does not plan: set the degrees")
    for path in (("model", "from_hf"), ("checkpoint", "initial")):
        if getattr(getattr(draft.config, path[0]), path[1]) and not draft.is_resolved:
            draft.report(path, "this recipe reads no weights to start from: remove the key, or use recipes/pretrain.py")
    from torchllm.tools.config.refuse import finish  # not needed by ranks, whose config is already checked

    return finish(draft)


def read_draft(
    words: Sequence[str], schema: type[C], *, one_device: bool = False, uses_weights: bool = False
) -> Draft[C]:
    """Read the command line, the files and the environment into a draft, whose `errors` has a line per error.

    Each key is checked alone. SystemExit(0) after printing the help text if the command line asks for it.
    `uses_weights`: the recipe only uses the weights of a run, which a fork with more keys may have trained. Keys of the
    run's config.toml that `schema` lacks become `notes`; all errors in TRAINING_ONLY sections are ignored.
    """
    errors: list[str] = []
    arguments = parse_arguments(words, errors)
    if arguments.help:
        from torchllm.tools.config.help import print_help  # rarely needed

        print_help(schema)
        raise SystemExit(0)

    layer = read_files(arguments.file, errors) if arguments.file else Layer({}, {})
    for key, text in arguments.overrides.items():
        override(layer, schema, tuple(key.split(".")), text, errors)
        if one_device and key.startswith("parallel."):
            errors.append(f"--{key}: this recipe runs on one device")

    faults: list[ConfigError] = []
    config: C = read_table(schema, layer.table, faults)
    is_for_start = not config.run.dry_run and (not arguments.check or HANDED in os.environ)
    if arguments.gpus and (one_device or is_for_start):
        errors.append("--gpus: only --check and the dry run of a training take it; set NPROC (and NNODES)")
    if one_device:
        alone = type(config.parallel)(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1)
        config = replace(config, parallel=alone)
        ranks: Ranks | None = Ranks(world=1, per_node=1)
    elif arguments.gpus:
        ranks = Ranks(world=arguments.gpus, per_node=arguments.gpus)
    else:
        ranks = read_ranks(config.run.dry_run, errors)

    draft = Draft(arguments, layer, config, ranks, one_device, uses_weights, errors=errors)
    for fault in faults:
        is_in_file = draft.is_resolved and not draft.is_overridden(fault.path)
        if uses_weights and fault.path[0] in TRAINING_ONLY and not draft.is_overridden(fault.path):
            draft.wrong.add(fault.key)
        elif uses_weights and fault.is_unknown and is_in_file:
            draft.notes.append(draft.located(fault.path, "of a forked recipe, not read here"))
        else:
            draft.report(fault.path, fault.message)
            draft.wrong.add(fault.key)
    _take_folder_of_copy(draft)
    return draft


def _take_folder_of_copy(draft: Draft[C]) -> None:
    """Use the folder that holds a run's config.toml as the run folder; add a note if the config names another one.

    The config.toml of a copied or renamed run folder still names the original folder, which would be trained,
    exported or sampled instead of the copy.
    """
    file, path = Path(draft.arguments.file), ("run", "folder")
    if file.name != "config.toml" or not draft.is_resolved or draft.is_overridden(path):
        return
    folder, named = file.parent, draft.config.run.folder
    is_run = (folder / "lease").is_dir() or any((folder / "checkpoints").glob("step-*"))
    if is_run and os.path.realpath(named) != os.path.realpath(folder):
        draft.config = replace(draft.config, run=replace(draft.config.run, folder=str(folder)))
        if not os.path.exists(named):  # the run folder was renamed, or the working directory differs
            return
        message = f"is {toml_value(named)}, which is another folder: {folder} is used, where this file lies"
        draft.notes.append(draft.located(path, message))
