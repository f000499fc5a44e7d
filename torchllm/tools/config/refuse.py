"""Refuses a config whose values do not fit each other, and fills in its degrees and its run folder.

The last of three steps: `load.py` reads the files, `torchllm/tools/front/resolve.py` resolves hub model and layout.
"""

import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NoReturn, TypeVar

from torchllm.config.applied_keys import note_origins
from torchllm.config.schema import Config, Parallel, Training, gradient_accumulation
from torchllm.config.toml import KeyPath, dotted, shown
from torchllm.tools.config.checks import problems_of_use, setting_problems
from torchllm.tools.config.degrees import layout_problems, resolve_degrees
from torchllm.tools.config.draft import TRAINING_ONLY, Arguments, Draft, override
from torchllm.tools.config.environment import (
    PER_RANK,
    Ranks,
    default_restarts,
    job_id,
    print_error_lines,
    print_notes,
    refuse,
)
from torchllm.tools.config.handed import hand_over
from torchllm.tools.config.idle import IdleKey, contradictions, describe_idle_keys, idle_keys
from torchllm.tools.config.read import read_table
from torchllm.tools.config.toml_files import Layer, merge_layers

C = TypeVar("C", bound=Config)

MOST_LOWERED = 1024
"""run.lower_ranks tries at most this number of processes per node"""


class Sources:
    """The files, each over its base, and the command line over them: they decide if a key without effect is an error.

    A file that sets optimizer.beta2 is right with AdamW, and so is a command line that chooses optimizer.name = "sgd"
    for a first try: the key is reported, and the run goes on. Only a source that contradicts itself is refused.
    """

    def __init__(self, layer: Layer, overrides: Mapping[str, str], config: Config) -> None:
        """Take the files of `layer`, and the overrides ("section.key" to text) over them. config: the merged result."""
        self.files = layer.files
        self.overrides = overrides
        self.config = config

    def contradict_themselves(self, path: KeyPath) -> bool:
        """Whether a key that is idle in the config is also idle for its own source.

        It is not if the source alone would use it (a source below made it idle), nor if the files up to that source, or
        up to one above it, would use it (a source above made it idle).
        """
        key = ".".join(path)
        configs = self._without_other_choices(path)
        return all(key in [idle_key.key for idle_key in contradictions(config)] for config in configs)

    def _without_other_choices(self, path: KeyPath) -> Iterator[Config]:
        """Yield the source of a key as a config: alone, then over its bases, then under each source above it."""
        if ".".join(path) in self.overrides:
            yield self._read(self._command_line())
            return
        of_key = [index for index, file in enumerate(self.files) if path in file.origins]
        if not of_key:  # a default of a fork's own schema
            return
        index = of_key[-1]
        yield self._read(self.files[index])
        for end in range(index + 1, len(self.files) + 1):
            yield self._read(merge_layers(self.files[:end]))

    def _command_line(self) -> Layer:
        layer = Layer({}, {})
        for key, text in self.overrides.items():
            override(layer, type(self.config), tuple(key.split(".")), text, [])
        return layer

    def _read(self, layer: Layer) -> Config:
        """Return a layer as a config; with model.from_hf, missing keys of [model] come from the published model."""
        config: Config = read_table(type(self.config), layer.table, [])
        if self.config.model.from_hf:
            written = layer.table.get("model", {})
            published = {
                item.name: getattr(self.config.model, item.name)
                for item in fields(self.config.model)
                if item.name not in written
            }
            config = replace(config, model=replace(config.model, **published))
        return config


