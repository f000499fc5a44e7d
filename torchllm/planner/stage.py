"""Predict the seconds of one micro batch in a pipeline stage, forward and both gradients, by cause. No torch."""

from typing import NamedTuple

from torchllm.planner.case import CP, PP, SHARD, TP, Case
from torchllm.planner.compute import (
    Seconds,
    attention,
    block_backward,
    block_forward,
    elementwise,
    embedding_seconds,
    head_seconds,
    recomputed,
)
from torchllm.planner.experts import (
    exchange_seconds,
    expert_parameters,
    expert_shards,
    routed_backward,
    routed_forward,
    shared_seconds,
)
from torchllm.planner.frozen_weights import update_seconds
from torchllm.planner.memory import StageSize, stage_parameters
from torchllm.planner.simulate import StageTimes
from torchllm.spec.schedules import PUBLISHED


class StageCost(NamedTuple):
    """Time of one micro batch in one stage."""

    times: StageTimes
    terms: dict[str, float]
    """seconds by cause; they sum to the times"""


class Computed(NamedTuple):
    """Times of what a GPU computes on one micro batch in a block."""

    forward: Seconds
    inputs: Seconds
    """gradient of the block's input"""
    weights: Seconds
    """gradient of the block's weights"""
    core: Seconds
    """part of the forward: attention's core"""
    around: Seconds
    """part of the forward: elementwise work"""
    shared: float
    """part of the forward: seconds of the products of the shared experts"""


class KernelCounts(NamedTuple):
    """Number of kernels that the host starts for one micro batch."""

    forward: float
    input_gradient: float
    """what is recomputed included"""
    weight_gradient: float


class BlockCost(NamedTuple):
    """Time of one micro batch in one block, communication included."""

    times: StageTimes
    terms: dict[str, float]
    over_tp: float
    """seconds of one all-reduce of the hidden states over tp"""
    kernels: KernelCounts


def computed(case: Case) -> Computed:
    """Return what a GPU computes; it depends on case.piece and case.kernels, not on what is recomputed or sent."""
    of = case.model, case.piece, case.kernels, case.software, case.hardware
    inputs, weights = block_backward(*of)
    updates = update_seconds(case.model, case.lora, case.piece, case.hardware)
    routed = routed_forward(*of)
    routed_inputs, routed_weights = routed_backward(*of)
    return Computed(
        forward=block_forward(*of).plus(updates.forward).plus(routed),
        inputs=inputs.plus(updates.backward).plus(routed_inputs),
        weights=weights.plus(routed_weights),
        core=attention(*of, False),
        around=elementwise(*of, False).plus(routed._replace(matmul=0.0)),
        shared=shared_seconds(case.model, case.piece, case.hardware),
    )


def cost_of_block(case: Case, known: Computed | None = None) -> BlockCost:
    """Return the time of one micro batch in one block. known: `computed(case)`, if the caller has it."""
    forward, inputs, weights, core, around, shared = known or computed(case)
    constants = case.software.constants
    recomputed_part = recomputed(case.model, case.recompute, forward, core, around, case.software)
    again = recomputed_part.total(constants)
    f, i, w = (part.total(constants) for part in (forward, inputs, weights))
    tp, tp_backward, tp_again = tensor_parallel(case, forward.matmul, inputs.matmul, w)
    cp, cp_backward = context_parallel(case, core.attention)
    ep, ep_backward = expert_parallel(case, shared)
    fsdp, fsdp_backward = sharded_weights(case, f + tp + ep, i + w + again + tp_backward + ep_backward)
    device = [sum(parts) / constants.speed for parts in zip(forward[:3], inputs[:3], weights[:3], strict=True)]
    terms = {
        "matmul": device[0],
        "attention": device[1],
        "elementwise": device[2],
        "launch": f + i + w - sum(device),
        "recompute": again,
        "tensor parallel": tp + tp_backward + tp_again,
        "context parallel": cp + cp_backward,
        "expert parallel": ep + ep_backward,
        "fsdp": fsdp + fsdp_backward,
    }
    times = StageTimes(
        f + tp + cp + ep + fsdp, i + again + tp_backward + tp_again + cp_backward + ep_backward + fsdp_backward, w
    )
    kernels = KernelCounts(forward.kernels, inputs.kernels + recomputed_part.kernels, weights.kernels)
    return BlockCost(times, terms, tp / 2, kernels)


