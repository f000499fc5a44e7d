"""What is wrong with a config that takes more than one key to see; each problem names the key to change. No torch."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from torchllm.config.schema import SCHEDULES, Config, Parallel, data_ranks, gradient_accumulation


class Problem(NamedTuple):
    """Something wrong with a config: the key to blame ("parallel.tp") and what is wrong with it and what to do."""

    key: str
    message: str


def resolve_degrees(parallel: Parallel, world_size: int | None) -> tuple[dict[str, int], list[Problem]]:
    """The five degrees with any -1 filled in, outermost axis first.

    `world_size` None: the product of the degrees; then a -1 is a problem.
    """
    degrees = {axis: getattr(parallel, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    found = [
        Problem(f"parallel.{axis}", "must be at least 1, or -1 for what the other degrees leave")
        for axis in ("dp_replicate", "dp_shard")
        if degrees[axis] == 0
    ]
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    known = math.prod(degree for degree in degrees.values() if degree > 0)
    product = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 0)
    if found:
        return degrees, found
    if len(open_axes) == 2:
        found.append(Problem("parallel.dp_replicate", "only one of dp_replicate and dp_shard may be -1"))
    elif open_axes and world_size is None:
        found.append(
            Problem(
                f"parallel.{open_axes[0]}",
                "is -1, but the number of ranks is not known: set NPROC (and NNODES), or give a degree",
            )
        )
    elif open_axes and world_size is not None:
        if world_size % known:
            found.append(
                Problem(f"parallel.{open_axes[0]}", f"is -1, but {world_size} ranks do not divide by {product}")
            )
        else:
            degrees[open_axes[0]] = world_size // known
    elif world_size is not None and known != world_size:
        largest = max((axis for axis in degrees), key=lambda axis: degrees[axis])
        found.append(
            Problem(f"parallel.{largest}", f"{product} = {known} ranks, but there are {world_size}; set one to match")
        )
    return degrees, found


def problems(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Everything wrong with a config that takes more than one key to see."""
    model, training, parallel = config.model, config.training, config.parallel
    if not model.head_dim and model.hidden % model.heads:
        yield Problem("model.heads", f"{model.heads} heads do not divide hidden {model.hidden}; set model.head_dim")
    if model.heads % model.kv:
        yield Problem("model.kv_heads", f"{model.kv} key-value heads do not divide {model.heads} heads")
    if not model.features.learned_positions and model.head_width % 2:
        yield Problem("model.head_dim", f"rotary positions need an even head width, not {model.head_width}")
    if model.features.learned_positions and training.sequence_length > model.max_sequence_length:
        yield Problem(
            "training.sequence_length",
            f"{training.sequence_length} is over model.max_sequence_length {model.max_sequence_length}",
        )
    if model.rope_high_frequency_factor <= model.rope_low_frequency_factor:
        yield Problem("model.rope_high_frequency_factor", "must be over model.rope_low_frequency_factor")
    if model.attention == "flash" and config.data.document_mask:
        yield Problem(
            "model.attention", "flash has no document mask here: use sdpa or flex, or data.document_mask = false"
        )
    if config.compile.norm and model.features.norm == "layer":
        yield Problem("compile.norm", "LayerNorm is one kernel already; this fuses RMSNorm (family llama)")
    yield from _parallel_problems(config, world_size)
    yield from _data_problems(config)
    if config.schedule.warmup_steps > training.steps:
        yield Problem(
            "schedule.warmup_steps", f"{config.schedule.warmup_steps} is over training.steps {training.steps}"
        )
    if config.schedule.name == "wsd" and config.schedule.warmup_steps + config.schedule.decay_steps > training.steps:
        yield Problem("schedule.decay_steps", f"warmup and decay together are over training.steps {training.steps}")
    if config.recompute.k > model.layers:
        yield Problem("recompute.k", f"{config.recompute.k} is over model.layers {model.layers}")
    if config.recompute.k and config.recompute.mode not in ("segment", "every_k"):
        yield Problem("recompute.k", f"does nothing with recompute.mode = {config.recompute.mode!r}")
    if config.evaluate.interval and not config.data.validation_fraction:
        yield Problem("evaluate.interval", "nothing is held out: set data.validation_fraction")
    if config.metrics.profile_steps:
        steps = re.fullmatch(r"([1-9]\d*):(\d+)", config.metrics.profile_steps)
        if not steps or int(steps[1]) >= int(steps[2]):
            yield Problem("metrics.profile_steps", "must be FIRST:END, as 10:13 for steps 10, 11 and 12")
    if config.run.json and not config.run.dry_run:
        yield Problem("run.json", "does nothing without run.dry_run = true")
    if parallel.sequence_parallel and parallel.tp == 1:
        yield Problem("parallel.sequence_parallel", "needs parallel.tp over 1")


