"""Lets few of a stage's equal blocks stand for all of them.

Traced are the blocks at both ends and two periods of the blocks between them (a period is one block, or `recompute.k`
blocks). Each trace checks itself: in each action the second period must have the memory and messages of the first, and
the memory at the end of all actions must equal the memory of all gradients; else all blocks are traced. The blocks that
are left out have parameters, gradients and optimizer state, so that the update of the weights is traced whole; and
their routers are in the unit of all routers, so that its messages are whole.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchllm.config import Config, Model
from torchllm.facts.flops import recompute_interval
from torchllm.facts.stages import balanced_split
from torchllm.models.decoder import Decoder
from torchllm.models.experts import Router
from torchllm.parallel.fsdp import fsdp_modules
from torchllm.tools.dry_run.memory import Bytes, Span, larger_of_each, plus, spans
from torchllm.tools.dry_run.tracker import BlockBegins, Tracker


class Repeats(NamedTuple):
    """Blocks that repeat each other."""

    first: int
    """number of the first block of the first period"""
    period: int
    """blocks of a period"""
    left_out: int
    """periods after the second that are not traced"""

    @property
    def traced(self) -> range:
        """Numbers of the blocks of both traced periods."""
        return range(self.first, self.first + 2 * self.period)

    @property
    def others(self) -> range:
        """Numbers of the blocks that are not traced."""
        return range(self.traced.stop, self.traced.stop + self.left_out * self.period)


class NotEqualError(Exception):
    """The blocks of both periods do not have the same memory and messages."""


def find_repeats(config: Config, pp_rank: int = 0) -> Repeats | None:
    """Return the blocks of a pipeline rank that few can stand for; None if all must be traced. config: resolved."""
    model, parallel, recompute = config.model, config.parallel, config.recompute
    # Of several stages on a rank none has many blocks. A segment recomputes several. Blocks of a fork may differ by
    # their index.
    if parallel.stages > parallel.pp or recompute.mode == "segment" or model.block:
        return None
    blocks = blocks_of_stages(config)
    start = sum(blocks[:pp_rank])
    stop = start + blocks[pp_rank]
    interval = recompute_interval(recompute, model.layers) if recompute.mode == "every_k" else 1
    period = math.lcm(interval, len(model.pattern) or 1)
    end = max(1, parallel.prefetch)  # blocks that gather others, or are gathered, than those between the ends
    if model.experts and parallel.ep > 1:
        end += 1  # a block has two units: buffers are as in others one block later
    first = end + max(start, model.dense_layers if model.experts else 0)
    if joins_the_routers(model):
        first += 1  # the buffer of the block before them is freed one block later than others
    # Blocks of a kind share a mask and rotary angles, which are freed with the first of them.
    kinds = [model.kind_of(number) for number in range(start, stop)]
    first = max(first, start + max(map(kinds.index, kinds)) + 1)
    left_out = (stop - end - first) // period - 2
    return Repeats(first, period, left_out) if left_out > 0 else None


def joins_the_routers(model: Model) -> bool:
    """Return whether FSDP gathers the routers of all blocks at once."""
    return model.experts > 0 and model.router_dtype == "float32"


def blocks_of_stages(config: Config) -> tuple[int, ...]:
    """Return the number of blocks of each stage of the pipeline."""
    if config.parallel.pp == 1:
        return (config.model.layers,)
    return balanced_split(config.model, config.parallel, config.training.sequence_length)


def check_parameters(model: Decoder, repeats: Repeats) -> None:
    """Raise NotEqualError unless the blocks have the same parameters as the first period, trained or frozen."""

    def parameters(number: int) -> list[object]:
        named = model.layers[str(number)].named_parameters()
        return [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in named]

    for number in (*repeats.traced, *repeats.others):
        if parameters(number) != parameters(repeats.first + (number - repeats.first) % repeats.period):
            raise NotEqualError(f"the parameters of block {number} differ from those of earlier blocks")


def take_out(stage: Decoder, numbers: Sequence[int], ahead: int) -> Decoder:
    """Return some blocks of a parallelized stage as a stage without ends; `stage` keeps the others.

    ahead: blocks that FSDP gathers ahead. Those before and behind the gap gather each other, as if there were none.
    """
    with torch.device("meta"):
        taken = Decoder(replace(stage.model, layers=1, pattern=()), 0, 0.0)
    taken.model, taken.embeds = stage.model, False
    taken.embed_tokens = taken.embed_positions = taken.norm = taken.lm_head = None
    gap = list(stage.layers).index(str(numbers[0]))
    taken.layers = nn.ModuleDict({str(number): stage.layers.pop(str(number)) for number in numbers})
    units = [_units_of(block) for block in stage.layers.values()]
    if units[gap]:
        for place in range(gap - ahead, gap):
            outer, *inner = units[place]
            outer.set_modules_to_forward_prefetch(sum(units[place + 1 : place + 1 + ahead], inner))
        for place in range(gap, gap + ahead):
            before = units[place - ahead : place]
            units[place][0].set_modules_to_backward_prefetch(sum(before[::-1], units[place]))
    return taken


def _units_of(block: nn.Module) -> list[FSDPModule]:
    """Return the units of FSDP in a block, its own first, without the routers, which are in a unit of the stage."""
    return [unit for unit in fsdp_modules(block) if not isinstance(unit, Router)]


def watch_blocks(stage: Decoder, tracker: Tracker, repeats: Repeats, routers: Sequence[nn.Module]) -> None:
    """Tell the tracker when the forward of each block begins, and its backward.

    routers: of the blocks that are not traced, in the unit of all routers. They get their gradients after the backward
    of both periods, before the unit's gradients are reduced.
    """

    def watch(number: int, block: nn.Module) -> None:
        begun: set[int] = set()  # forward passes whose backward has begun

        def forward_begins(module: nn.Module, args: object) -> None:
            if tracker.window >= 0:  # not while recomputing
                tracker.begin_block("F", number)

        def forward_ends(module: nn.Module, args: object, output: Tensor) -> None:
            window = tracker.window
            if window >= 0 and output.requires_grad:
                output.register_hook(lambda gradient: backward_begins(window))

        def backward_begins(window: int) -> None:
            if window in begun:
                return
            begun.add(window)
            if routers and number == repeats.first - 1:
                tracker.begin_block(OTHERS, number)
                give_gradients(routers, stage)
            tracker.begin_block("B", number)

        block.register_forward_pre_hook(forward_begins, prepend=True)
        block.register_forward_hook(forward_ends, prepend=True)

    for name, block in stage.layers.items():
        watch(int(name), block)


@torch.no_grad()
def give_gradients(modules: Sequence[nn.Module], like: Decoder) -> None:
    """Give modules that are not run the results of a backward: gradients, and sums of the routers as in `like`."""
    if like.model.experts:
        own = next(module for module in reversed(list(like.modules())) if isinstance(module, Router))
        for router in (inner for module in modules for inner in module.modules() if isinstance(inner, Router)):
            if own.sums is not None:
                router.sums = torch.empty_like(own.sums)
            for parameter, of_own in zip(router.parameters(), own.parameters(), strict=True):
                if parameter.grad is None and isinstance(of_own.grad, DTensor):  # FSDP sums parts of a sum over tp
                    part = torch.empty_like(of_own.grad.to_local())
                    parameter.grad = DTensor.from_local(part, of_own.grad.device_mesh, of_own.grad.placements)
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)


def check_between_steps(tracker: Tracker, blocks: Sequence[BlockBegins], repeats: Repeats) -> None:
    """Raise NotEqualError if a block of the step before has left memory, as those that are left out would.

    blocks: of that step.
    """
    times = [begins.time for begins in blocks]
    for held in tracker.held:
        place = bisect_right(times, held.born) - 1
        if place >= 0 and blocks[place].number in repeats.traced and held.bytes and not held.kind:
            raise NotEqualError(f"a block leaves {held.bytes} bytes for the next step")


def repeated_spans(tracker: Tracker, repeats: Repeats) -> list[Span]:
    """Return the spans of the step with all blocks, from a tracker that saw some of them. Raises NotEqualError."""
    begins = {mark.time: mark for mark in tracker.blocks}
    marks = sorted([*tracker.marks, *((mark.time, "") for mark in tracker.blocks)])
    actions: list[list[_Part]] = []
    for (time, name), span in zip(marks, spans(tracker, marks), strict=True):
        if name:
            actions.append([])
        part = _Part(span, begins.get(time))
        if part.begins is None or part.begins.kind != OTHERS:
            actions[-1].append(part)
    level = actions[0][0].span.start
    found = []
    for parts in actions:
        if parts[0].span.name == OTHERS:  # the other blocks get the gradients that are counted already
            continue
        if parts[0].span.name == "tail" and level.total() != parts[0].span.start.total():
            raise NotEqualError("all gradients take other memory than the blocks of both periods tell")
        whole = _joined(level, list(_repeated(parts, repeats)))
        found.append(whole)
        level = whole.end
    return found


OTHERS = "others"
"""name of the parts of a step that give gradients to the blocks that are not traced: an action, or within one"""


class _Part(NamedTuple):
    """Part of an action, from the beginning of a block's forward or backward to the next."""

    span: Span
    begins: BlockBegins | None
    """None: the action's part before any block"""

    @property
    def cost(self) -> tuple[object, ...]:
        """Memory from the part's beginning on, and messages."""
        span = self.span
        levels = [_not_zero(span.above_start(level)) for level in (span.end, span.peak, span.highest)]
        return (*levels, [message._replace(time=0) for message in span.sent])


