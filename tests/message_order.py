"""Checks that the ranks of a layout issue their messages in one order: another one hangs on NCCL, and nowhere else.

Each rank of a layout is traced on fake tensors (`torchllm/tools/dry_run/trace.py`), so no message is sent and the other
ranks need not exist. The messages of all ranks are then played together as if each rank had one stream: a message is
over when all its ranks have come to it, and only then the rank goes on. A GPU has a stream per process group, which
hangs less easily.

    python -m tests.message_order                               # the sample of the lattice, and the hollow layouts
    python -m tests.message_order CONFIG.toml --parallel.tp=2   # one run

What depends on values is not seen: how many rows a rank sends to the experts of another is taken as the same for all.
"""

import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.hollow.layouts import layouts as hollow_layouts
from tests.lattice import LAYOUT, SPACE, Layout, describe_layout, read_sample, settings_of
from torchllm.config import Config, gradient_accumulation
from torchllm.parallel.mesh import build_mesh
from torchllm.tools.config.load import load_config
from torchllm.tools.dry_run import trace
from torchllm.tools.dry_run.apart import in_processes
from torchllm.tools.dry_run.tracker import Tracker, find_group
from torchllm.tools.proof.layouts import AXES

WORKERS = 2


class Message(NamedTuple):
    """One message of a rank: a collective, or its end of a message from one rank to another."""

    ranks: tuple[int, ...]
    """of the process group"""
    operation: str
    """torch's name"""
    contents: tuple[str, ...]
    """type and number of elements of each tensor"""
    peer: int = -1
    """the other rank of a send or receive; -1: a collective"""

    def __str__(self) -> str:
        where = f"ranks {list(self.ranks)}" if self.peer < 0 else f"rank {self.peer}"
        return f"{self.operation} of {', '.join(self.contents)} with {where}"


Batch = tuple[Message, ...]
"""messages that a rank starts together: one collective, or sends and receives in no order"""


class FirstStepIsOver(Exception):
    """Ends a trace before its second step."""


class Recorder(Tracker):
    """Notes each message of a rank, in place of its size."""

    def __init__(self, *args: Any, steps: int) -> None:
        super().__init__(*args)
        self.steps = steps
        self.batches: list[Batch] = []
        self.second: int = 0
        """index of the first message of the second step"""
        self.last = 0
        """time of the latest send or receive"""
        _recorders.append(self)

    def restart(self) -> None:
        """Begin the second step."""
        self.second = len(self.batches)
        if self.steps == 1:
            raise FirstStepIsOver
        super().restart()

    def _note_sent(self, name: str, args: Any, out: Any) -> None:
        group = find_group(args)
        if group.size() == 1 or name.startswith("wait"):
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        tensors = [tensor for argument in args for tensor in _tensors(argument)]
        contents = tuple(f"{tensor.dtype}[{tensor.numel()}]".removeprefix("torch.") for tensor in tensors)
        if name not in ("send", "recv_"):
            self.batches.append((Message(ranks, name, contents),))
            return
        peer = next(ranks[argument] for argument in args if isinstance(argument, int))
        message = Message(ranks, name, contents, peer)
        if self.now == self.last + 1:  # no operation between them: dist.batch_isend_irecv
            self.batches[-1] += (message,)
        else:
            self.batches.append((message,))
        self.last = self.now


_recorders: list[Recorder] = []


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _tensors(item)


class OfRank(NamedTuple):
    """Messages of a rank, in order."""

    first: list[Batch]
    """while it is built and takes a step"""
    second: list[Batch]
    """while it takes the second step; none if that was not traced"""

    @property
    def repeats(self) -> bool:
        """Whether the second step sends the same as the first."""
        return self.second == self.first[-len(self.second) :]


def messages_of_rank(config: Config, steps: int, rank: int) -> OfRank:
    """Return the messages of a rank of a resolved config in one or two steps."""
    parallel = config.parallel
    micro_batches = gradient_accumulation(config.training, parallel.data_ranks)
    with trace.fake_ranks(rank, parallel.ranks), patch.object(trace, "Tracker", partial(Recorder, steps=steps)):
        mesh = build_mesh(parallel, trace.CPU)
        traceable = trace.traceable(config)
        with suppress(FirstStepIsOver):
            trace._trace(traceable, torch.float32, False, mesh, (mesh, parallel), micro_batches, None)
    recorder = _recorders[-1]
    return OfRank(recorder.batches[: recorder.second], recorder.batches[recorder.second :])