def stage_cost(
    case: Case, size: StageSize, known: BlockCost | None = None, known_dense: BlockCost | None = None
) -> StageCost:
    """Return the time of one micro batch in a stage.

    known: `cost_of_block(case)`, and known_dense: that of `case.of_dense_blocks`, if the caller has them.
    """
    block = known or cost_of_block(case)
    dense = (known_dense or cost_of_block(case.of_dense_blocks)) if size.dense else block
    usual = size.blocks - size.dense
    sends = boundary(case) if waits_for_sends(case) else 0.0  # forward and backward
    ends, ends_tp = end_times(case, size, block.over_tp)
    terms = {name: usual * seconds + size.dense * dense.terms[name] for name, seconds in block.terms.items()}
    terms["tensor parallel"] += ends_tp
    terms["pipeline parallel"] = 2 * sends
    terms["ends"] = sum(ends) - ends_tp
    times = StageTimes(
        usual * block.times.forward + size.dense * dense.times.forward + ends.forward + sends,
        usual * block.times.input_gradient + size.dense * dense.times.input_gradient + ends.input_gradient + sends,
        usual * block.times.weight_gradient + size.dense * dense.times.weight_gradient + ends.weight_gradient,
    )
    per_block = zip(block.kernels, dense.kernels, strict=True)
    kernels = KernelCounts(*(usual * sparse + size.dense * other for sparse, other in per_block))
    paced = paced_by_host(times, kernels, case.software.constants.host)
    terms["host"] = sum(paced) - sum(times)
    return StageCost(paced, terms)


def paced_by_host(times: StageTimes, kernels: KernelCounts, host: float) -> StageTimes:
    """Return the times of a stage whose device waits for kernels that the host has not started yet.

    The host runs ahead of the device, so that it decides only where it needs longer for all kernels of a pass than the
    device. Measured micro batches of the Ultra-Scale Playbook (Hugging Face 2025) have this floor: 16 blocks take 71 to
    84 ms on 4 and 8 tensor-parallel ranks, with 4,096 to 16,384 tokens.
    """
    return StageTimes(*(max(device, host * count) for device, count in zip(times, kernels, strict=True)))


def waits_for_sends(case: Case) -> bool:
    """Return whether a stage stands still while it sends; the published zero-bubble schedules send meanwhile."""
    return case.software.waits_for_sends and case.parallel.schedule not in PUBLISHED


def exposed(sent: float, behind: float, share: float) -> float:
    """Return the exposed time of a transfer that overlaps a computation: what is longer, and a share of the overlap."""
    return max(0.0, sent - behind) + share * min(sent, behind)


def tensor_parallel(
    case: Case, products: float, input_gradients: float, weight_gradients: float
) -> tuple[float, float, float]:
    """Return the seconds of a block's collectives over tp: forward, backward, recomputed.

    Two all-reduces of the hidden states per pass (Narayanan et al., arXiv 2104.04473, section 3.2), or with sequence
    parallelism gathers and scatters of the same bytes (Korthikanti et al., arXiv 2205.05198, section 4.2.2). Nothing
    hides them, but the backward's where a framework computes the weights' gradients meanwhile, and both passes' where
    it computes products in pieces. Norms of q and k over the whole width all-reduce a float32 per token each.

    products, input_gradients, weight_gradients: seconds of the block's products in the forward and of its gradients.
    """
    if case.parallel.tp == 1:
        return 0.0, 0.0, 0.0
    constants, over_tp = case.software.constants, case.group([TP])
    hidden = 2.0 * case.piece.tokens * case.model.hidden
    one = 2 * over_tp.gather(hidden) if case.parallel.sequence_parallel else over_tp.reduce(hidden)
    each = summed_parts(case) * (one + constants.wait)
    if case.model.qk_norm == "width":
        each += 2 * (over_tp.reduce(4.0 * case.piece.tokens) + constants.wait)
    back = each
    if case.software.gate_apart and case.model.features.gated_ffn and not case.parallel.sequence_parallel:
        back += one + constants.wait
    if case.parallel.sequence_parallel and not case.software.keeps_gathered:
        back += summed_parts(case) * (over_tp.gather(hidden) + constants.wait)  # the inputs of the products, once more
    again = {"full": 1.0, "segment": 1.0, "every_k": 1 / (case.recompute.k or 2), "ffn": 0.5}
    forward, backward = each, back
    if case.software.overlaps_products:
        forward = exposed(each, products, constants.exposed)
        backward = exposed(back, input_gradients + weight_gradients, constants.exposed)
    elif case.software.overlaps_tensor_parallel:
        backward = exposed(back, weight_gradients, constants.exposed)
    return forward, backward, forward * again.get(case.recompute.mode, 0.0)


def summed_parts(case: Case) -> float:
    """Return how often a block's forward sums hidden states over tp: after attention and the feed-forward layer.

    With ep a rank routes its own part of the sequence: sequence parallelism leaves it that part, else the results are
    gathered, which is half of a sum. Shared experts are cut by tp, and sum.
    """
    if case.piece.ep == 1 or case.model.shared_experts:
        return 2.0
    return 1.0 if case.parallel.sequence_parallel else 1.5