def _not_zero(level: Bytes) -> dict[str, int]:
    return {kind: size for kind, size in level.items() if size}


def _repeated(parts: Sequence[_Part], repeats: Repeats) -> Iterator[_Part]:
    """Yield the parts of an action; the second period's are repeated for each period that was left out."""
    period = repeats.period
    after: dict[int, Sequence[_Part]] = {}
    """second period of each kind of part, by the place of its last one"""
    for kind in ("F", "B", "R"):
        places = []
        for i, part in enumerate(parts):
            if part.begins is not None and part.begins.kind == kind and part.begins.number in repeats.traced:
                places.append(i)
        if not places:
            continue
        first, last = places[0], places[-1]
        if places != list(range(first, first + 2 * period)):
            raise NotEqualError(f"the blocks of {parts[0].span.name} do not run once each, one after the other")
        earlier, later = parts[first : first + period], parts[first + period : last + 1]
        if [part.cost for part in earlier] != [part.cost for part in later]:
            raise NotEqualError(f"the blocks of {parts[0].span.name} differ")
        after[last] = later
    for i, part in enumerate(parts):
        yield part
        for _ in range(repeats.left_out):
            yield from after.get(i, ())


def _joined(level: Bytes, parts: Sequence[_Part]) -> Span:
    """Return one span of all parts, one after the other, the first from `level` on."""
    start = peak = highest = level
    sent = []
    for part in parts:
        span = part.span
        here = plus(level, span.above_start(span.peak))
        peak = here if here.total() > peak.total() else peak
        highest = larger_of_each(highest, plus(level, span.above_start(span.highest)))
        level = plus(level, span.above_start(span.end))
        sent += span.sent
    return Span(parts[0].span.name, start, level, peak, highest, sent)