@dataclass
class Player:
    """Plays the messages of all ranks together."""

    batches: Sequence[Sequence[Batch]]
    """of each rank, in its order"""

    def __post_init__(self) -> None:
        self.position = [0] * len(self.batches)
        self.open: list[list[Message]] = [list(batches[0]) if batches else [] for batches in self.batches]
        """of each rank: what is not over in the batch that it has come to"""

    def play(self) -> list[str]:
        """Return why a run would hang, or read what another rank has not sent; empty: it would not."""
        waiting = list(range(len(self.batches)))
        while waiting:
            rank = waiting.pop()
            while self.open[rank]:
                woken, difference = self._advance(rank)
                if difference:
                    return [difference]
                if not woken:
                    break
                waiting += woken - {rank}
        stuck = [rank for rank, messages in enumerate(self.open) if messages]
        return [f"rank {rank} waits in its message {self.position[rank]}: {self.open[rank][0]}" for rank in stuck]

    def _advance(self, rank: int) -> tuple[set[int], str]:
        """End what can end of a rank's batch. Return the ranks that could go on, and a difference between ranks."""
        for message in self.open[rank]:
            others = message.ranks if message.peer < 0 else (message.peer,)
            matches = [self._match(other, rank, message) for other in others]
            ends = [match for match in matches if match is not None]
            if len(ends) < len(others):
                continue
            for other, match in zip(others, ends, strict=True):
                if match.contents != message.contents or (message.peer < 0 and match.operation != message.operation):
                    return set(), f"rank {rank} has {message}, and rank {other} has {match}"
            for other, match in zip(others, ends, strict=True):
                self._end(other, match)
            if message.peer >= 0:
                self._end(rank, message)
            return {rank, *others}, ""
        return set(), ""

    def _match(self, other: int, rank: int, message: Message) -> Message | None:
        """Return the message of another rank that is the other end of this one; None: it has not come to one."""
        for candidate in self.open[other]:
            if candidate.ranks != message.ranks:
                continue
            if message.peer < 0 and candidate.peer < 0:
                return candidate
            if candidate.peer == rank and candidate.operation != message.operation and message.peer >= 0:
                return candidate
        return None

    def _end(self, rank: int, message: Message) -> None:
        self.open[rank].remove(message)
        if not self.open[rank]:
            self.position[rank] += 1
            if self.position[rank] < len(self.batches[rank]):
                self.open[rank] = list(self.batches[rank][self.position[rank]])


class Checked(NamedTuple):
    """What came of a layout."""

    messages: int
    """of all ranks"""
    findings: list[str]


def messages_of(config: Config) -> list[list[Batch]]:
    """Return the messages of each rank: of one step if the second step of the first and the last rank repeats it.

    Else of two. Each rank is traced in a separate process, as `dry_run.examine` does.
    """
    context, ranks = multiprocessing.get_context("fork"), range(config.parallel.ranks)
    ends = list(dict.fromkeys((ranks[0], ranks[-1])))
    traced = {
        ends[at]: of_rank for at, of_rank in in_processes(context, partial(messages_of_rank, config, 2), ends, WORKERS)
    }
    steps = 1 if all(of_rank.repeats for of_rank in traced.values()) else 2
    others = ranks[1:-1]
    for at, of_rank in in_processes(context, partial(messages_of_rank, config, steps), others, WORKERS):
        traced[others[at]] = of_rank
    of_ranks = [traced[rank] for rank in ranks]
    return [of_rank.first if steps == 1 else of_rank.first + of_rank.second for of_rank in of_ranks]


def check(config: Config) -> Checked:
    """Trace all ranks of a resolved config and play their messages together."""
    batches = messages_of(config)
    return Checked(sum(map(len, batches)), Player(batches).play())


def all_layouts() -> dict[str, Config]:
    """Return the resolved configs of the lattice's sample and of the hollow layouts, by name."""
    sample = read_sample()
    configs = {}
    for layout in (*sample.first, *sample.rest):
        configs[describe_layout(layout)] = SPACE.config(layout)
    for name, arguments in hollow_layouts().items():
        configs[f"hollow: {name}"] = resolve(arguments)
    return configs


def chosen_layouts() -> dict[str, Config]:
    """Return those of `all_layouts` that the tests trace: half of the ranks.

    Orders differ between ranks by settings of the layout: each pair of these is among them, and each option of the
    model or of training with each axis that shares what it sends.
    """
    sample = read_sample()
    layouts = [*sample.first, *sample.rest]
    covered = {describe_layout(layout): _combinations(layout) for layout in layouts}
    ranks = {describe_layout(layout): SPACE.config(layout).parallel.ranks for layout in layouts}
    missing = set().union(*covered.values())
    chosen = []
    while missing:
        chosen.append(max(covered, key=lambda name: len(covered[name] & missing) / ranks[name]))
        missing -= covered[chosen[-1]]
    return {name: config for name, config in all_layouts().items() if name in chosen or name not in covered}


def _combinations(layout: Layout) -> set[frozenset[Any]]:
    """Return pairs of settings of a layout, and of an option and an axis of several ranks."""
    of_layout = [setting for setting in settings_of(layout) if setting[0] in LAYOUT]
    options = settings_of(layout).difference(of_layout)
    axes = [axis for axis in AXES if layout[axis] > 1]
    pairs = {frozenset(pair) for pair in itertools.combinations(of_layout, 2)}
    return pairs | {frozenset((option, axis)) for option in options for axis in axes}


def resolve(arguments: Iterable[str]) -> Config:
    """Return the config of a command line; the number of ranks is the product of its degrees."""
    return load_config([*arguments, "--run.dry_run=true"])


def main(arguments: list[str]) -> int:
    """Print what was found; exit status 1 where a layout would hang."""
    torch.set_num_threads(1)
    configs: Mapping[str, Config] = {arguments[0]: resolve(arguments)} if arguments else all_layouts()
    ranks = messages = wrong = 0
    for name, config in configs.items():
        checked = check(config)
        ranks += config.parallel.ranks
        messages += checked.messages
        wrong += bool(checked.findings)
        for finding in checked.findings:
            print(f"{name}: {finding}", flush=True)
    print(json.dumps({"layouts": len(configs), "ranks": ranks, "messages": messages, "would hang": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
