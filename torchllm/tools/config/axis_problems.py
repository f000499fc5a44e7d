"""The rules of pipelines, context parallelism and expert parallelism; `degrees.py` has the others."""

import math
from collections.abc import Iterator

from torchllm.config.schema import SCHEDULES, Config, Model, Parallel, gradient_accumulation
from torchllm.facts.parts.registry import mixer
from torchllm.tools.config.read import ConfigError, config_error, key_of_kind


def stage_problems(config: Config) -> Iterator[ConfigError]:
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


def batch_problems(config: Config, parallel: Parallel) -> Iterator[ConfigError]:
    """Check that the pipeline schedule accepts the batch. The degrees of `parallel` are resolved."""
    if _has_stages_it_allows(parallel):
        yield from micro_batch_problems(parallel, gradient_accumulation(config.training, parallel.data_ranks))


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


def context_problems(config: Config) -> Iterator[ConfigError]:
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


def expert_parallel_problems(config: Config, parallel: Parallel) -> Iterator[ConfigError]:
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
    tokens = config.training.micro_batch_size * part // parallel.tp
    if parallel.expert_chunks > tokens:
        yield config_error("parallel.expert_chunks", f"is over the {tokens} tokens of a micro batch that a rank has")
    if part % parallel.tp:
        yield config_error(
            "parallel.tp",
            f"{parallel.tp} does not divide the {part} tokens of a sequence, as ep needs",
        )