def _parallel_problems(config: Config, world_size: int | None) -> Iterator[Problem]:
    model, training, parallel = config.model, config.training, config.parallel
    degrees, found = resolve_degrees(parallel, world_size)
    yield from found
    if parallel.pp > 1:
        yield from _pipeline_problems(config, None if found else data_ranks(degrees))
    if parallel.cp > 1:
        yield from _context_problems(config)
    for key, size in (("heads", model.heads), ("kv_heads", model.kv), ("ffn", model.ffn)):
        if size % parallel.tp:
            yield Problem("parallel.tp", f"{parallel.tp} does not divide model.{key} = {size}")
    if -(-model.vocab // parallel.tp) * (parallel.tp - 1) >= model.vocab:
        yield Problem("parallel.tp", f"{parallel.tp} leaves a rank without a row of model.vocab = {model.vocab}")
    elif not found and model.vocab % parallel.tp and data_ranks(degrees) * parallel.cp > 2:
        # torch 2.13 on rows that tp shares unevenly: FSDP over more than two ranks puts some in the wrong place
        # (initial weights, gathered tensors, checkpoints) without an error; and whole weights that share a buffer
        # with them are summed in another order on each tp rank, so that their copies drift apart.
        yield Problem(
            "model.vocab",
            f"{model.vocab} does not divide by tp {parallel.tp}, which more than two ranks of dp x cp do not survive: "
            f"set it to {-(-model.vocab // parallel.tp) * parallel.tp} (rows over the tokenizer's are never used)",
        )
    cuts_sequence = parallel.sequence_parallel or (parallel.pp > 1 and parallel.scatter_gather)
    local = training.sequence_length // parallel.cp
    if cuts_sequence and local % parallel.tp and not training.sequence_length % parallel.cp:
        of = f"training.sequence_length = {training.sequence_length}" + (" / cp" if parallel.cp > 1 else "")
        hint = "" if parallel.sequence_parallel else "; or set parallel.scatter_gather = false"
        yield Problem("parallel.tp", f"{parallel.tp} does not divide {of}{hint}")
    if not found:
        per_pass = training.micro_batch_size * data_ranks(degrees)
        if training.global_batch_size % per_pass:
            yield Problem(
                "training.global_batch_size",
                f"{training.global_batch_size} does not divide by micro_batch_size {training.micro_batch_size} x "
                f"{data_ranks(degrees)} data-parallel ranks = {per_pass}",
            )


def _pipeline_problems(config: Config, data_parallel: int | None) -> Iterator[Problem]:
    """What pp over 1 asks; `data_parallel`: ranks that read different sequences, None if not known."""
    model, parallel = config.model, config.parallel
    kind, stages = SCHEDULES[parallel.schedule], parallel.stages
    if parallel.stages_per_rank != kind.most_stages < math.inf:
        yield Problem(
            "parallel.virtual_stages",
            f"{parallel.schedule} holds {kind.most_stages} on a rank, not {parallel.stages_per_rank}",
        )
        return
    if stages > model.layers:
        yield Problem("parallel.pp", f"{stages} stages need a block each, but model.layers is {model.layers}")
    if parallel.split and (len(parallel.split) != stages or sum(parallel.split) != model.layers):
        yield Problem(
            "parallel.split",
            f"names {len(parallel.split)} stages of {sum(parallel.split)} blocks in all, but there are {stages} stages "
            f"({parallel.pp} ranks x {parallel.stages_per_rank}) and model.layers is {model.layers}",
        )
    if kind.splits_backward and config.compile.block:
        yield Problem(
            "compile.block",
            f"{parallel.schedule} computes gradients of inputs and weights apart, which a compiled block cannot: "
            "set it to false, or use 1F1B or Interleaved1F1B",
        )
    if data_parallel:
        yield from _micro_batch_problems(config, gradient_accumulation(config.training, data_parallel))


def _micro_batch_problems(config: Config, count: int) -> Iterator[Problem]:
    """What a schedule asks of the number of micro batches a step."""
    parallel = config.parallel
    have = f"{parallel.schedule} on {parallel.pp} pipeline ranks needs"
    remedy = f"a step has {count} (global_batch_size / micro_batch_size / data-parallel ranks)"
    match parallel.schedule:
        case "1F1B" if count < parallel.pp:
            yield Problem("training.global_batch_size", f"{have} at least {parallel.pp} micro batches; {remedy}")
        case "DualPipeV" if count < parallel.stages:
            yield Problem("training.global_batch_size", f"{have} at least {parallel.stages} micro batches; {remedy}")
        case "Interleaved1F1B" | "InterleavedZeroBubble" if count > parallel.pp and count % max(
            1, count // parallel.pp
        ):
            yield Problem(
                "training.global_batch_size",
                f"{have} micro batches that divide into {count // parallel.pp} equal rounds; {remedy}",
            )


def _context_problems(config: Config) -> Iterator[Problem]:
    """What cp over 1 asks."""
    model, parallel, length = config.model, config.parallel, config.training.sequence_length
    pieces = parallel.cp * (2 if parallel.cp_method == "ring" else 1)
    if length % pieces:
        why = " (two pieces a rank, so that causal work is even)" if parallel.cp_method == "ring" else ""
        yield Problem("parallel.cp", f"training.sequence_length = {length} does not divide into {pieces}{why}")
    heads = model.kv // parallel.tp
    if parallel.cp_method == "ulysses" and heads % parallel.cp:
        of = f" (model.kv_heads {model.kv} / tp {parallel.tp})" if parallel.tp > 1 else ""
        yield Problem(
            "parallel.cp",
            f"ulysses gives each rank whole key-value heads, but {heads}{of} do not divide by {parallel.cp} ranks: set "
            f'it to {math.gcd(heads, parallel.cp)}, or use parallel.cp_method = "ring"',
        )
    if model.attention in ("flash", "flex") and parallel.cp_method == "ring":
        yield Problem(
            "model.attention",
            f"{model.attention} cannot be merged block by block in a ring: use sdpa or eager, or "
            'parallel.cp_method = "ulysses"',
        )
    if config.compile.block and config.recompute.mode in ("full", "every_k", "selective"):
        yield Problem(
            "compile.block",
            f"with recompute.mode = {config.recompute.mode!r} and cp, whose attention stays outside the graphs, torch "
            'compiles none of a block: use recompute.mode = "segment" (k = 1 is full) or "ffn"',
        )


def _data_problems(config: Config) -> Iterator[Problem]:
    if not config.data.sources:
        yield Problem("data.sources", "is empty: name at least one [[data.sources]]")
    for index, source in enumerate(config.data.sources):
        needs_path = source.kind not in ("stdlib", "synthetic")
        if needs_path and not source.path:
            yield Problem(f"data.sources.{index}.path", f"a source of kind {source.kind!r} needs a path")
        if not needs_path and source.path:
            yield Problem(f"data.sources.{index}.path", f"does nothing with kind {source.kind!r}")
