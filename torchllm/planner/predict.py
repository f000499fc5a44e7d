"""Predict a layout's step: seconds by term, memory by purpose, MFU and HFU. No torch.

stage times (`stage`: compute, tensor- and context-parallel traffic, FSDP's exposed gathers)
  -> the schedule's order, simulated -> the tail of a step (reduction, optimizer, gathers) -> Prediction
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from torchllm.config import PipelineSchedule
from torchllm.planner.case import CP, REPLICATE, SHARD, Case
from torchllm.planner.compute import MEMORY_RATE
from torchllm.planner.experts import expert_parameters, expert_shards
from torchllm.planner.memory import Memory, StageSize, rank_memory, sizes_of_split, stage_parameters
from torchllm.planner.moments import of_rank
from torchllm.planner.muon_time import muon_seconds
from torchllm.planner.simulate import StageTimes, played, simulate_played
from torchllm.planner.stage import BlockCost, StageCost, boundary, cost_of_block, exposed, stage_cost, waits_for_sends
from torchllm.spec.flops import flops_per_token, half_of_products, matrices, recompute_interval
from torchllm.spec.schedules import PUBLISHED
from torchllm.spec.stages import balanced_split, stage_of_rank, stages_of_ranks


class Prediction(NamedTuple):
    """What a step is predicted to cost."""

    step: float
    """seconds"""
    terms: dict[str, float]
    """seconds of the rank that computes most, by cause; they sum to the step"""
    memory: Memory
    """memory of the rank that needs most"""
    mfu: float
    hfu: float
    fits: bool


Pipeline = Callable[[Case, list[StageTimes], float], tuple[float, list[float]]]
"""the case, its stages' times, seconds from a stage to the next -> seconds of the schedule, of each rank's computing"""


def pipeline_seconds(case: Case, stages: list[StageTimes], transfer: float) -> tuple[float, list[float]]:
    """Return the seconds from the first forward to the last gradient, and each rank's computing time.

    A schedule repeats itself after its start: with very many micro batches two smaller numbers are simulated, and the
    difference is extrapolated.
    """
    parallel, m = case.parallel, case.micro_batches
    if parallel.pp == 1:
        total = m * sum(sum(stage) for stage in stages)
        return total, [total]
    per_rank = [sum(sum(stages[stage]) for stage in mine) for mine in stages_of_ranks(parallel)]
    order, times = (parallel.schedule, parallel.pp, parallel.stages_per_rank), tuple(stages)
    round = m // max(1, m // parallel.pp)  # of an interleaved schedule, which repeats after it
    few = 2 * round + m % round
    if m <= few + round:
        step = _seconds(*order, m, times, transfer)
    else:
        one, other = (_seconds(*order, count, times, transfer) for count in (few, few + round))
        step = other + max((other - one) / round, *per_rank) * (m - few - round)
    return step, [m * each for each in per_rank]


@lru_cache(maxsize=1024)
def _seconds(
    schedule: PipelineSchedule, pp: int, v: int, count: int, stages: tuple[StageTimes, ...], transfer: float
) -> float:
    """Return the seconds of `count` micro batches. Cached: many layouts differ only at the end of a step."""
    order = played(schedule, pp, v, count)
    simulated = simulate_played(order, stages, [transfer] * (len(stages) - 1))
    return max(simulated.spans) if schedule in PUBLISHED else simulated.step


def predict(case: Case, pipeline: Pipeline = pipeline_seconds) -> Prediction:
    """Predict the whole step. `pipeline`: times the schedule; `search.bounds.at_least` is a bound, and fast."""
    sizes = stage_sizes(case)
    terms, busiest = step_terms(case, sizes, cost_of_block(case), pipeline)
    total = sum(terms.values())
    ranks = sorted({0, min(1, case.parallel.pp - 1), case.parallel.pp - 1, busiest})
    memory = max((memory_of(case, sizes, rank) for rank in ranks), key=lambda of: of.total)
    tokens = case.training.global_batch_size * case.training.sequence_length
    peak = case.ranks * case.hardware.peak.bfloat16
    mfu = tokens * flops_per_token(case.model, case.training.sequence_length, lora=case.lora) / total / peak
    hfu = tokens * hardware_flops(case) / total / peak
    return Prediction(total, terms, memory, mfu, hfu, memory.total <= case.hardware.memory)


def stage_sizes(case: Case) -> list[StageSize]:
    """Return what each pipeline stage has, first to last."""
    split = balanced_split(case.model, case.parallel, case.training.sequence_length)
    return sizes_of_split(case.model, split)


class StepTerms(NamedTuple):
    """Where the time of a step goes."""

    seconds: dict[str, float]
    """of the rank that computes most, by cause; they sum to the step"""
    busiest: int
    """the rank that computes most"""


def step_terms(case: Case, sizes: list[StageSize], block: BlockCost, pipeline: Pipeline) -> StepTerms:
    """Return where the time of a step goes. sizes: `stage_sizes(case)`; block: `cost_of_block(case)`."""
    parallel, m = case.parallel, case.micro_batches
    dense = cost_of_block(case.of_dense_blocks) if any(size.dense for size in sizes) else block
    cost_of_size = {size: stage_cost(case, size, block, dense) for size in dict.fromkeys(sizes)}
    costs = [cost_of_size[size] for size in sizes]
    transfer = 0.0 if waits_for_sends(case) else boundary(case)
    step, busy = pipeline(case, [cost.times for cost in costs], transfer)
    ranks = [[costs[stage] for stage in mine] for mine in stages_of_ranks(parallel)]
    busiest = max(range(parallel.pp), key=lambda rank: busy[rank])
    terms: dict[str, float] = {}
    for cost in ranks[busiest]:
        for name, seconds in cost.terms.items():
            terms[name] = terms.get(name, 0.0) + m * seconds
    terms["bubble"] = step - busy[busiest]
    alike = {tuple(sizes[stage] for stage in mine): rank for rank, mine in enumerate(stages_of_ranks(parallel))}
    tails = (tail(case, list(of), ranks[rank]) for of, rank in alike.items())
    for name, seconds in max(tails, key=lambda of: sum(of.values())).items():
        terms[name] = terms.get(name, 0.0) + seconds
    return StepTerms(terms, busiest)


def hardware_flops(case: Case) -> float:
    """Return FLOPs per token with recomputation, as Narayanan et al. 2021 count: whole blocks, attention unmasked."""
    model, length = case.model, case.training.sequence_length
    dense = model.dense_layers if model.experts else 0
    again = (model.layers - dense) * _recomputed_flops(case)
    if dense:
        again += dense * _recomputed_flops(case.of_dense_blocks)
    return flops_per_token(model, length, lora=case.lora) + again


def _recomputed_flops(case: Case) -> float:
    """Return the FLOPs per token that a block's backward computes again, on average; of a sparse block with experts."""
    model, usual = case.model, case.model.layers - 1
    sizes = matrices(model, usual)
    core = 4 * model.heads * model.head_width * model.window_within(case.training.sequence_length)
    share = {"none": 0.0, "full": 1.0, "segment": 1.0, "every_k": 1 / recompute_interval(case.recompute, model.layers)}
    mode = case.recompute.mode
    if mode == "ffn":
        return 2 * sizes.ffn - 2 * sizes.down
    if mode == "selective" and case.software.recomputes_attention_only:
        return core
    if mode == "selective_half":
        return 2 * half_of_products(model, usual)
    return share.get(mode, 0.0) * (2 * (sizes.attention + sizes.ffn) + core)


