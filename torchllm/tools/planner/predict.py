"""Predict a layout's step: seconds by term, memory by purpose, MFU and HFU. No torch.

stage times (`stage`: compute, tensor- and context-parallel traffic, FSDP's exposed gathers)
  -> the schedule's order, simulated -> the tail of a step (reduction, optimizer, gathers) -> Prediction
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from torchllm.config import PipelineSchedule
from torchllm.facts.flops import flops_per_token, half_of_products, matrices, recompute_interval
from torchllm.facts.parts.registry import mixer
from torchllm.facts.stages import balanced_split, stage_of_rank, stages_of_ranks
from torchllm.tools.planner import comms
from torchllm.tools.planner.case import CP, REPLICATE, SHARD, Case
from torchllm.tools.planner.compute import memory_seconds, mixer_costs
from torchllm.tools.planner.experts import expert_parameters, expert_shards
from torchllm.tools.planner.memory import rank_memory
from torchllm.tools.planner.moments import of_rank
from torchllm.tools.planner.muon_time import muon_seconds
from torchllm.tools.planner.offload import (
    average_seconds,
    fits_on_host,
    host_update_seconds,
    inputs_on_host,
    state_bytes,
)
from torchllm.tools.planner.parameters import (
    StageSize,
    different_views,
    sizes_of_split,
    stage_parameters,
    sum_over_blocks,
    trained_share,
    view_of_each_block,
)
from torchllm.tools.planner.peak import Memory
from torchllm.tools.planner.rank import describe_rank
from torchllm.tools.planner.schedules import PUBLISHED
from torchllm.tools.planner.simulate import StageTimes, first_rounds, played, round_size, simulate_played
from torchllm.tools.planner.stage import (
    StageCost,
    boundary,
    costs_of_blocks,
    exposed,
    splits_backward,
    stage_cost,
    waits_for_sends,
)


class Prediction(NamedTuple):
    """The predicted cost of a step."""

    step: float
    """seconds"""
    terms: dict[str, float]
    """seconds of the rank that computes most, by cause; they sum to the step"""
    memory: Memory
    """memory of the rank that needs most"""
    mfu: float
    hfu: float
    on_host: float
    """bytes in the host's memory, of the rank that has most there"""
    has_room_on_host: bool
    fits: bool
    """in the memory of the GPU, and in the memory of the host"""


Pipeline = Callable[[Case, list[StageTimes], float], tuple[float, list[float]]]
"""the case, its stages' times, seconds from a stage to the next -> seconds of the schedule, of each rank's computing"""

SIMULATED_ROUNDS = 2
"""rounds of micro batches after which a schedule repeats itself"""


def pipeline_seconds(case: Case, stages: list[StageTimes], transfer: float) -> tuple[float, list[float]]:
    """Return the seconds from the first forward to the last gradient, and each rank's computing time.

    A schedule repeats itself after its start: with very many micro batches two smaller numbers are simulated, and the
    difference is extrapolated.
    """
    parallel, micro_batches = case.parallel, case.micro_batches
    stage_seconds = [sum(stage) for stage in stages]
    if parallel.pp == 1:
        step = micro_batches * sum(stage_seconds)
        return step, [step]
    work = []  # seconds of each rank for one micro batch
    for stages_of_rank in stages_of_ranks(parallel):
        work.append(sum(stage_seconds[stage] for stage in stages_of_rank))
    busy = [micro_batches * seconds for seconds in work]

    def seconds_of(count: int) -> float:
        order = Order(parallel.schedule, parallel.pp, parallel.stages_per_rank, count)
        return _seconds(order, tuple(stages), transfer)

    round = round_size(micro_batches, parallel.pp)
    shorter = first_rounds(micro_batches, parallel.pp, SIMULATED_ROUNDS)
    longer = shorter + round
    if micro_batches <= longer:
        return seconds_of(micro_batches), busy
    seconds_of_longer = seconds_of(longer)
    per_micro_batch = (seconds_of_longer - seconds_of(shorter)) / round
    per_micro_batch = max(per_micro_batch, *work)  # no rank computes a micro batch in less
    return seconds_of_longer + per_micro_batch * (micro_batches - longer), busy


