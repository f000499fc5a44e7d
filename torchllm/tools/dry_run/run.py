"""The dry run: traces every distinct kind of rank of a layout, puts its whole step together, and prints a report.

Ranks with the same pipeline rank differ only in the data that they read, so the first stands for all. Pipeline ranks
are of one kind if their stages have the same blocks and ends. They still hold different numbers of micro batches, so
the step of each is put together, and for each kind the rank with the highest peak is shown.
"""

import gc
import logging
import multiprocessing
import os
import signal
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch

from torchllm.config import Config, Model, Parallel, gradient_accumulation
from torchllm.config.stages import StageSteps, of_span, spans_of
from torchllm.facts.flops import recompute_interval
from torchllm.facts.stages import stage_of_rank
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.error_report import report_errors
from torchllm.runtime.host_limits import usable_cores
from torchllm.runtime.signs_of_life import show_progress, signs_of_life
from torchllm.tools.dry_run.apart import in_processes
from torchllm.tools.dry_run.memory import on_device
from torchllm.tools.dry_run.repeats import blocks_of_stages, find_repeats
from torchllm.tools.dry_run.replay import Key, ReplayedStep, Traced, action_keys, replay
from torchllm.tools.dry_run.report import RankKind, Report, as_json, as_text
from torchllm.tools.dry_run.trace import CPU, TRACED_STEPS, count_blocks, fake_ranks, trace, true_orders
from torchllm.tools.dry_run.tracker import HOST
from torchllm.tools.mesh_axes import axis_of_group
from torchllm.tools.planner.cluster import read_cluster

log = logging.getLogger(__name__)

LONGEST_PIPELINE = 7
"""pipeline ranks to trace at most: enough for each kind of action of every schedule"""


class TracePlan(NamedTuple):
    """How the pipeline ranks of one kind are traced: by one of them, in a step of fewer ranks and micro batches."""

    ranks: list[int]
    """pipeline ranks of the kind"""
    rank: int
    """pipeline rank whose stages are built"""
    micro_batches: int
    """micro batches of the traced step"""
    pp: int
    """pipeline ranks of the traced step"""
    traced_rank: int
    """which of the `pp` ranks runs the stages"""


def dry_run(config: Config) -> None:
    """Print the memory and the messages of every kind of rank. config: resolved, for any number of ranks."""
    report_errors()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it silently
    logging.getLogger("torchllm.parallel").setLevel(logging.WARNING)  # or it logs the techniques per kind of rank
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to look for a GPU starts no CUDA, which forbids forks
    gc.freeze()  # a collection need not look through all of torch again
    stage = largest_stage(config)
    with signs_of_life("dry run"):
        report = examine(of_span(config, stage), "fork")  # nothing was computed: a fork need not import torch again
    if config.data.changes_size:
        report = report._replace(stage=stage.key)
    print(as_json(report) if config.run.json else as_text(report))


def largest_stage(config: Config) -> StageSteps:
    """Return the stage whose steps need most memory: of the longest sequences, or of the most tokens.

    A pipeline that runs all forward passes of a step first holds all of its tokens.
    """
    holds_all = config.parallel.pp > 1 and config.parallel.schedule in ("GPipe", "LoopedBFS")

    def tokens(stage: StageSteps) -> tuple[int, int]:
        batch, length = stage.training.global_batch_size, stage.training.sequence_length
        return (batch * length, length) if holds_all else (length, batch)

    return max(spans_of(config.data, config.training), key=tokens)


def examine(config: Config, start_method: str = "forkserver") -> Report:
    """Return the report that `dry_run` prints. config: resolved. start_method: of `multiprocessing`."""
    training, parallel = config.training, config.parallel
    hardware = read_cluster(config.cluster.name, []) if config.cluster.name else None
    has_gpu = torch.cuda.is_available() and config.run.device != "cpu"
    gpu = hardware.is_gpu if hardware is not None else has_gpu
    dtype = compute_dtype(training, torch.device("cuda" if gpu else "cpu"))
    count = gradient_accumulation(training, parallel.data_ranks)
    plans = [plan_trace(parallel, ranks, count) for ranks in rank_kinds(config)]
    # Each trace has its own process: DTensor's caches hold process groups by name and would find groups of another
    # layout. A fork of a process that has computed with several threads may wait for them forever: then from a server.
    processes = multiprocessing.get_context(start_method)
    kinds = f"{len(plans)} kinds of rank" if len(plans) > 1 else "the only kind of rank"
    log.info("tracing %s", kinds)
    traced_blocks = processes.Value("L", 0)
    blocks = sum(TRACED_STEPS * plan.micro_batches * _traced_blocks(config, plan.rank) for plan in plans)
    show_progress(lambda: f"block {min(traced_blocks.value, blocks)} of {blocks}, of {kinds}")
    traces: dict[int, Traced] = {}
    trace_plan = partial(_trace, config, dtype, gpu, traced_blocks)
    for index, traced in in_processes(processes, trace_plan, plans, usable_cores()):
        traces[index] = traced
        if len(plans) > 1:
            log.info("traced %d of %s", len(traces), kinds)
    graphs = config.compile.graphs
    rank_reports = [_highest(parallel, plan, traces[index], count, graphs) for index, plan in enumerate(plans)]
    with fake_ranks(0, parallel.ranks):
        mesh = build_mesh(parallel, CPU)
        axes = list(axis_of_group(mesh).values())
        return Report(config, dtype, gpu, tuple(mesh.world.shape), axes, hardware, count, rank_reports)