def tail(case: Case, sizes: list[StageSize], costs: list[StageCost]) -> dict[str, float]:
    """Return the seconds after the last backward: what the data ranks exchange, and the optimizer."""
    model, parallel, software, hardware = case.model, case.parallel, case.software, case.hardware
    constants = software.constants
    parameters = sum(stage_parameters(model, size, parallel.tp, software.vocab_parallel) for size in sizes)
    shards = parallel.dp_shard * parallel.cp
    over_shards, over_replicas = (case.group(dims, software.one_card) for dims in ([SHARD, CP], [REPLICATE]))
    zero = parallel.zero_stage if shards > 1 else 0
    reduced = gathered = 0.0
    routed = sum(size.blocks - size.dense for size in sizes) * expert_parameters(model, 1) * (case.piece.ep > 1)

    def gather(each: float) -> float:
        """Return the seconds of a gather or scatter of all parameters, `each` bytes; experts are on their own ranks."""
        common = over_shards.gather(each * (parameters - routed / parallel.tp))
        if not routed:
            return common
        return common + expert_shards(case.mesh, case.piece.ep, hardware, software).gather(
            each * routed / case.piece.ep
        )

    sent = software.reduced or software.gradients
    gradients = sent * parameters
    if zero == 0 or (zero == 1 and software.all_reduces):
        reduced = case.group([REPLICATE, SHARD, CP]).reduce(gradients)
        gathered = gather(software.gathered) if zero else 0.0
    elif zero == 1:
        reduced = gather(sent) + over_replicas.reduce(gradients / shards)
        gathered = gather(software.gathered)
    else:
        reduced = over_replicas.reduce(gradients / shards)
        gathered = gather(software.gathered) if zero == 2 else 0.0
        table = model.vocab * model.hidden / parallel.tp
        if parallel.pp > 1:
            reduced += gather(sent)
        elif zero == 3:  # the first gather and the last reduction have nothing to hide behind
            reduced += over_shards.gather(sent * table)
            gathered += over_shards.gather(software.gathered * table)
    if software.overlaps_reduction:
        last_backward = sum(cost.times.input_gradient + cost.times.weight_gradient for cost in costs)
        reduced = exposed(reduced, last_backward, constants.exposed)
    blocks = sum(size.blocks for size in sizes)
    local = parameters / (shards if zero >= 1 else 1)
    moved = local * (2 * software.states + 2 * software.gradients + software.weights)
    return {
        "gradient reduction": reduced,
        "weight gather": gathered,
        "optimizer": moved / (hardware.memory_bandwidth * MEMORY_RATE) + muon_seconds(case, blocks),
    }


def memory_of(case: Case, sizes: list[StageSize], rank: int) -> Memory:
    """Return the peak memory of one pipeline rank."""
    parallel = case.parallel
    moments = of_rank(parallel.schedule, parallel.pp, parallel.stages_per_rank, case.micro_batches, rank)
    mine = [sizes[stage] for stage in stage_of_rank(parallel, rank)]
    kernels, software = case.kernels, case.software
    return rank_memory(
        case.model, case.training, parallel, case.recompute, kernels, software, case.piece, mine, moments, case.lora
    )