class Order(NamedTuple):
    """The inputs of the order of a schedule's actions."""

    schedule: PipelineSchedule
    pp: int
    stages_per_rank: int
    micro_batches: int


@lru_cache(maxsize=1024)
def _seconds(order: Order, stages: tuple[StageTimes, ...], transfer: float) -> float:
    """Return the seconds of a schedule. Cached: many layouts differ only at the end of a step."""
    transfers = [transfer] * (len(stages) - 1)
    simulated = simulate_played(played(*order), stages, transfers)
    if order.schedule in PUBLISHED:
        return max(simulated.spans)
    return simulated.step


def predict(case: Case, pipeline: Pipeline = pipeline_seconds) -> Prediction:
    """Predict the whole step. `pipeline`: times the schedule; `search.bounds.at_least` is a bound, and fast."""
    sizes = stage_sizes(case)
    terms, busiest = step_terms(case, sizes, pipeline)
    step = sum(terms.values())
    memory = _largest_memory(case, sizes, busiest)
    length = case.training.sequence_length
    tokens = case.training.global_batch_size * length
    peak = case.ranks * case.hardware.peak.bfloat16
    model_flops = flops_per_token(case.model, length, trained=case.trained)
    mfu = tokens * model_flops / step / peak
    hfu = tokens * hardware_flops(case) / step / peak
    on_host = _states_on_host(case, sizes) + inputs_on_host(case, sizes, _ranks_with_most(case, busiest))
    has_room = fits_on_host(case, on_host)
    fits = memory.total <= case.hardware.memory and has_room
    return Prediction(step, terms, memory, mfu, hfu, on_host, has_room, fits)


def _largest_memory(case: Case, sizes: list[StageSize], busiest: int) -> Memory:
    """Return the memory of the pipeline rank that needs most."""
    largest = Memory()
    for rank in _ranks_with_most(case, busiest):
        memory = memory_of(case, sizes, rank)
        if memory.total > largest.total:
            largest = memory
    return largest


def _ranks_with_most(case: Case, busiest: int) -> list[int]:
    """Return the pipeline ranks that may need most memory: both ends, the second, and the busiest."""
    last = case.parallel.pp - 1
    return sorted({0, min(1, last), last, busiest})


def stage_sizes(case: Case) -> list[StageSize]:
    """Return the size of each pipeline stage, first to last."""
    split = balanced_split(case.model, case.parallel, case.training.sequence_length)
    return sizes_of_split(case.model, split, case.recompute)


class StepTerms(NamedTuple):
    """Where the time of a step goes."""

    seconds: dict[str, float]
    """of the rank that computes most, by cause; they sum to the step"""
    busiest: int
    """the rank that computes most"""


def step_terms(case: Case, sizes: list[StageSize], pipeline: Pipeline) -> StepTerms:
    """Return where the time of a step goes. sizes: `stage_sizes(case)`."""
    parallel, micro_batches = case.parallel, case.micro_batches
    blocks = costs_of_blocks(case)
    cost_of_size = {size: stage_cost(case, size, blocks) for size in dict.fromkeys(sizes)}
    costs = [cost_of_size[size] for size in sizes]
    transfer = 0.0 if waits_for_sends(case) else boundary(case)
    stage_times = [cost.times for cost in costs]
    step, busy = pipeline(case, stage_times, transfer)
    busiest = max(range(parallel.pp), key=lambda rank: busy[rank])

    terms = defaultdict[str, float](float)
    for stage in stages_of_ranks(parallel)[busiest]:
        for name, seconds in costs[stage].terms.items():
            terms[name] += micro_batches * seconds
    terms["bubble"] = step - busy[busiest]
    terms |= _longest_tail(case, sizes, cost_of_size)
    return StepTerms(dict(terms), busiest)


