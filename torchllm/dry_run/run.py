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
from itertools import accumulate
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
    """What `dry_run` prints."""
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
    found = [_highest(parallel, one, traced, count) for one, traced in zip(plans, traces, strict=True)]
    with fake_ranks(0, parallel.ranks):
        mesh = build_mesh(parallel, CPU)
        return Report(config, dtype, tuple(mesh.world.shape), list(mesh.axis_of_group.values()), hardware, count, found)


def _trace(config: Config, dtype: torch.dtype, one: TracePlan) -> Traced:
    return trace(config, dtype, one.rank, one.micro_batches, one.pp, one.place)


def rank_kinds(config: Config) -> list[list[int]]:
    """The pipeline ranks, those together whose stages are alike."""
    parallel = config.parallel
    blocks = balanced_split(config.model, parallel, config.training.sequence_length) if parallel.pp > 1 else (0,)
    firsts = list(accumulate(blocks, initial=0))
    every = recompute_interval(config.recompute, config.model.layers)

    def looks(stage: int) -> tuple[bool, bool, tuple[bool, ...]]:
        here = range(firsts[stage], firsts[stage + 1])
        recomputed = tuple(config.recompute.mode == "every_k" and block % every == 0 for block in here)
        return stage == 0, stage == parallel.stages - 1, recomputed

    alike: dict[object, list[int]] = {}
    for rank in range(parallel.pp):
        # The ends of a pipeline send to one side only, whatever they hold.
        look = (_ends(rank, parallel.pp), *map(looks, stage_of_rank(parallel, rank)))
        alike.setdefault(look, []).append(rank)
    return list(alike.values())


def plan_trace(parallel: Parallel, ranks: list[int], micro_batches: int) -> TracePlan:
    """The shortest step that has every action of the first of `ranks`, in the shortest pipeline."""
    pp = parallel.pp
    needed = set(_keys(parallel, micro_batches, ranks[0]))
    for fewer in range(1, micro_batches):
        for length in range(min(pp, 3), min(pp, LONGEST_PIPELINE) + 1):
            for place in range(length):
                # As many ranks before it, and after it, as it has in truth, or fewer; none only at an end.
                like = [r for r in ranks if 0 <= r - place <= pp - length and _ends(r, pp) == _ends(place, length)]
                try:
                    if like and needed <= set(_keys(replace(parallel, pp=length, split=()), fewer, place)):
                        return TracePlan(ranks, like[0], fewer, length, place)
                except ValueError:  # the schedule wants more micro batches
                    continue
    return TracePlan(ranks, ranks[0], micro_batches, pp, ranks[0])


def _ends(place: int, pp: int) -> tuple[bool, bool]:
    """Whether a rank is the first, and the last, of a pipeline."""
    return place == 0, place == pp - 1


@cache
def _orders(parallel: Parallel, micro_batches: int) -> list[list[str]]:
    with fake_ranks(0, parallel.pp):
        return true_orders(parallel, micro_batches, None)


def _keys(parallel: Parallel, micro_batches: int, rank: int) -> list[Key]:
    return action_keys(_orders(parallel, micro_batches)[rank], stage_of_rank(parallel, rank))


def _highest(parallel: Parallel, one: TracePlan, traced: Traced, micro_batches: int) -> RankKind:
    """The step of the rank with the highest peak, of those whose every action is in the trace."""
    steps: list[tuple[int, ReplayedStep]] = []
    for rank in one.ranks:
        order = _keys(parallel, micro_batches, rank)
        if set(order) <= set(traced.keys):
            steps.append((rank, replay(traced, order, micro_batches)))
    rank, step = max(steps, key=lambda found: sum(found[1].peak.values()))
    return RankKind(one.ranks, rank, step.peak, step.most, step.sent, (traced.micro_batches, one.pp))