def expert_parallel(case: Case, shared: float) -> tuple[float, float]:
    """Return the seconds of a block's all-to-alls over ep, forward and backward, recomputation included.

    There are two per pass: rows to their experts, behind which the shared experts compute (`shared` seconds), and
    results back, which nothing hides. Both wait for the slowest rank, as the host waits for the number of rows.
    """
    one = exchange_seconds(case.model, case.piece, case.mesh, case.hardware, case.software.sends_tokens_once)
    if not one:
        return 0.0, 0.0
    constants = case.software.constants
    waits = 3 * constants.wait
    forward = exposed(one, shared, constants.exposed) + one + waits
    backward = exposed(one, 2 * shared, constants.exposed) + one + 2 * constants.wait
    again = {"full": 1.0, "segment": 1.0, "every_k": 1 / (case.recompute.k or 2), "ffn": 1.0}
    return forward, backward + forward * again.get(case.recompute.mode, 0.0)


def context_parallel(case: Case, core: float) -> tuple[float, float]:
    """Return the seconds of a block's exchanges over cp, forward and backward; `core`: seconds of its attention.

    Ring: keys and values go round while attention computes on those before; their gradients with them in the backward.
    Ulysses: all-to-alls of queries, keys, values and results, which wait.
    """
    model, parallel = case.model, case.parallel
    if parallel.cp == 1:
        return 0.0, 0.0
    over_cp, tokens, share = (
        case.group([CP]),
        case.piece.tokens,
        case.software.constants.exposed,
    )
    if parallel.cp_method == "ulysses":
        sent = 2.0 * tokens * 2 * (model.heads + model.kv) * model.head_width / parallel.tp
        each = over_cp.exchange(sent) + 3 * over_cp.latency
        return each, each
    keys = 2.0 * tokens * 2 * model.kv * model.head_width / parallel.tp
    turns, behind = parallel.cp - 1, core / parallel.cp
    return (
        turns * exposed(over_cp.send(keys), behind, share),
        turns * exposed(over_cp.send(2 * keys), 2.5 * behind, share),
    )


def sharded_weights(case: Case, forward: float, backward: float) -> tuple[float, float]:
    """Return the exposed seconds of FSDP's gathers and scatters of one block, forward and backward.

    Under pp gradients are reduced once per step (`predict.tail`).
    """
    parallel, software = case.parallel, case.software
    if parallel.dp_shard * parallel.cp == 1 or parallel.zero_stage < 2:
        return 0.0, 0.0
    over_shards = case.group([SHARD, CP], software.one_card)
    block = stage_parameters(case.model, StageSize(1, False, False), parallel.tp, True)
    gather, scatter = over_shards.gather(software.gathered * block), over_shards.gather(software.sent_gradients * block)
    if case.piece.ep > 1:
        block -= expert_parameters(case.model, parallel.tp)
        routed = expert_parameters(case.model, case.piece.ep)
        over_experts = expert_shards(case.mesh, case.piece.ep, case.hardware, software)
        gather, scatter = (
            over_shards.gather(each * block) + over_experts.gather(each * routed)
            for each in (software.gathered, software.sent_gradients)
        )
    if parallel.pp > 1:
        scatter = 0.0
    share = software.constants.exposed
    if parallel.zero_stage == 2:
        return 0.0, exposed(scatter, backward, share)
    return exposed(gather, forward, share), exposed(gather + scatter, backward, share)


def end_times(case: Case, size: StageSize, over_tp: float) -> tuple[StageTimes, float]:
    """Return the seconds of the embedding, the head and the loss, and how many of them are tensor parallelism's.

    over_tp: seconds of one all-reduce of the hidden states: of the embedding's rows that other ranks have, and of the
    head's input gradient.
    """
    model, piece, kernels, software, hardware = case.model, case.piece, case.kernels, case.software, case.hardware
    constants = software.constants
    forward = inputs = weights = sent = 0.0
    trains = software.trained == 1  # LoRA freezes both ends
    if size.first:
        looked_up, scattered = embedding_seconds(model, piece, software, hardware)
        forward += looked_up.total(constants) + over_tp
        weights += scattered.total(constants) * trains
        sent += over_tp
    if size.last:
        of_head = head_seconds(model, piece, kernels, software, hardware)
        forward += of_head[0].total(constants)
        inputs += of_head[1].total(constants)
        weights += of_head[2].total(constants) * trains
        if software.vocab_parallel:
            inputs += over_tp
            sent += over_tp
        if software.whole_logits:
            forward += case.group([TP]).gather(2.0 * piece.tokens * model.vocab)
    return StageTimes(forward, inputs, weights), sent


def boundary(case: Case) -> float:
    """Return the seconds from the end of one micro batch in a stage to its beginning in the next.

    Unless a stage stands still for it (`waits_for_sends`), what a schedule hides of it is simulated.
    """
    parallel = case.parallel
    if parallel.pp == 1:
        return 0.0
    hidden = 2.0 * case.piece.tokens * case.model.hidden
    shared = parallel.tp if parallel.sequence_parallel or parallel.scatter_gather else 1
    sent = case.group([PP]).send(hidden / shared)
    if shared > 1 and not parallel.sequence_parallel:
        sent += case.group([TP]).gather(hidden)
    return sent + case.software.constants.message