def _traced_blocks(config: Config, pp_rank: int) -> int:
    """Return the number of blocks of all stages of a pipeline rank that are traced."""
    blocks, repeats = blocks_of_stages(config), find_repeats(config, pp_rank)
    of_rank = sum(blocks[stage] for stage in stage_of_rank(config.parallel, pp_rank))
    return of_rank - len(repeats.others) if repeats else of_rank


def _trace(config: Config, dtype: torch.dtype, gpu: bool, traced_blocks: Any, plan: TracePlan) -> Traced:
    count_blocks(traced_blocks)
    return trace(config, dtype, plan.rank, plan.micro_batches, plan.pp, plan.traced_rank, gpu)


class StageKind(NamedTuple):
    """The properties that stages may differ in."""

    first: bool
    """whether it has the embedding"""
    last: bool
    """whether it has the head"""
    recomputed: tuple[bool, ...]
    """for each block, whether recompute.mode = "every_k" recomputes it"""
    views: tuple[Model, ...]
    """of each block: its window, its experts"""


def rank_kinds(config: Config) -> list[list[int]]:
    """Return lists of pipeline ranks; those in one list have stages of the same kinds."""
    parallel = config.parallel
    first_blocks = list(accumulate(blocks_of_stages(config), initial=0))
    every = recompute_interval(config.recompute, config.model.layers)

    def kind_of_stage(stage: int) -> StageKind:
        is_last = stage == parallel.stages - 1
        numbers = range(first_blocks[stage], config.model.blocks if is_last else first_blocks[stage + 1])
        recomputed = tuple(config.recompute.mode == "every_k" and number % every == 0 for number in numbers)
        views = tuple(config.model.of_block(number) for number in numbers)
        return StageKind(stage == 0, is_last, recomputed, views)

    ranks_of_kind: dict[object, list[int]] = {}
    for rank in range(parallel.pp):
        stages = tuple(kind_of_stage(stage) for stage in stage_of_rank(parallel, rank))
        # The ends of a pipeline send in one direction only, whatever stages they hold.
        kind = _ends(rank, parallel.pp), stages
        ranks_of_kind.setdefault(kind, []).append(rank)
    return list(ranks_of_kind.values())


def plan_trace(parallel: Parallel, ranks: list[int], micro_batches: int) -> TracePlan:
    """Return the plan of fewest micro batches, then pipeline ranks, that has all actions of the first of `ranks`."""
    needed = set(_keys(parallel, micro_batches, ranks[0]))
    shortest = min(parallel.pp, 3)
    longest = min(parallel.pp, LONGEST_PIPELINE)
    for count, length in product(range(1, micro_batches), range(shortest, longest + 1)):
        short = replace(parallel, pp=length, split=())
        for traced_rank in range(length):
            rank = _rank_like(ranks, parallel.pp, traced_rank, length)
            if rank is None:
                continue
            try:
                keys = set(_keys(short, count, traced_rank))
            except ValueError:  # the schedule wants more micro batches
                continue
            if needed <= keys:
                return TracePlan(ranks, rank, count, length, traced_rank)
    return TracePlan(ranks, ranks[0], micro_batches, parallel.pp, ranks[0])


def _rank_like(ranks: list[int], pp: int, traced_rank: int, length: int) -> int | None:
    """Return the first of `ranks` that can be traced as rank `traced_rank` of a pipeline of `length` ranks, else None.

    The short pipeline has no more ranks before it, or after it, than the pipeline of `pp` ranks, and it
    is an end of the one if it is the same end of the other.
    """
    for rank in ranks:
        fits = 0 <= rank - traced_rank <= pp - length
        if fits and _ends(rank, pp) == _ends(traced_rank, length):
            return rank
    return None


def _ends(rank: int, pp: int) -> tuple[bool, bool]:
    """Return whether a rank is the first of a pipeline, and whether it is the last."""
    return rank == 0, rank == pp - 1


@cache
def _orders(parallel: Parallel, micro_batches: int) -> list[list[str]]:
    with fake_ranks(0, parallel.pp):
        return true_orders(parallel, micro_batches, None)


def _keys(parallel: Parallel, micro_batches: int, rank: int) -> list[Key]:
    return action_keys(_orders(parallel, micro_batches)[rank], stage_of_rank(parallel, rank))


def _highest(parallel: Parallel, plan: TracePlan, traced: Traced, micro_batches: int, graphs: bool) -> RankKind:
    """Return the step with the highest peak among the ranks whose actions are all in the trace."""
    steps: dict[int, ReplayedStep] = {}
    for rank in plan.ranks:
        order = _keys(parallel, micro_batches, rank)
        if set(order) <= set(traced.keys):
            steps[rank] = replay(traced, order, micro_batches, graphs)
    rank = max(steps, key=lambda rank: on_device(steps[rank].peak))
    step = steps[rank]
    on_host = step.highest[HOST]
    del step.peak[HOST]
    return RankKind(
        pp_ranks=plan.ranks,
        shown=rank,
        memory=step.peak,
        highest=step.highest,
        sent=step.sent,
        traced_micro_batches=traced.micro_batches,
        traced_pp_ranks=plan.pp,
        host=traced.host + on_host,
    )
