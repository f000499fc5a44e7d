"""The degrees of a layout: resolved, and checked against the sizes that they must divide."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torchllm.config.schema import (
    AXES,
    SCHEDULES,
    Config,
    Parallel,
    PipelineSchedule,
    RecomputeMode,
    Run,
    Training,
    gradient_accumulation,
)
from torchllm.facts.parts.part import found
from torchllm.facts.parts.registry import mixer
from torchllm.tools.config.read import ConfigError, config_error, key_of_kind

OF_AXES = "torchllm.tools.config.axis_problems"
"""of no use to a layout with dp and tp alone"""


def layout_problems(config: Config, world_size: int | None) -> list[ConfigError]:
    """Return the problems of the degrees, and of the sizes that they must divide, in each stage of the training.

    `world_size` None: the number of ranks is unknown, and the product of the degrees is used.
    """
    result = problems_of_one_size(config, world_size)
    if config.data.changes_size:
        result += found("torchllm.tools.config.rare_parts:stage_size_problems")(config, world_size, [*result])
    return result


def problems_of_one_size(config: Config, world_size: int | None) -> list[ConfigError]:
    """Return the `layout_problems` of a training whose steps all have the same size."""
    parallel, wrong_degrees = resolve_degrees(config.parallel, world_size, rank_remedy(config.run))
    result = [*wrong_degrees, *_tensor_problems(config)]
    obstacle = obstacle_to_compiled_blocks(parallel.pp, parallel.schedule, parallel.cp, config.recompute.mode)
    if config.compile.block is True and obstacle is not None:
        result.append(config_error("compile.block", f"{obstacle.why}: set it to false, or {obstacle.remedy}"))
    if parallel.pp > 1:
        result += found(f"{OF_AXES}:stage_problems")(config)
    if parallel.cp > 1:
        result += found(f"{OF_AXES}:context_problems")(config)
    if config.float8.is_on:
        from torchllm.tools.config.float8_sizes import float8_layout_problems  # of no use to other runs

        result += float8_layout_problems(config)
    if not wrong_degrees:  # else the number of data ranks is unknown
        result += _data_rank_problems(config, parallel)
        if parallel.ep > 1 and config.model.experts:
            result += found(f"{OF_AXES}:expert_parallel_problems")(config, parallel)
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
    if has_rank_without_rows(model.vocab_rows, parallel.tp):
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


def has_rank_without_rows(rows: int, ranks: int) -> bool:
    """Whether torch, which gives the first ranks ceil(rows / ranks) rows each, leaves no rows for the last rank."""
    per_rank = math.ceil(rows / ranks)
    return per_rank * (ranks - 1) >= rows


def describe_batch(training: Training, parallel: Parallel) -> str:
    """Describe how ranks share the sequences of a step; the degrees of `parallel` are resolved."""
    accumulated = gradient_accumulation(training, parallel.data_ranks)
    return (
        f"global batch {training.global_batch_size} sequences = {parallel.data_ranks} data ranks x "
        f"{training.micro_batch_size} micro batch x {accumulated} accumulated"
    )


def _data_rank_problems(config: Config, parallel: Parallel) -> Iterator[ConfigError]:
    """Check that the data ranks can share the batch and the weights. The degrees of `parallel` are resolved."""
    rows = config.model.vocab_rows
    training = config.training
    is_uneven = rows % parallel.tp and not has_rank_without_rows(rows, parallel.tp)
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
    if parallel.pp > 1:
        yield from found(f"{OF_AXES}:batch_problems")(config, parallel)


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
