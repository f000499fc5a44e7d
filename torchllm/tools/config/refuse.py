"""Refuses a config whose values do not fit each other, and fills in its degrees and its run folder.

The last of three steps: `draft.py` reads the files, `torchllm/tools/front/resolve.py` resolves hub model and layout.
"""

import json
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torchllm.config.applied_keys import note_origins
from torchllm.config.environment import HANDED
from torchllm.config.keys import dotted
from torchllm.config.schema import Config
from torchllm.config.toml import shown
from torchllm.facts.parts.registry import problem_of_mixer
from torchllm.tools.config.checks import problems_of_use, setting_problems
from torchllm.tools.config.degrees import describe_batch, layout_problems, resolve_degrees
from torchllm.tools.config.draft import Arguments, Draft
from torchllm.tools.config.environment import (
    PER_RANK,
    Ranks,
    default_restarts,
    is_requeued,
    job_id,
    print_error_lines,
    print_notes,
    refuse,
    same_words,
)
from torchllm.tools.config.idle import contradictions, idle_keys
from torchllm.tools.config.read import key_of_kind

C = TypeVar("C", bound=Config)


def refuse_unknown_mixers(draft: Draft[Any]) -> None:
    """SystemExit(2), with the errors so far, if no mixer has the name that a kind of blocks gives: nothing is known."""
    unknown = {}
    for path, of_kind in draft.config.of_kinds.items():
        if problem := problem_of_mixer(of_kind.model):
            unknown[key_of_kind(draft.config, path, "mixer")] = problem
    for key, problem in unknown.items():
        draft.report(tuple(key.split(".")), problem)
    if unknown:
        refuse(draft.errors)


def finish(draft: Draft[C], alternatives: Sequence[C] = ()) -> C:
    """Check the values against each other and return the config with its degrees and its run folder.

    alternatives: other layouts, to be handed to the ranks, too.
    SystemExit(2) after printing all errors if there are any; SystemExit(0) after the output of --check.
    """
    refuse_unknown_mixers(draft)
    _cut_schedule(draft)
    if draft.ranks is not None and draft.ranks.most_nodes is not None:
        _try_node_counts(draft, draft.ranks, draft.ranks.most_nodes)
    world = None if draft.ranks is None else draft.ranks.world
    if draft.may_start_fewer_ranks and layout_problems(draft.config, world):
        from torchllm.tools.config.fewer_ranks import ranks_to_start  # of no use where all fit

        world = ranks_to_start(draft)
    _check_values(draft, world)
    _name_folder(draft)
    if draft.errors or draft.ranks is None:
        refuse(draft.errors)

    config = draft.config
    origins = {dotted(path): origin for path, origin in draft.layer.origins.items()}
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
    note_origins(draft.config, origins, is_for_loop=draft.one_device and not draft.uses_weights)
    return config


def _try_node_counts(draft: Draft[C], ranks: Ranks, most_nodes: int) -> NoReturn:
    """Print for each number of nodes whether a job that loses nodes can go on: layout and batch must allow it.

    SystemExit(0) if one is allowed, else SystemExit(2).
    """
    if not draft.arguments.check:
        draft.errors.append(f"environment: NNODES: {ranks.nodes}-{most_nodes}: only --check takes a range of nodes")
    elif ranks.per_node is None:
        draft.errors.append("environment: NPROC: set it to the number of processes per node")
    _check_values(draft, None)
    if draft.errors or ranks.per_node is None:
        refuse(draft.errors)
    from torchllm.tools.config.fewer_ranks import print_node_counts  # of no use to a start

    raise SystemExit(0 if print_node_counts(draft, ranks.nodes, most_nodes, ranks.per_node) else 2)


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
    if found := contradictions(draft.config):
        from torchllm.tools.config.contradictions import report_contradictions  # most configs have none

        report_contradictions(draft, found)


def _name_folder(draft: Draft[C]) -> None:
    """Give the run a folder if it has none."""
    run = draft.config.run
    path = ("run", "folder")
    if not run.folder.isprintable():
        draft.report(path, f"must be printable, not {shown(run.folder)}")
    elif not run.folder and draft.ranks is not None:
        draft.config = replace(draft.config, run=replace(run, folder=_new_folder(draft.arguments.file)))
        checkpoints = Path(draft.config.run.folder, "checkpoints")
        if "SLURM_JOB_ID" in os.environ and not is_requeued() and any(checkpoints.glob("step-*")):
            report = f"set it: {checkpoints.parent}, named after this job, has the checkpoints of an earlier run in it"
            draft.report(path, f"{report}; this run would go on from them")
        is_rank_of_several = draft.ranks.are_started and draft.ranks.world != 1 and not draft.arguments.check
        has_nodes = draft.ranks.nodes > 1 or PER_RANK in os.environ
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
    restarts = default_restarts() if config.run.restarts < 0 else config.run.restarts
    if restarts:
        print(f"RESTARTS={restarts}")
    if config.run.stopped_exit_status:
        print(f"STOPPED_EXIT_STATUS={config.run.stopped_exit_status}")
    if config.run.on_event:
        print(f"ON_EVENT={config.run.on_event}")
    if config.run.dry_run:
        print("DRY_RUN=1")
    print_error_lines([describe_batch(config.training, parallel)])


def hand_over(configs: Sequence[Config], origins: Mapping[str, str], words: Sequence[str]) -> None:
    """Write checked configs for the ranks, if run_train.sh waits for them (`torchllm/tools/front/start.py` reads them).

    origins: where each key was written. words: the command line.
    """
    if file := os.environ.get(HANDED):
        handed = {"words": same_words(words), "configs": [asdict(config) for config in configs], "origins": origins}
        Path(file).write_text(json.dumps(handed))