def _states_on_host(case: Case, sizes: Sequence[StageSize]) -> float:
    """Return the bytes of the optimizer's states on the host, of the rank that has most."""
    of_parameter = state_bytes(case)
    if not of_parameter:
        return 0.0
    ranks = [[sizes[stage] for stage in stages] for stages in stages_of_ranks(case.parallel)]
    return max(_updated_parameters(case, _sharded_rank(case, stages)) for stages in ranks) * of_parameter


def _longest_tail(case: Case, sizes: Sequence[StageSize], cost_of_size: dict[StageSize, StageCost]) -> dict[str, float]:
    """Return the terms of the pipeline rank whose `tail` takes longest. Ranks with the same stages have the same."""
    different_ranks: dict[tuple[StageSize, ...], None] = {}  # a set that keeps its order
    for stages in stages_of_ranks(case.parallel):
        sizes_of_rank = tuple(sizes[stage] for stage in stages)
        different_ranks[sizes_of_rank] = None
    tails = []
    for sizes_of_rank in different_ranks:
        costs = [cost_of_size[size] for size in sizes_of_rank]
        tails.append(tail(case, list(sizes_of_rank), costs))
    return max(tails, key=lambda terms: sum(terms.values()))


def hardware_flops(case: Case) -> float:
    """Return FLOPs per token with recomputation, as Narayanan et al. 2021 count: whole blocks, attention unmasked."""
    model, length = case.model, case.training.sequence_length
    recomputed = sum_over_blocks(view_of_each_block(model), [_recomputed_flops(view) for view in case.of_views])
    return flops_per_token(model, length, trained=case.trained) + recomputed


def _recomputed_flops(case: Case) -> float:
    """Return the FLOPs per token that a block's backward computes again, on average over like blocks. case: of a view.

    Products of n elements of weights have 2 n FLOPs per token; the two products of attention 4 n, n being the keys that
    a query sees times the width of all heads.
    """
    model = case.model
    sizes = matrices(model, layer=0)
    keys = model.window_within(case.training.sequence_length)
    width = mixer_costs(model, case.piece).heads * case.piece.tp * model.head_width
    core = 4 * width * keys if width else mixer(model).core_flops(model, keys)
    block = 2 * (sizes.attention + sizes.ffn) + core
    match case.recompute.mode:
        case "full" | "segment":
            return block
        case "every_k":
            return 1 / recompute_interval(case.recompute, model.layers) * block
        case "ffn":
            return 2 * sizes.ffn - 2 * sizes.down
        case "selective" if case.software.recomputes_attention_only:
            return core
        case "selective_half":
            return 2 * half_of_products(model, case.parallel.tp if case.software.saves_collectives else 1)
    return 0.0


def tail(case: Case, sizes: list[StageSize], costs: list[StageCost]) -> dict[str, float]:
    """Return the seconds after the last backward: the exchange between the data ranks, and the optimizer."""
    software = case.software
    share = software.constants.exposed
    shards = _sharded_rank(case, sizes)
    exchange = _data_exchange(case, shards)
    reduction, gather = exchange.reduction, exchange.gather
    if software.overlaps_reduction and not splits_backward(case.parallel):  # whose last gradients are those to reduce
        last_backward = 0.0
        for cost in costs:
            last_backward += cost.times.input_gradient + cost.times.weight_gradient
        reduction = exposed(reduction, last_backward, share)
    if software.overlaps_gather:
        first_forward = 0.0
        for cost in costs:
            first_forward += cost.times.forward
        gather = exposed(gather, first_forward, share)

    # The optimizer reads and writes its states, reads gradients and zeroes them, and writes the working copy.
    bytes_per_parameter = 2 * software.states + 2 * software.gradients + software.weights
    bytes_per_parameter += software.rounding
    updated = _updated_parameters(case, shards)
    update = memory_seconds(updated * bytes_per_parameter, case.hardware)
    if case.optimizer.offloads:
        update = host_update_seconds(case, updated)
    if case.optimizer.offloads_average:
        update += average_seconds(case, updated)
    views = tuple(view for size in sizes for view in size.views)
    return {
        "gradient reduction": reduction + exchange.last_reduction,
        "weight gather": gather,
        "optimizer": update + muon_seconds(case, views),
    }


