"""One layout's step, before anybody runs it: seconds by term, memory by purpose, MFU and HFU. No torch.

stage times (compute, tensor- and context-parallel traffic, FSDP's exposed gathers)
  -> the schedule's order, simulated -> the tail of a step (reduction, optimizer, gathers) -> Prediction
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torchllm.config import Model, Parallel, Recompute, Training
from torchllm.metrics.flops import flops_per_token, matrices, recompute_interval
from torchllm.planner import comms
from torchllm.planner.cluster import Hardware
from torchllm.planner.compute import (
    Kernels,
    Piece,
    attention,
    block_backward,
    block_forward,
    elementwise,
    embedding_seconds,
    head_seconds,
    recomputed,
)
from torchllm.planner.memory import Memory, StageSize, rank_memory, stage_parameters
from torchllm.planner.moments import of_rank
from torchllm.planner.schedule import PUBLISHED
from torchllm.planner.simulate import StageTimes, played, simulate_played
from torchllm.planner.software import Software
from torchllm.planner.split import balanced_split, stage_of_rank


@dataclass(frozen=True)
class Case:
    """One layout of one model on one cluster, degrees resolved."""

    model: Model
    training: Training
    parallel: Parallel
    recompute: Recompute
    kernels: Kernels
    hardware: Hardware
    software: Software

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.parallel.dp_replicate * self.parallel.dp_shard

    @property
    def ranks(self) -> int:
        """All GPUs."""
        return self.data_ranks * self.parallel.pp * self.parallel.cp * self.parallel.tp

    @property
    def micro_batches(self) -> int:
        """Of a step, on one data-parallel rank."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.data_ranks)

    @property
    def mesh(self) -> tuple[int, ...]:
        """Sizes of pp, dp_replicate, dp_shard, cp, tp: the order in which ranks are numbered."""
        parallel = self.parallel
        return (parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp)


PP, REPLICATE, SHARD, CP, TP = range(5)


class Prediction(NamedTuple):
    """What a step costs."""

    step: float
    """seconds"""
    terms: dict[str, float]
    """seconds of the rank that computes most, by what they go to; they sum to the step"""
    memory: Memory
    """of the rank that needs most"""
    mfu: float
    hfu: float
    fits: bool


class StageCost(NamedTuple):
    """One micro batch through one stage."""

    times: StageTimes
    terms: dict[str, float]


Pipeline = Callable[[Case, list[StageTimes], float], tuple[float, list[float]]]
"""the case, its stages' times, seconds from a stage to the next -> seconds of the schedule, of each rank's computing"""


def pipeline_seconds(case: Case, stages: list[StageTimes], transfer: float) -> tuple[float, list[float]]:
    """From the first forward to the last gradient, and each rank's computing time.

    A schedule repeats itself after its start: of very many micro batches some are simulated, twice, and the difference
    is carried on.
    """
    parallel, m = case.parallel, case.micro_batches
    if parallel.pp == 1:
        total = m * sum(sum(stage) for stage in stages)
        return total, [total]
    per_rank = [sum(sum(stages[s]) for s in stage_of_rank(parallel, rank)) for rank in range(parallel.pp)]
    transfers = [transfer] * (parallel.stages - 1)

    def steps(count: int) -> float:
        order = played(parallel.schedule, parallel.pp, parallel.stages_per_rank, count)
        simulated = simulate_played(order, stages, transfers)
        return max(simulated.spans) if parallel.schedule in PUBLISHED else simulated.step

    round = m // max(1, m // parallel.pp)  # of an interleaved schedule, which repeats after it
    few = 2 * round + m % round
    if m <= few + round:
        step = steps(m)
    else:
        one, other = steps(few), steps(few + round)
        step = other + max((other - one) / round, *per_rank) * (m - few - round)
    return step, [m * each for each in per_rank]