def finish(draft: Draft[C], alternatives: Sequence[C] = ()) -> C:
    """Check the values against each other and return the config with its degrees and its run folder.

    alternatives: other layouts, to be handed to the ranks, too.
    SystemExit(2) after printing all errors if there are any; SystemExit(0) after the output of --check.
    """
    _cut_schedule(draft)
    if draft.ranks is not None and draft.ranks.most_nodes is not None:
        _check_node_counts(draft, draft.ranks, draft.ranks.most_nodes)
    _spare_nodes(draft)
    world = _ranks_to_start(draft)
    _check_values(draft, world)
    _name_folder(draft)
    if draft.errors or draft.ranks is None:
        refuse(draft.errors)

    config = draft.config
    origins = {dotted(path): origin for path, origin in draft.layer.origins.items()}
    note_origins(config, origins, is_for_loop=draft.one_device and not draft.uses_weights)
    parallel, _ = resolve_degrees(config.parallel, world)
    config = replace(config, parallel=parallel)
    for idle_key in idle_keys(config):
        path = tuple(idle_key.key.split("."))
        if draft.is_asked_about(path):
            draft.notes.append(draft.located(path, idle_key.message))
    path = ("parallel", "zero_stage")
    gathers_often = parallel.zero == 3 and parallel.pp > 1 and parallel.dp_shard * parallel.cp > 1
    if gathers_often and path in draft.layer.origins and draft.is_asked_about(path):
        message = "3 with pp gathers each block twice per micro batch: 2, the default, gathers it once per step"
        draft.notes.append(draft.located(path, message))
    print_notes(draft.notes, is_check=draft.arguments.check)
    if draft.arguments.check:
        _print_check(config, draft.ranks)
        configs = [config, *(replace(alternative, run=config.run) for alternative in alternatives)]
        hand_over(configs, origins, draft.arguments.words)
        raise SystemExit(0)
    if parallel.ranks > 1 and not draft.is_started and not config.run.dry_run:
        per_node = parallel.ranks // draft.ranks.nodes
        refuse([f"{draft.file}: needs {parallel.ranks} ranks: start it with {_command(draft.arguments, per_node)}"])
    return config


def _check_node_counts(draft: Draft[C], ranks: Ranks, most_nodes: int) -> NoReturn:
    """Print for each number of nodes whether a job that loses nodes can go on: layout and batch must allow it.

    SystemExit(0) if one is allowed, else SystemExit(2).
    """
    per_node = ranks.per_node
    if not draft.arguments.check:
        draft.errors.append(f"environment: NNODES: {ranks.nodes}-{most_nodes}: only --check takes a range of nodes")
    elif per_node is None:
        draft.errors.append("environment: NPROC: set it to the number of processes per node")
    _check_values(draft, None)
    if draft.errors or per_node is None:
        refuse(draft.errors)

    allowed = 0
    for nodes in range(most_nodes, ranks.nodes - 1, -1):
        draft.ranks = Ranks(world=nodes * per_node, nodes=nodes, per_node=per_node)
        world = _ranks_to_start(draft) or 0
        unfit = layout_problems(draft.config, world)
        if unfit:
            verdict = "no: " + "; ".join(f"{problem.key}: {problem.message}" for problem in unfit)
        else:
            allowed += 1
            parallel, _ = resolve_degrees(draft.config.parallel, world)
            verdict = _describe_batch(draft.config.training, parallel)
        print(f"{nodes} {'node' if nodes == 1 else 'nodes'} x {world // nodes} processes: {verdict}")
    raise SystemExit(0 if allowed else 2)


def _spare_nodes(draft: Draft[C]) -> None:
    """Lower the number of nodes to the largest that fits the layout, if a degree is -1; the last nodes wait.

    A scheduler that was asked for 2 to 4 nodes may have given 3. Only --check decides this, for run_train.sh.
    """
    ranks = draft.ranks
    if ranks is None or ranks.per_node is None or not _may_lower(draft) or draft.config.run.dry_run:
        return
    if _fitting_processes(draft, ranks.nodes) is not None:
        return
    for nodes in range(ranks.nodes - 1, 0, -1):
        if _fitting_processes(draft, nodes) is not None:
            waiting = ranks.nodes - nodes
            why = f"{ranks.nodes} nodes do not {_unmet_need(draft, ranks)}: {nodes} of them train, {waiting} "
            why += "waits" if waiting == 1 else "wait"
            for more in range(ranks.nodes + 1, 2 * ranks.nodes + 1):
                if _fitting_processes(draft, more) == ranks.per_node:
                    why += f"; all would train with {more} nodes"
                    break
            draft.notes.append(why)
            draft.ranks = Ranks(world=nodes * ranks.per_node, nodes=nodes, per_node=ranks.per_node, spare=why)
            return


