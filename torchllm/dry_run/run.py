"""The dry run: every distinct kind of rank of a layout traced, its whole step put together, and reported.

Ranks of one pipeline rank differ only in what they read: the first stands for all. Pipeline ranks are of one kind when
their stages have the same blocks and ends. They still keep different numbers of micro batches, so each one's step is
put together, and of a kind the one with the highest peak is shown.
"""

import logging
import multiprocessing
import os
import signal
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, product
from typing import NamedTuple

import torch

from torchllm.config import Config, Parallel, gradient_accumulation
from torchllm.dry_run.replay import Key, ReplayedStep, Traced, action_keys, replay
from torchllm.dry_run.report import RankKind, Report, as_json, as_text
from torchllm.dry_run.trace import CPU, fake_ranks, trace, true_orders
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.process import compute_dtype, report_errors
from torchllm.spec.cluster import read_cluster
from torchllm.spec.flops import recompute_interval
from torchllm.spec.stages import balanced_split, stage_of_rank

LONGEST_PIPELINE = 7
"""to trace in place of a longer one: enough for every schedule's actions, with those before them"""


class TracePlan(NamedTuple):
    """How the pipeline ranks of one kind are traced: as one of them, in a step of fewer ranks and micro batches."""

    ranks: list[int]
    rank: int
    """the one of them that is built"""
    micro_batches: int
    pp: int
    place: int
    """which of the `pp` ranks it is"""


def dry_run(config: Config) -> None:
    """Print what every kind of rank would hold and send; `config`: resolved, of any number of ranks."""
    report_errors()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    logging.getLogger("torchllm").setLevel(logging.WARNING)  # the order of the techniques, once a kind of rank
    report = examine(config)
    print(as_json(report) if config.run.json else as_text(report))


def examine(config: Config) -> Report:
    """Return what `dry_run` prints."""
    training, parallel = config.training, config.parallel
    hardware = read_cluster(config.cluster.name, []) if config.cluster.name else None
    gpu = hardware is not None or (torch.cuda.is_available() and config.run.device != "cpu")
    dtype = compute_dtype(training, torch.device("cuda" if gpu else "cpu"))
    count = gradient_accumulation(training, parallel.data_ranks)
    plans = [plan_trace(parallel, ranks, count) for ranks in rank_kinds(config)]
    # A process each: DTensor's caches keep process groups by name, and would find those of the last layout. Forked from
    # a server, not from here: a child of a process that has computed with several threads may wait for them for ever.
    processes = multiprocessing.get_context("forkserver")
    with processes.Pool(min(len(plans), os.cpu_count() or 1), maxtasksperchild=1) as pool:
        traces = pool.map(partial(_trace, config, dtype), plans, chunksize=1)
    rank_reports = [_highest(parallel, plan, traced, count) for plan, traced in zip(plans, traces, strict=True)]
    with fake_ranks(0, parallel.ranks):
        mesh = build_mesh(parallel, CPU)
        axes = list(mesh.axis_of_group.values())
        return Report(config, dtype, tuple(mesh.world.shape), axes, hardware, count, rank_reports)


def _trace(config: Config, dtype: torch.dtype, plan: TracePlan) -> Traced:
    return trace(config, dtype, plan.rank, plan.micro_batches, plan.pp, plan.place)


class StageKind(NamedTuple):
    """What a stage has that other stages may not have."""

    first: bool
    last: bool
    recomputed: tuple[bool, ...]
    """of each block, with recompute.mode = "every_k" """


def rank_kinds(config: Config) -> list[list[int]]:
    """Return the pipeline ranks, in one list those whose stages are alike."""
    parallel = config.parallel
    blocks: tuple[int, ...] = (0,)
    if parallel.pp > 1:
        blocks = balanced_split(config.model, parallel, config.training.sequence_length)
    first_blocks = list(accumulate(blocks, initial=0))
    every = recompute_interval(config.recompute, config.model.layers)

    def kind_of_stage(stage: int) -> StageKind:
        numbers = range(first_blocks[stage], first_blocks[stage + 1])
        recomputed = tuple(config.recompute.mode == "every_k" and number % every == 0 for number in numbers)
        return StageKind(stage == 0, stage == parallel.stages - 1, recomputed)

    ranks_of_kind: dict[object, list[int]] = {}
    for rank in range(parallel.pp):
        stages = tuple(kind_of_stage(stage) for stage in stage_of_rank(parallel, rank))
        # The ends of a pipeline send to one side only, whatever stages they hold.
        kind = _ends(rank, parallel.pp), stages
        ranks_of_kind.setdefault(kind, []).append(rank)
    return list(ranks_of_kind.values())


def plan_trace(parallel: Parallel, ranks: list[int], micro_batches: int) -> TracePlan:
    """Return the shortest step that has every action of the first of `ranks`, in the shortest pipeline."""
    needed = set(_keys(parallel, micro_batches, ranks[0]))
    shortest = min(parallel.pp, 3)
    longest = min(parallel.pp, LONGEST_PIPELINE)
    for count, length in product(range(1, micro_batches), range(shortest, longest + 1)):
        short = replace(parallel, pp=length, split=())
        for place in range(length):
            rank = _rank_in_place(ranks, parallel.pp, place, length)
            if rank is None:
                continue
            try:
                keys = set(_keys(short, count, place))
            except ValueError:  # the schedule wants more micro batches
                continue
            if needed <= keys:
                return TracePlan(ranks, rank, count, length, place)
    return TracePlan(ranks, ranks[0], micro_batches, parallel.pp, ranks[0])


def _rank_in_place(ranks: list[int], pp: int, place: int, length: int) -> int | None:
    """Return the first of `ranks` that may be rank `place` of a pipeline of `length`, None if there is none.

    In the short pipeline it has as many ranks before it and after it as in the one of `pp` ranks, or fewer, and none
    only if it is an end in truth too.
    """
    for rank in ranks:
        fits = 0 <= rank - place <= pp - length
        if fits and _ends(rank, pp) == _ends(place, length):
            return rank
    return None


def _ends(place: int, pp: int) -> tuple[bool, bool]:
    """Return whether a rank is the first, and the last, of a pipeline."""
    return place == 0, place == pp - 1


@cache
def _orders(parallel: Parallel, micro_batches: int) -> list[list[str]]:
    with fake_ranks(0, parallel.pp):
        return true_orders(parallel, micro_batches, None)


def _keys(parallel: Parallel, micro_batches: int, rank: int) -> list[Key]:
    return action_keys(_orders(parallel, micro_batches)[rank], stage_of_rank(parallel, rank))


def _highest(parallel: Parallel, plan: TracePlan, traced: Traced, micro_batches: int) -> RankKind:
    """Return the step of the rank with the highest peak, of those whose every action is in the trace."""
    steps: dict[int, ReplayedStep] = {}
    for rank in plan.ranks:
        order = _keys(parallel, micro_batches, rank)
        if set(order) <= set(traced.keys):
            steps[rank] = replay(traced, order, micro_batches)
    rank = max(steps, key=lambda rank: sum(steps[rank].peak.values()))
    step = steps[rank]
    return RankKind(plan.ranks, rank, step.peak, step.most, step.sent, (traced.micro_batches, plan.pp))