def predict(case: Case, pipeline: Pipeline = pipeline_seconds) -> Prediction:
    """The whole step. `pipeline`: what its schedule takes; `search.at_least` is a bound, and a hundred times faster."""
    parallel, m = case.parallel, case.micro_batches
    split = balanced_split(case.model, parallel, case.training.sequence_length)
    last = parallel.stages - 1
    sizes = [StageSize(blocks, at == 0, at == last) for at, blocks in enumerate(split)]
    known: dict[StageSize, StageCost] = {}
    costs = [known.get(size) or known.setdefault(size, stage_cost(case, size)) for size in sizes]
    transfer = boundary(case)
    step, busy = pipeline(case, [cost.times for cost in costs], transfer)
    ranks = [[costs[stage] for stage in stage_of_rank(parallel, rank)] for rank in range(parallel.pp)]
    busiest = max(range(parallel.pp), key=lambda rank: busy[rank])
    terms: dict[str, float] = {}
    for cost in ranks[busiest]:
        for name, seconds in cost.terms.items():
            terms[name] = terms.get(name, 0.0) + m * seconds
    terms["bubble"] = step - busy[busiest]
    for name, seconds in max(
        (tail(case, [sizes[s] for s in stage_of_rank(parallel, r)], ranks[r]) for r in range(parallel.pp)),
        key=lambda t: sum(t.values()),
    ).items():
        terms[name] = terms.get(name, 0.0) + seconds
    total = sum(terms.values())
    memory = max(
        (memory_of(case, sizes, rank) for rank in sorted({0, min(1, parallel.pp - 1), parallel.pp - 1, busiest})),
        key=lambda of: of.total,
    )
    tokens = case.training.global_batch_size * case.training.sequence_length
    peak = case.ranks * case.hardware.peak.bfloat16
    mfu = tokens * flops_per_token(case.model, case.training.sequence_length) / total / peak
    hfu = tokens * hardware_flops(case) / total / peak
    return Prediction(total, terms, memory, mfu, hfu, memory.total <= case.hardware.memory)


def hardware_flops(case: Case) -> float:
    """Model FLOPs of a token and what is computed again, as the papers count: whole blocks, attention unmasked."""
    model, length = case.model, case.training.sequence_length
    sizes = matrices(model)
    core = 4 * model.heads * model.head_width * length
    block = 2 * (sizes.attention + sizes.ffn) + core
    share = {"none": 0.0, "full": 1.0, "segment": 1.0, "every_k": 1 / recompute_interval(case.recompute, model.layers)}
    again = share.get(case.recompute.mode, 0.0) * block
    if case.recompute.mode == "ffn":
        again = 2 * sizes.ffn - 2 * sizes.down
    if case.recompute.mode == "selective" and case.software.recomputes_attention_only:
        again = core
    return flops_per_token(model, length) + model.layers * again