class ShardedRank(NamedTuple):
    """The parameters of a pipeline rank, and the ranks that share them."""

    parameters: float
    """parameters on one tp rank"""
    common: float
    """part of these that is sharded over `over_shards`: without ep all"""
    routed: float
    """parameters of the experts that an ep rank has, which are sharded over `over_experts`; 0 without ep"""
    over_shards: comms.Group
    over_experts: comms.Group

    def gather(self, bytes_per_parameter: float) -> float:
        """Return the seconds of a gather of all parameters, or of a scatter of their gradients."""
        seconds = self.over_shards.gather(bytes_per_parameter * self.common)
        if self.routed:
            seconds += self.over_experts.gather(bytes_per_parameter * self.routed)
        return seconds


def _sharded_rank(case: Case, sizes: list[StageSize]) -> ShardedRank:
    """Return the parameters of a pipeline rank. sizes: of its stages."""
    model, software = case.model, case.software
    tp, ep = case.parallel.tp, case.piece.ep
    over_shards = case.group([SHARD, CP], software.one_card)
    parameters = sum(stage_parameters(model, size, tp) for size in sizes)
    if ep == 1:
        return ShardedRank(parameters, parameters, 0.0, over_shards, over_shards)
    of_views = [expert_parameters(view, 1) for view in different_views(model)]
    experts = sum(size.total(of_views) for size in sizes)
    common = parameters - experts / tp
    routed = experts / ep
    over_experts = expert_shards(case.mesh, ep, case.hardware, software)
    return ShardedRank(parameters, common, routed, over_shards, over_experts)


def _updated_parameters(case: Case, shards: ShardedRank) -> float:
    """Return the parameters that a rank updates."""
    owners = shards.over_shards.size if case.parallel.zero >= 1 else 1
    return shards.parameters / owners * trained_share(case.model)


class DataExchange(NamedTuple):
    """Seconds of the exchange of gradients and weights between data ranks at the end of a step."""

    reduction: float
    """the part that the last backward may hide"""
    last_reduction: float
    """the part that cannot be hidden"""
    gather: float


def _data_exchange(case: Case, shards: ShardedRank) -> DataExchange:
    """Return the exchange between the data ranks, by the ZeRO stage (Rajbhandari et al., arXiv 1910.02054, section 5).

    ZeRO 3 exchanges while blocks compute (`stage.sharded_weights`), but its first gather and its last reduction, both
    of the embedding, have nothing to hide behind. Under pp gradients are reduced once per step.
    """
    parallel, software = case.parallel, case.software
    zero_stage = parallel.zero if shards.over_shards.size > 1 else 0
    gradient_bytes = software.sent_gradients * shards.parameters
    gather = 0.0
    if zero_stage in (1, 2):
        gather = shards.gather(software.gathered)
    if zero_stage == 0 or (zero_stage == 1 and software.all_reduces):
        over_all = case.group([REPLICATE, SHARD, CP])
        return DataExchange(over_all.reduce(gradient_bytes), 0.0, gather)

    over_replicas = case.group([REPLICATE], software.one_card)
    reduction = over_replicas.reduce(gradient_bytes / shards.over_shards.size)
    if zero_stage == 1 or parallel.pp > 1:
        reduction += shards.gather(software.sent_gradients)
    last_reduction = 0.0
    if zero_stage == 3 and parallel.pp == 1:
        embedding = case.model.vocab * case.model.hidden / parallel.tp
        last_reduction = shards.over_shards.gather(software.sent_gradients * embedding)
        gather = shards.over_shards.gather(software.gathered * embedding)
    return DataExchange(reduction, last_reduction, gather)


def memory_of(case: Case, sizes: list[StageSize], rank: int) -> Memory:
    """Return the peak memory of one pipeline rank."""
    parallel = case.parallel
    moments = of_rank(parallel.schedule, parallel.pp, parallel.stages_per_rank, case.micro_batches, rank)
    stages = [sizes[stage] for stage in stage_of_rank(parallel, rank)]
    return rank_memory(describe_rank(case, stages), moments)
