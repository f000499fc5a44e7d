"""The degrees of a layout: resolved, and checked against the sizes that they must divide."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torchllm.config.schema import (
    AXES,
    SCHEDULES,
    Config,
    Model,
    Parallel,
    PipelineSchedule,
    RecomputeMode,
    Run,
    Training,
    gradient_accumulation,
)
from torchllm.config.stages import changes_size, lengths, of_span, spans_of
from torchllm.facts.parts.registry import mixer
from torchllm.tools.config.read import ConfigError, config_error


def layout_problems(config: Config, world_size: int | None) -> list[ConfigError]:
    """Return the problems of the degrees, and of the sizes that they must divide, in each stage of the training.

    `world_size` None: the number of ranks is unknown, and the product of the degrees is used.
    """
    result = _layout_problems(config, world_size)
    return [*result, *_problems_of_stages(config, world_size, result)] if changes_size(config.data) else result


def _problems_of_stages(config: Config, world_size: int | None, known: list[ConfigError]) -> Iterator[ConfigError]:
    """Yield problems of stages with another batch size or length. known: without regard to stages."""
    for span, settings in zip(spans_of(config.data, config.training), config.data.stage, strict=True):
        for problem in _layout_problems(of_span(config, span), world_size):
            if problem not in known:
                by_batch = problem.path[-1] == "global_batch_size" or not settings.sequence_length
                name = "global_batch_size" if by_batch and settings.global_batch_size else "sequence_length"
                other = "" if name == problem.path[-1] else f"{problem.key}: "
                yield config_error(f"{span.key}.{name}", f"{other}{problem.message}")
    parallel, views = config.parallel, [of_kind.model for of_kind in config.of_kinds.values()]
    (base, _), *others = lengths(config.data, config.training.sequence_length).items()
    for length, key in others:
        if parallel.expert_dispatch == "optimistic":
            yield config_error(key, 'needs parallel.expert_dispatch = "exact": "optimistic" has buffers of one size')
        is_cut = [(view.window_within(base) < base, view.window_within(length) < length) for view in views]
        if parallel.cp > 1 and parallel.cp_method == "ring" and any(before != now for before, now in is_cut):
            yield config_error(
                key,
                f"of sequences of {base} and {length} tokens only one kind is longer than model.window, and a ring "
                'shares these in another way: use parallel.cp_method = "ulysses"',
            )


def _layout_problems(config: Config, world_size: int | None) -> list[ConfigError]:
    parallel, wrong_degrees = resolve_degrees(config.parallel, world_size, rank_remedy(config.run))
    result = [*wrong_degrees, *_tensor_problems(config)]
    obstacle = obstacle_to_compiled_blocks(parallel.pp, parallel.schedule, parallel.cp, config.recompute.mode)
    if config.compile.block is True and obstacle is not None:
        result.append(config_error("compile.block", f"{obstacle.why}: set it to false, or {obstacle.remedy}"))
    if parallel.pp > 1:
        result += _stage_problems(config)
    if parallel.cp > 1:
        result += _context_problems(config)
    if config.float8.is_on:
        from torchllm.tools.config.float8_sizes import float8_layout_problems  # of no use to other runs

        result += float8_layout_problems(config)
    if not wrong_degrees:  # else the number of data ranks is unknown
        result += _data_rank_problems(config, parallel)
        if parallel.ep > 1 and config.model.experts:
            result += _expert_parallel_problems(config, parallel)
    return result


def rank_remedy(run: Run) -> str:
    """Tell the user how to set a number of ranks that is unknown."""
    return "set --gpus=N" if run.dry_run else "set NPROC (and NNODES), or --gpus=N for --check"


def resolve_degrees(
    parallel: Parallel, world_size: int | None, remedy: str = "set NPROC (and NNODES)"
) -> tuple[Parallel, list[ConfigError]]:
    """Return `parallel` with a degree of -1 filled in, and the problems of the degrees.

    `world_size` None: the number of ranks is unknown; then a -1 is a problem. remedy: tells the user how to set it.
    """
    degrees = {axis: getattr(parallel, axis) for axis in AXES}
    zeros = [axis for axis in AXES if degrees[axis] == 0]
    if zeros:
        message = "must be at least 1, or -1 for the ranks that the other degrees leave"
        return parallel, [config_error(f"parallel.{axis}", message) for axis in zeros]

    open_axes = [axis for axis in AXES if degrees[axis] == -1]
    if len(open_axes) == 2:
        return parallel, [config_error("parallel.dp_replicate", "only one of dp_replicate and dp_shard may be -1")]

    fixed = {axis: degree for axis, degree in degrees.items() if degree > 0}
    ranks = math.prod(fixed.values())
    product = " x ".join(f"{axis} {degree}" for axis, degree in fixed.items()) + f" = {ranks}"
    if open_axes:
        (axis,) = open_axes
        key = f"parallel.{axis}"
        if world_size is None:
            hint = f"{remedy}, or give a degree"
            return parallel, [config_error(key, f"is -1, but the number of ranks is unknown: {hint}")]
        if world_size % ranks:
            return parallel, [config_error(key, f"is -1, but {world_size} ranks are no multiple of {product}")]
        return replace(parallel, **{axis: world_size // ranks}), []

    if world_size is not None and ranks != world_size:
        largest = max(AXES, key=lambda axis: degrees[axis])
        return parallel, [
            config_error(f"parallel.{largest}", f"{product} ranks, but there are {world_size}; set one to match")
        ]
    return parallel, []


def _tensor_problems(config: Config) -> Iterator[ConfigError]:
    """Check that tp divides the model's sizes."""
    model = config.model
    parallel = config.parallel
    widths = []
    for path, of_kind in config.of_kinds.items():
        view = of_kind.model
        of_view = {**mixer(view).heads(view), "ffn": view.ffn}
        if view.expert_ffn and parallel.ep == 1:
            of_view["expert_ffn"] = view.expert_ffn
        widths += [(key_of_kind(config, path, name), width) for name, width in of_view.items()]
    for key, size in dict.fromkeys(widths):
        if size % parallel.tp:
            yield config_error("parallel.tp", f"{parallel.tp} does not divide {key} = {size}")
    if _has_rank_without_rows(model.vocab_rows, parallel.tp):
        yield config_error(
            "parallel.tp", f"{parallel.tp} leaves a rank without a row of model.vocab = {model.vocab_rows}"
        )

    length = config.training.sequence_length
    cuts_sequence = parallel.sequence_parallel or (parallel.pp > 1 and parallel.scatter_gather)
    if cuts_sequence and length % parallel.cp == 0 and (length // parallel.cp) % parallel.tp:
        divided = f"training.sequence_length = {length}"
        if parallel.cp > 1:
            divided += " / cp"
        hint = "" if parallel.sequence_parallel else "; or set parallel.scatter_gather = false"
        yield config_error("parallel.tp", f"{parallel.tp} does not divide {divided}{hint}")


def key_of_kind(config: Config, path: str, name: str) -> str:
    """Return the key that decides a setting of a kind's blocks: its own, or that of [model]. path: of `of_kinds`."""
    is_own = path != "model" and name in config.model.kinds.get(path.rpartition(".")[2], {})
    return f"{path}.{name}" if is_own else f"model.{name}"


def _has_rank_without_rows(rows: int, ranks: int) -> bool:
    """Whether torch, which gives the first ranks ceil(rows / ranks) rows each, leaves no rows for the last rank."""
    per_rank = math.ceil(rows / ranks)
    return per_rank * (ranks - 1) >= rows


def _stage_problems(config: Config) -> Iterator[ConfigError]:
    """Check the stages of a pipeline; pp is over 1."""
    model = config.model
    parallel = config.parallel
    kind = SCHEDULES[parallel.schedule]
    if not _has_stages_it_allows(parallel):
        yield config_error(
            "parallel.virtual_stages",
            f"{parallel.schedule} has {kind.most_stages} per rank, not {parallel.stages_per_rank}",
        )
        return
    stages = parallel.stages
    if stages > model.layers:
        yield config_error("parallel.pp", f"{stages} stages need a block each, but model.layers is {model.layers}")
    if parallel.split and (len(parallel.split) != stages or sum(parallel.split) != model.layers):
        yield config_error(
            "parallel.split",
            f"names {len(parallel.split)} stages of {sum(parallel.split)} blocks in all, but there are {stages} stages "
            f"({parallel.pp} ranks x {parallel.stages_per_rank}) and model.layers is {model.layers}",
        )


def _has_stages_it_allows(parallel: Parallel) -> bool:
    """Whether the pipeline schedule allows the number of stages per rank."""
    limit = SCHEDULES[parallel.schedule].most_stages
    return limit == math.inf or parallel.stages_per_rank == limit


def describe_batch(training: Training, parallel: Parallel) -> str:
    """Describe how ranks share the sequences of a step; the degrees of `parallel` are resolved."""
    accumulated = gradient_accumulation(training, parallel.data_ranks)
    return (
        f"global batch {training.global_batch_size} sequences = {parallel.data_ranks} data ranks x "
        f"{training.micro_batch_size} micro batch x {accumulated} accumulated"
    )


def micro_batch_problems(parallel: Parallel, count: int) -> Iterator[ConfigError]:
    """Check that the pipeline schedule accepts `count` micro batches per step."""
    key = "training.global_batch_size"
    needs = f"{parallel.schedule} on {parallel.pp} pipeline ranks needs"
    actual = f"a step has {count} (global_batch_size / micro_batch_size / data-parallel ranks)"
    if parallel.schedule == "1F1B" and count < parallel.pp:
        yield config_error(key, f"{needs} at least {parallel.pp} micro batches; {actual}")
    if parallel.schedule == "DualPipeV" and count < parallel.stages:
        yield config_error(key, f"{needs} at least {parallel.stages} micro batches; {actual}")
    if parallel.schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, count // parallel.pp)
        if count > parallel.pp and count % rounds:
            yield config_error(key, f"{needs} micro batches that divide into {rounds} equal rounds; {actual}")


def _context_problems(config: Config) -> Iterator[ConfigError]:
    """Check the limits of context parallelism; cp is over 1."""
    parallel = config.parallel
    length = config.training.sequence_length
    is_ring = parallel.cp_method == "ring"
    pieces = parallel.cp * 2 if is_ring else parallel.cp
    if length % pieces:
        why = " (two pieces per rank, so that causal work is even)" if is_ring else ""
        yield config_error("parallel.cp", f"training.sequence_length = {length} does not divide into {pieces}{why}")
    of_kinds = {path: of_kind.model for path, of_kind in config.of_kinds.items()}
    shared = dict.fromkeys(
        (key_of_kind(config, path, name), heads)
        for path, view in of_kinds.items()
        for name, heads in list(mixer(view).heads(view).items())[-1:]
    )
    most_ranks = math.gcd(parallel.cp, *[heads // parallel.tp for _, heads in shared])
    for key, of_all_ranks in shared:
        heads = of_all_ranks // parallel.tp
        if not is_ring and heads % parallel.cp:
            source = f" of {key}" * bool(config.model.pattern)
            if parallel.tp > 1:
                source = f" ({key} {of_all_ranks} / tp {parallel.tp})"
            yield config_error(
                "parallel.cp",
                f"ulysses gives each rank whole key-value heads, but {heads}{source} do not divide by {parallel.cp} "
                f'ranks: set it to {most_ranks}, or use parallel.cp_method = "ring"',
            )
    kernels = {key_of_kind(config, path, "attention"): view.attention for path, view in of_kinds.items()}
    for key, kernel in kernels.items():
        if is_ring and kernel in ("flash", "flex"):
            yield config_error(
                key,
                f"{kernel} cannot be merged block by block in a ring: use sdpa or eager, or "
                'parallel.cp_method = "ulysses"',
            )
    for path, view in of_kinds.items():
        if not mixer(view).context:
            mine = f"{path}.mixer = {view.mixer!r}"
            yield config_error("parallel.cp", f"{mine} cannot share a sequence with other ranks: set it to 1")
        window = view.window
        if is_ring and window_reaches_too_far(view, length, parallel.cp):
            most = length // (2 * (window - 1))
            or_fewer = f", or parallel.cp = {most} or less" if most > 1 else ""
            yield config_error(
                "parallel.cp_method",
                f"in a ring a window reaches back over one of {pieces} pieces of the sequence, {length // pieces} "
                f'tokens, and {path}.window = {window} is longer: use "ulysses"{or_fewer}',
            )


def window_reaches_too_far(view: Model, length: int, cp: int) -> bool:
    """Return whether the window of a block is too long for a ring: it reaches over more than a piece of a sequence."""
    piece = length // (2 * cp)
    return piece + 1 < view.window_within(length) < length


def _data_rank_problems(config: Config, parallel: Parallel) -> Iterator[ConfigError]:
    """Check that the data ranks can share the batch and the weights. The degrees of `parallel` are resolved."""
    rows = config.model.vocab_rows
    training = config.training
    is_uneven = rows % parallel.tp and not _has_rank_without_rows(rows, parallel.tp)
    if is_uneven and parallel.data_ranks * parallel.cp > 2:
        # torch 2.13 on rows that tp shares unevenly: FSDP over more than two ranks puts some in the wrong place
        # (initial weights, gathered tensors, checkpoints) without an error; and whole weights that share a buffer
        # with them are summed in another order on each tp rank, so that their copies drift apart.
        padding = -config.model.vocab % parallel.tp
        yield config_error(
            "model.vocab",
            f"{rows} rows are no multiple of tp {parallel.tp}: torch 2.13 misplaces uneven rows silently on more than "
            "two ranks of dp x cp; choose a tp that divides them, or in a new run set "
            f"model.vocab_padding = {padding}, rows that the softmax leaves out",
        )
    per_pass = training.micro_batch_size * parallel.data_ranks
    if training.global_batch_size % per_pass:
        yield config_error(
            "training.global_batch_size",
            f"{training.global_batch_size} is no multiple of micro_batch_size {training.micro_batch_size} x "
            f"{parallel.data_ranks} data-parallel ranks = {per_pass}",
        )
    if parallel.pp > 1 and _has_stages_it_allows(parallel):
        yield from micro_batch_problems(parallel, gradient_accumulation(training, parallel.data_ranks))


def _expert_parallel_problems(config: Config, parallel: Parallel) -> Iterator[ConfigError]:
    """Check that ep divides experts and ranks. The degrees of `parallel` are resolved."""
    ep = parallel.ep
    ranks = parallel.dp_shard * parallel.cp * parallel.tp
    if config.model.experts % ep:
        yield config_error("parallel.ep", f"{ep} does not divide model.experts = {config.model.experts}")
    if ranks % ep:
        product = f"dp_shard {parallel.dp_shard} x cp {parallel.cp} x tp {parallel.tp} = {ranks}"
        yield config_error("parallel.ep", f"{ep} does not divide {product}, whose ranks it borrows")
    if parallel.zero == 0:
        yield config_error(
            "parallel.zero_stage", "0 keeps all weights on every rank, but parallel.ep shares the experts: set 1"
        )
    for shared in {of.model.shared_experts * of.model.expert_width for of in config.of_kinds.values()}:
        if shared % parallel.tp:
            message = f"{parallel.tp} does not divide the width of the shared experts, {shared}"
            yield config_error("parallel.tp", message)
    part = config.training.sequence_length // parallel.cp
    if part % parallel.tp:
        yield config_error(
            "parallel.tp",
            f"{parallel.tp} does not divide the {part} tokens of a sequence, as ep needs",
        )


class Obstacle(NamedTuple):
    """The reason why torch cannot compile the blocks of a layout."""

    why: str
    remedy: str
    """the keys to change instead"""


BLOCK_MODES = ("full", "every_k", "selective", "selective_half")
"""values of recompute.mode whose recomputation is inside the graph of a compiled block, and covers its attention"""


def obstacle_to_compiled_blocks(pp: int, schedule: PipelineSchedule, cp: int, mode: RecomputeMode) -> Obstacle | None:
    """Return the reason why torch cannot compile the blocks of a layout; None if it can.

    pp, schedule and cp are keys of [parallel], mode is recompute.mode.
    """
    if pp > 1 and SCHEDULES[schedule].splits_backward:
        return Obstacle(
            f"{schedule} computes gradients of inputs and weights separately, which a compiled block cannot",
            "use Interleaved1F1B, or 1F1B with virtual_stages = 1",
        )
    if cp > 1 and mode in BLOCK_MODES:
        return Obstacle(
            f"with recompute.mode = {mode!r} and cp, whose attention stays outside the graphs, torch "
            "compiles none of a block",
            'use recompute.mode = "segment" (k = 1 is full) or "ffn"',
        )
    return None