def stage_cost(case: Case, size: StageSize) -> StageCost:
    """Seconds of one micro batch through a stage."""
    model, training, parallel, software, hardware = (
        case.model,
        case.training,
        case.parallel,
        case.software,
        case.hardware,
    )
    constants, kernels = software.constants, case.kernels
    spread = parallel.tp if parallel.sequence_parallel else 1
    tokens = training.micro_batch_size * training.sequence_length // parallel.cp
    piece = Piece(training.micro_batch_size, tokens, training.sequence_length, parallel.tp, spread)
    forward = block_forward(model, piece, kernels, software, hardware)
    inputs, weights = block_backward(model, piece, kernels, software, hardware)
    again = recomputed(
        model,
        case.recompute,
        forward,
        attention(model, piece, kernels, software, hardware, False),
        elementwise(model, piece, kernels, software, hardware, False),
        software,
    )
    launch = constants.launch
    f, i, w, r = (part.total(launch) for part in (forward, inputs, weights, again))
    # Tensor parallelism: two all-reduces a pass (or gathers and scatters of the same bytes), nothing to hide behind.
    over_tp = comms.group(case.mesh, [TP], hardware)
    hidden = 2.0 * tokens * model.hidden
    if parallel.sequence_parallel:
        of_tp = 2 * (over_tp.gather(hidden) + over_tp.gather(hidden))
    else:
        of_tp = 2 * over_tp.reduce(hidden)
    if parallel.tp > 1:
        of_tp += 2 * constants.wait
    tp_backward = exposed(of_tp, w, constants.exposed) if software.overlaps_tensor_parallel else of_tp
    tp_again = of_tp * {"full": 1.0, "segment": 1.0, "every_k": 1 / (case.recompute.k or 2), "ffn": 0.5}.get(
        case.recompute.mode, 0.0
    )
    # Context parallelism: keys and values round the ring behind attention, or all-to-alls that wait.
    over_cp = comms.group(case.mesh, [CP], hardware)
    cp_forward = cp_backward = 0.0
    if parallel.cp > 1:
        keys = 2 * 2.0 * tokens * model.kv * model.head_width / parallel.tp
        if parallel.cp_method == "ring":
            compute = attention(model, piece, kernels, software, hardware, False)
            behind = compute.attention / parallel.cp
            cp_forward = (parallel.cp - 1) * exposed(over_cp.send(keys), behind, constants.exposed)
            cp_backward = (parallel.cp - 1) * exposed(over_cp.send(2 * keys), 2.5 * behind, constants.exposed)
        else:
            sent = 2.0 * tokens * (2 * model.heads + 2 * model.kv) * model.head_width / parallel.tp
            cp_forward = cp_backward = over_cp.exchange(sent) + 3 * over_cp.latency
    # FSDP: a block's weights are gathered while the one before computes.
    shards = parallel.dp_shard * parallel.cp
    over_shards = comms.group(case.mesh, [SHARD, CP], hardware, software.one_card)
    block = stage_parameters(model, StageSize(1, False, False), parallel.tp, True)
    fsdp_f = fsdp_b = 0.0
    if shards > 1 and parallel.zero_stage >= 2:
        gather = over_shards.gather(software.gathered * block)
        scatter = over_shards.gather(software.gradients * block)
        if parallel.zero_stage == 3:
            fsdp_f = exposed(gather, f + of_tp, constants.exposed)
            fsdp_b = exposed(gather + scatter, i + w + r + tp_backward, constants.exposed)
        else:
            fsdp_b = exposed(scatter, i + w + r + tp_backward, constants.exposed)
    n = size.blocks
    terms = {
        "matmul": n * (forward.matmul + inputs.matmul + weights.matmul),
        "attention": n * (forward.attention + inputs.attention),
        "elementwise": n * (forward.elementwise + inputs.elementwise + weights.elementwise),
        "recompute": n * r,
        "tensor parallel": n * (of_tp + tp_backward + tp_again),
        "context parallel": n * (cp_forward + cp_backward),
        "fsdp": n * (fsdp_f + fsdp_b),
    }
    device = sum(forward[:3]) + sum(inputs[:3]) + sum(weights[:3])
    terms["launch"] = n * max(0.0, f + i + w - device)
    ends_f = ends_i = ends_w = 0.0
    if size.first:
        looked_up, scattered = embedding_seconds(model, piece, software, hardware)
        ends_f += looked_up.total(launch)
        ends_w += scattered.total(launch)
        terms["tensor parallel"] += of_tp / 2
        ends_f += of_tp / 2
    if size.last:
        three = head_seconds(model, piece, kernels, software, hardware)
        if software.whole_logits:
            ends_f += over_tp.gather(2.0 * tokens * model.vocab)
        ends_f += three[0].total(launch)
        ends_i += three[1].total(launch) + (of_tp / 2 if software.vocab_parallel else 0.0)
        ends_w += three[2].total(launch)
        terms["tensor parallel"] += of_tp / 2 if software.vocab_parallel else 0.0
    terms["ends"] = ends_f + ends_i + ends_w - (of_tp / 2 * (size.first + (size.last and software.vocab_parallel)))
    times = StageTimes(
        n * (f + of_tp + cp_forward + fsdp_f) + ends_f,
        n * (i + r + tp_backward + tp_again + cp_backward + fsdp_b) + ends_i,
        n * w + ends_w,
    )
    return StageCost(times, terms)


