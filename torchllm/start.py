"""Read the config of a run, plan its layout and look at its files: what a recipe calls before it imports torch.

    CONFIGS = load_configs(sys.argv[1:])          a recipe that trains
    CONFIG = load_run(sys.argv[1:], one_device=True)    a recipe that uses the weights of a run

`parallel.layout = "auto"` leaves the layout to the planner, for the machine that the run is started on; with "tune" the
run measures the planner's best few. A recipe that needs neither, nor a look at the files, calls `config.load_config`.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

from torchllm.config import Config
from torchllm.config.checks import Obstacle, obstacle_to_compiled_blocks
from torchllm.config.errors import UserError
from torchllm.config.load import Draft, finish, read_draft
from torchllm.preflight import Inspection, inspect_trained_run, inspect_training
from torchllm.runtime.compiler import count_gpus, lack_of_gpu_compiler
from torchllm.runtime.heartbeat import heartbeat

C = TypeVar("C", bound=Config)

TUNED = 4
"""layouts that parallel.layout = "tune" measures"""


@overload
def load_configs(arguments: Sequence[str]) -> list[Config]: ...
@overload
def load_configs(arguments: Sequence[str], schema: type[C]) -> list[C]: ...
def load_configs(arguments: Sequence[str], schema: type[Any] = Config) -> Any:
    """Return the checked config of a run, with its layout, its degrees and its run folder filled in.

    With parallel.layout = "tune" there are several, which differ in their layouts, the planner's best first. Arguments,
    output and exit status are those of `torchllm.config.load_config`. The cluster's file is checked too, and, before
    the processes of the run are started, the files that it reads and the folders that it writes.
    """
    heartbeat().open()
    draft: Draft[Any] = read_draft(arguments, schema)
    check_cluster(draft)
    compiles = can_compile(draft)
    if not compiles:
        draft.config = resolve_compile(draft.config, compiles)  # before it is planned
    alternatives = [resolve_compile(alternative, compiles) for alternative in plan_layout(draft)]
    _note_uncompiled_blocks(draft)
    draft.config = resolve_compile(draft.config, compiles)
    is_rank_of_launcher = "WORLD_SIZE" in os.environ and not draft.arguments.check
    if not is_rank_of_launcher and not draft.config.run.dry_run and _is_readable(draft):
        _report(inspect_training(draft.config), draft)
    config = finish(draft)
    return [config, *(replace(alternative, run=config.run) for alternative in alternatives)]


def load_run(arguments: Sequence[str], *, one_device: bool = False) -> Config:
    """Return the config of a run whose weights a recipe uses: that of its run folder, as a rule.

    A forked recipe may have written it: its own keys are printed and not used. Before torch is imported it is checked
    that the run has a checkpoint, and that the tokenizer is there. The rest is as in `torchllm.config.load_config`.
    """
    draft = read_draft(arguments, Config, one_device=one_device, uses_weights=True)
    draft.config = resolve_compile(draft.config, can_compile(draft))
    if os.environ.get("RANK", "0") == "0" and _is_readable(draft):
        _report(inspect_trained_run(draft.config), draft)
    return finish(draft)


def _is_readable(draft: Draft[Any]) -> bool:
    """Return whether each key of a draft has a value that somebody has chosen, or its default."""
    return draft.layer.is_complete and not draft.wrong


def _report(inspection: Inspection, draft: Draft[Any]) -> None:
    """Add what was found to a draft."""
    for problem in inspection.problems:
        draft.report(tuple(problem.key.split(".")), problem.message)
    draft.notes += [f"not checked: {line}" for line in inspection.unchecked]


def check_cluster(draft: Draft[Any]) -> None:
    """Report what is wrong with `cluster.name` and the file that it names."""
    name = draft.config.cluster.name
    if name:
        from torchllm.spec.cluster import read_cluster, unknown_cluster  # of no use to other runs

        if unknown := unknown_cluster(name):
            draft.report(("cluster", "name"), unknown)
        else:
            read_cluster(name, draft.errors)


def can_compile(draft: Draft[Any]) -> bool:
    """Return whether torch compiles what is "auto" in [compile]: on a GPU with a compiler. Note what a GPU lacks.

    A dry run is of the machines that cluster.name describes, which are taken to have a compiler.
    """
    config = draft.config
    keys = ", ".join(f"compile.{key}" for key in _auto_keys(config))
    if not keys or draft.errors or config.run.device == "cpu":
        return False
    if config.run.dry_run and config.cluster.name:
        from torchllm.spec.cluster import read_cluster  # of no use to other runs

        hardware = read_cluster(config.cluster.name, [])
        return hardware is not None and hardware.gpu != "CPU"
    if count_gpus() == 0:
        return False
    lack = lack_of_gpu_compiler()
    if lack:
        draft.notes.append(f"{draft.file}: {keys}: auto is false: {lack}")
    return not lack


def resolve_compile(config: C, compiles: bool) -> C:
    """Return a config in which no key of [compile] is "auto". compiles: what `can_compile` returns."""
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
    """Note that the layout leaves the blocks uncompiled, if it does and nobody has chosen that."""
    obstacle = _obstacle_to_compiled_blocks(draft.config)
    if draft.config.compile.block == "auto" and obstacle is not None:
        draft.notes.append(f"{draft.file}: compile.block: auto is false: {obstacle.why}; to compile, {obstacle.remedy}")


def plan_layout(draft: Draft[C]) -> list[C]:
    """Give a draft whose layout is open the planner's best one; return the others that "tune" measures.

    Nothing is planned for a draft with errors.
    """
    kind = draft.config.parallel.layout
    if kind == "manual" or draft.errors or draft.ranks is None:
        return []
    path = ("parallel", "layout")
    if draft.ranks.world is None:
        draft.report(path, f"is {kind}, but the number of ranks is unknown: set NPROC (and NNODES)")
        return []

    from torchllm.planner.search.auto import choose_layouts  # of no use to other runs

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