def _ranks_to_start(draft: Draft[C]) -> int | None:
    """Return the number of ranks, None if it is unknown.

    With run.lower_ranks it is the largest number that fits the layout, from the given processes per node downwards.
    """
    ranks = draft.ranks
    if ranks is None:
        return None
    if ranks.per_node is None or not _may_lower(draft):
        return ranks.world
    per_node = _fitting_processes(draft, ranks.nodes)
    if per_node is None:
        return ranks.world
    if per_node < ranks.per_node:
        need = _unmet_need(draft, ranks)
        draft.notes.append(f"{ranks.per_node} processes do not {need}: starting {per_node}")
    return ranks.nodes * per_node


def _may_lower(draft: Draft[C]) -> bool:
    """Return whether fewer ranks may be started than asked for; a running rank cannot change their number."""
    parallel = draft.config.parallel
    has_open_degree = -1 in (parallel.dp_shard, parallel.dp_replicate)
    return has_open_degree and (draft.arguments.check or draft.config.run.dry_run)


def _fitting_processes(draft: Draft[C], nodes: int) -> int | None:
    """Return the processes per node that fit the layout on `nodes` nodes: all, or fewer with run.lower_ranks.

    None if no number fits.
    """
    per_node = draft.ranks.per_node if draft.ranks is not None else None
    if per_node is None:
        return None
    fewest = 1 if draft.config.run.lower_ranks else per_node
    for processes in (per_node, *range(min(per_node - 1, MOST_LOWERED), fewest - 1, -1)):
        if not layout_problems(draft.config, nodes * processes):
            return processes
    return None


def _unmet_need(draft: Draft[C], ranks: Ranks) -> str:
    """Describe why the number of ranks does not fit, as the end of "3 processes do not ..."."""
    unfit = {problem.key for problem in layout_problems(draft.config, ranks.world)}
    if "training.global_batch_size" in unfit:
        return f"divide the batch of {draft.config.training.global_batch_size} sequences"
    return "divide into the degrees of [parallel]"


def _cut_schedule(draft: Draft[C]) -> None:
    """Cut the file's warmup and decay to the steps of the command line, so that a first try is --training.steps=5.

    Warmup and decay of the command line are kept, and refused later if they are too long.
    """
    if not draft.is_overridden(("training", "steps")):
        return
    steps = draft.config.training.steps
    schedule = draft.config.schedule
    warmup_path = ("schedule", "warmup_steps")
    if schedule.warmup_steps > steps and not draft.is_overridden(warmup_path):
        draft.notes.append(
            draft.located(warmup_path, f"{schedule.warmup_steps} is cut to {steps}, the steps of the run")
        )
        schedule = replace(schedule, warmup_steps=steps)
    decay_path = ("schedule", "decay_steps")
    remaining = steps - schedule.warmup_steps
    if schedule.name == "wsd" and schedule.decay_steps > remaining >= 0 and not draft.is_overridden(decay_path):
        message = f"{schedule.decay_steps} is cut to {remaining}, the steps that the warmup leaves"
        draft.notes.append(draft.located(decay_path, message))
        schedule = replace(schedule, decay_steps=remaining)
    draft.config = replace(draft.config, schedule=schedule)


def _check_values(draft: Draft[C], world: int | None) -> None:
    """Report errors that need more than one key.

    Skips a file that could not be read, whose keys are missing, and keys that already have an error.
    """
    if not draft.layer.is_complete:
        return
    problems = problems_of_use(draft.config) if draft.uses_weights else setting_problems(draft.config)
    if draft.ranks is not None and draft.ranks.most_nodes is None:
        problems += layout_problems(draft.config, world)
    for problem in problems:
        if problem.key not in draft.wrong:
            draft.report(problem.path, problem.message)
    _check_contradictions(draft)