def exposed(sent: float, behind: float, share: float) -> float:
    """What is seen of a transfer that could hide behind a computation: the rest, and a share of what does hide."""
    return max(0.0, sent - behind) + share * min(sent, behind)


def boundary(case: Case) -> float:
    """Seconds of one micro batch's hidden states from a stage to the next."""
    parallel, training = case.parallel, case.training
    if parallel.pp == 1:
        return 0.0
    tokens = training.micro_batch_size * training.sequence_length / parallel.cp
    shared = parallel.tp if parallel.sequence_parallel or parallel.scatter_gather else 1
    sent = comms.group(case.mesh, [PP], case.hardware).send(2.0 * tokens * case.model.hidden / shared)
    if shared > 1 and not parallel.sequence_parallel:
        sent += comms.group(case.mesh, [TP], case.hardware).gather(2.0 * tokens * case.model.hidden)
    return sent


def tail(case: Case, sizes: list[StageSize], costs: list[StageCost]) -> dict[str, float]:
    """Seconds after the last backward: what the data ranks exchange, the optimizer, what nothing explains."""
    model, parallel, software, hardware = case.model, case.parallel, case.software, case.hardware
    constants = software.constants
    parameters = sum(stage_parameters(model, size, parallel.tp, software.vocab_parallel) for size in sizes)
    shards = parallel.dp_shard * parallel.cp
    over_shards, over_replicas = (
        comms.group(case.mesh, dims, hardware, software.one_card) for dims in ([SHARD, CP], [REPLICATE])
    )
    zero = parallel.zero_stage if shards > 1 else 0
    reduced = gathered = 0.0
    gradients, weights = software.gradients * parameters, software.gathered * parameters
    if zero == 0:
        everything = comms.group(case.mesh, [REPLICATE, SHARD, CP], hardware)
        reduced = everything.reduce(gradients)
    elif zero == 1:
        reduced = over_shards.gather(gradients) + over_replicas.reduce(gradients / shards)
        gathered = over_shards.gather(weights)
    else:
        reduced = over_replicas.reduce(gradients / shards)
        gathered = over_shards.gather(weights) if zero == 2 else 0.0
        table = model.vocab * model.hidden / parallel.tp
        if zero == 3:  # the first gather and the last reduction have nothing to hide behind
            reduced += over_shards.gather(software.gradients * table)
            gathered += over_shards.gather(software.gathered * table)
    if software.overlaps_reduction:
        last_backward = sum(cost.times.input_gradient + cost.times.weight_gradient for cost in costs)
        reduced = exposed(reduced, last_backward, constants.exposed)
    local = parameters / (shards if zero >= 1 else 1)
    moved = local * (2 * software.states + 2 * software.gradients + software.weights)
    return {
        "gradient reduction": reduced,
        "weight gather": gathered,
        "optimizer": moved / (hardware.memory_bandwidth * 0.85),
        "tail": constants.tail,
    }


def memory_of(case: Case, sizes: list[StageSize], rank: int) -> Memory:
    """Of one pipeline rank."""
    parallel, training = case.parallel, case.training
    mine = stage_of_rank(parallel, rank)
    spread = parallel.tp if parallel.sequence_parallel else 1
    tokens = training.micro_batch_size * training.sequence_length // parallel.cp
    piece = Piece(training.micro_batch_size, tokens, training.sequence_length, parallel.tp, spread)
    flying = of_rank(parallel.schedule, parallel.pp, parallel.stages_per_rank, case.micro_batches, rank)
    return rank_memory(
        case.model,
        training,
        parallel,
        case.recompute,
        case.kernels,
        case.software,
        piece,
        [sizes[stage] for stage in mine],
        flying,
    )