def _check_contradictions(draft: Draft[C]) -> None:
    """Report keys that their own source made idle; note, on one line, keys that another source made idle.

    Skips keys of a resolved file unless the command line made them idle. Skips sections with a wrong value, since its
    default stands in for it: `kind = "csv"` says nothing about the other keys of a source.
    """
    idle: list[IdleKey] = []
    sources = Sources(draft.layer, draft.arguments.overrides, draft.config)
    wrong_sections = {key.split(".")[0] for key in draft.wrong}
    for idle_key in contradictions(draft.config):
        path = tuple(idle_key.key.split("."))
        if path[0] in wrong_sections or (draft.uses_weights and path[0] in TRAINING_ONLY):
            continue
        if not sources.contradict_themselves(path):
            idle.append(idle_key)
        elif draft.is_asked_about(path):
            draft.report(path, f"{idle_key.message}{idle_key.remedy}")
    if idle:
        draft.notes.append(describe_idle_keys(idle, lambda key: draft.place(tuple(key.split(".")))))


def _name_folder(draft: Draft[C]) -> None:
    """Give the run a folder if it has none."""
    run = draft.config.run
    path = ("run", "folder")
    if not run.folder.isprintable():
        draft.report(path, f"must be printable, not {shown(run.folder)}")
    elif not run.folder and draft.ranks is not None:
        draft.config = replace(draft.config, run=replace(run, folder=_new_folder(draft.arguments.file)))
        is_rank_of_several = draft.ranks.are_started and draft.ranks.world != 1 and not draft.arguments.check
        has_nodes = draft.ranks.nodes > 1 or draft.ranks.spare != "" or PER_RANK in os.environ
        is_shared = has_nodes or is_rank_of_several
        if is_shared and not run.dry_run and not job_id():  # each process would make up another name
            draft.report(path, "set it: there is no job id to name the folder after on all ranks")


def _new_folder(file: str) -> str:
    job = re.sub(r"[^\w.-]", "_", job_id())
    if not job:
        job = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return os.path.join("runs", f"{Path(file).stem or 'run'}-{job}")


def _command(arguments: Arguments, per_node: int) -> str:
    """Return the command that starts this recipe on all of its ranks."""
    recipe = "" if Path(sys.argv[0]).name == "pretrain.py" else f"RECIPE={shlex.quote(sys.argv[0])} "
    return f"{recipe}NPROC={per_node} {shlex.join(['./run_train.sh', *arguments.words])}"


def _print_check(config: Config, ranks: Ranks) -> None:
    """Print the settings for run_train.sh on stdout, and the batch for the user on stderr."""
    parallel = config.parallel
    per_node, uneven = divmod(parallel.ranks, ranks.nodes)
    if uneven:
        refuse([f"environment: NNODES: {ranks.nodes} nodes cannot share {parallel.ranks} ranks evenly"])
    print(f"NPROC={per_node}")
    print(f"RUN_FOLDER={config.run.folder}")
    print(f"SAMPLE={int(config.generate.after_training)}")
    print(f"START_TIMEOUT={config.run.start_timeout:g}")
    if ranks.spare:
        print(f"TRAINING_NODES={ranks.nodes}")
        print(f"WAIT_REASON={ranks.spare}")
    restarts = default_restarts() if config.run.restarts < 0 else config.run.restarts
    if restarts:
        print(f"RESTARTS={restarts}")
    if config.run.stopped_exit_status:
        print(f"STOPPED_EXIT_STATUS={config.run.stopped_exit_status}")
    if config.run.on_event:
        print(f"ON_EVENT={config.run.on_event}")
    if config.run.dry_run:
        print("DRY_RUN=1")
    print_error_lines([_describe_batch(config.training, parallel)])


def _describe_batch(training: Training, parallel: Parallel) -> str:
    """Describe how ranks share the sequences of a step; the degrees of `parallel` are resolved."""
    accumulated = gradient_accumulation(training, parallel.data_ranks)
    return (
        f"global batch {training.global_batch_size} sequences = {parallel.data_ranks} data ranks x "
        f"{training.micro_batch_size} micro batch x {accumulated} accumulated"
    )
