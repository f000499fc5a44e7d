"""Predict the seconds of one micro batch in a pipeline stage, forward and both gradients, by cause. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

from torchllm.config import SCHEDULES, Parallel, Recompute
from torchllm.facts.parts.costs import NOTHING, PerPass
from torchllm.facts.parts.registry import feed_forward
from torchllm.tools.planner.case import CP, PP, SHARD, TP, Case
from torchllm.tools.planner.compute import (
    DEFAULT_INTERVAL,
    ELEMENT_BYTES,
    FLASH_BACKWARD_OPERATIONS,
    FLOAT32_BYTES,
    NO_TIME,
    Seconds,
    attention,
    block_backward,
    block_forward,
    dense_width,
    elementwise,
    embedding_seconds,
    head_seconds,
    mixer_costs,
    recomputed,
    whole_matrices,
)
from torchllm.tools.planner.experts import (
    exchange_seconds,
    expert_parameters,
    expert_shards,
    routed_backward,
    routed_forward,
    shared_seconds,
)
from torchllm.tools.planner.frozen_weights import update_seconds
from torchllm.tools.planner.offload import exposed_copy_seconds
from torchllm.tools.planner.parameters import StageSize, block_parameters, trained_share
from torchllm.tools.planner.schedules import PUBLISHED
from torchllm.tools.planner.simulate import StageTimes


class StageCost(NamedTuple):
    """Time of one micro batch in one stage."""

    times: StageTimes
    terms: dict[str, float]
    """seconds by cause; they sum to the times"""


class Computed(NamedTuple):
    """Times of a GPU's computation of one micro batch in a block."""

    forward: Seconds
    inputs: Seconds
    """gradient of the block's input"""
    weights: Seconds
    """gradient of the block's weights"""
    core: Seconds
    """part of the forward: attention's core"""
    elementwise: Seconds
    """part of the forward: elementwise work"""
    shared: float
    """part of the forward: seconds of the products of the shared experts"""
    routed: PerPass
    """seconds of the products of router and routed experts, gradients of weights included"""


class KernelCounts(NamedTuple):
    """Number of kernels that the host starts for one micro batch."""

    forward: float
    input_gradient: float
    """including recomputation"""
    weight_gradient: float


class BlockCost(NamedTuple):
    """Time of one micro batch in one block, communication included."""

    times: StageTimes
    terms: dict[str, float]
    over_tp: float
    """seconds of one all-reduce of the hidden states over tp"""
    kernels: KernelCounts


class PassSeconds(NamedTuple):
    """Seconds that a block's forward and its backward wait for other GPUs."""

    forward: float
    backward: float
    recomputed: float = 0.0
    """seconds of the collectives that recomputation repeats, unless they are part of `backward`"""

    @property
    def total(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward + self.recomputed


NO_WAIT = PassSeconds(0.0, 0.0)
"""where a rank is alone in its group"""


def computed(case: Case) -> Computed:
    """Return the time of a GPU's computation; depends on case.piece and case.kernels, not on recompute or transfers."""
    model, piece, kernels = case.model, case.piece, case.kernels
    software, hardware = case.software, case.hardware
    dense_forward = block_forward(model, piece, kernels, software, hardware)
    dense_gradients = block_backward(model, piece, kernels, software, hardware)
    updates = update_seconds(model, case.trained, piece, hardware)
    routed = routed_forward(model, piece, kernels, software, hardware)
    routed_gradients = routed_backward(model, piece, kernels, software, hardware)
    core = attention(model, piece, kernels, software, hardware, backward=False)
    elementwise_work = elementwise(model, piece, kernels, software, hardware, backward=False)
    routed_elementwise_work = routed._replace(matmul=0.0)
    return Computed(
        forward=dense_forward.plus(updates.forward).plus(routed),
        inputs=dense_gradients.inputs.plus(updates.backward).plus(routed_gradients.inputs),
        weights=NO_TIME.plus(dense_gradients.weights.plus(routed_gradients.weights), trained_share(model, "layers.")),
        core=core,
        elementwise=elementwise_work.plus(routed_elementwise_work),
        shared=shared_seconds(model, piece, hardware),
        routed=PerPass(routed.matmul, routed_gradients.inputs.matmul + routed_gradients.weights.matmul),
    )


def cost_of_block(case: Case, work: Computed | None = None) -> BlockCost:
    """Return the time of one micro batch in one block. work: `computed(case)`, if the caller has it."""
    work = work or computed(case)
    constants = case.software.constants
    parts = work.forward, work.core, work.elementwise
    repeated_work = recomputed(case.model, case.recompute, *parts, case.software, case.parallel.tp)
    forward = work.forward.total(constants)
    inputs = work.inputs.total(constants)
    weights = work.weights.total(constants)
    repeated = repeated_work.total(constants)

    tp = tensor_parallel(case, work.forward.matmul, work.inputs.matmul, weights)
    cp = context_parallel(case, work.core.attention)
    ep = expert_parallel(case, work.shared, work.routed)
    forward_without_fsdp = forward + tp.forward + ep.forward
    backward_without_fsdp = inputs + repeated + tp.backward + ep.backward
    if not splits_backward(case.parallel):
        backward_without_fsdp += weights
    fsdp = sharded_weights(case, forward_without_fsdp, backward_without_fsdp)
    copies = PassSeconds(
        forward=exposed_copy_seconds(case, forward_without_fsdp),
        backward=exposed_copy_seconds(case, backward_without_fsdp),
    )

    device = work.forward.plus(work.inputs).plus(work.weights)
    matmul_seconds = device.matmul / constants.speed
    attention_seconds = device.attention / constants.speed
    elementwise_seconds = device.elementwise / constants.speed
    device_seconds = matmul_seconds + attention_seconds + elementwise_seconds
    terms = {
        "matmul": matmul_seconds,
        "attention": attention_seconds,
        "elementwise": elementwise_seconds,
        "launch": forward + inputs + weights - device_seconds,
        "recompute": repeated + copies.total,
        "tensor parallel": tp.total,
        "context parallel": cp.total,
        "expert parallel": ep.total,
        "fsdp": fsdp.total,
    }
    forward_time = forward
    input_gradient_time = inputs + repeated
    for waiting in (tp, cp, ep, fsdp, copies):
        forward_time += waiting.forward
        input_gradient_time += waiting.backward
        input_gradient_time += waiting.recomputed
    kernels = KernelCounts(
        forward=work.forward.kernels,
        input_gradient=work.inputs.kernels + repeated_work.kernels,
        weight_gradient=work.weights.kernels,
    )
    times = StageTimes(forward_time, input_gradient_time, weights)
    return BlockCost(times, terms, over_tp=tp.forward / 2, kernels=kernels)


def costs_of_blocks(case: Case) -> tuple[BlockCost, ...]:
    """Return the time of one micro batch in a block of each of `case.of_views`."""
    return tuple(cost_of_block(of_view) for of_view in case.of_views)


def stage_cost(case: Case, size: StageSize, blocks: Sequence[BlockCost] | None = None) -> StageCost:
    """Return the time of one micro batch in a stage. blocks: `costs_of_blocks(case)`, if the caller has them."""
    blocks = blocks or costs_of_blocks(case)
    sends = boundary(case) if waits_for_sends(case) else 0.0  # of the forward, and as much of the backward
    ends = end_times(case, size, blocks[-1].over_tp)

    terms = {name: size.total([block.terms[name] for block in blocks]) for name in blocks[-1].terms}
    terms["tensor parallel"] += ends.tensor_parallel
    terms["pipeline parallel"] = 2 * sends
    terms["ends"] = sum(ends.times) - ends.tensor_parallel

    forward = size.total([block.times.forward for block in blocks])
    inputs = size.total([block.times.input_gradient for block in blocks])
    weights = size.total([block.times.weight_gradient for block in blocks])
    forward += ends.times.forward
    inputs += ends.times.input_gradient
    weights += ends.times.weight_gradient
    times = StageTimes(forward + sends, inputs + sends, weights)

    kernels = KernelCounts(
        forward=size.total([block.kernels.forward for block in blocks]),
        input_gradient=size.total([block.kernels.input_gradient for block in blocks]),
        weight_gradient=size.total([block.kernels.weight_gradient for block in blocks]),
    )
    host = 0.0 if case.kernels.graphs else case.software.constants.host  # a graph is one launch
    paced = paced_by_host(times, kernels, host, splits_backward(case.parallel))
    terms["host"] = sum(paced) - sum(times)
    return StageCost(paced, terms)


def splits_backward(parallel: Parallel) -> bool:
    """Return whether a stage computes the gradients of its weights separately from the gradients of its input."""
    schedule = parallel.schedule
    return parallel.pp > 1 and (schedule in PUBLISHED or SCHEDULES[schedule].splits_backward)


def paced_by_host(times: StageTimes, kernels: KernelCounts, host: float, splits: bool) -> StageTimes:
    """Return the times of a stage whose device waits for kernels that the host has not started yet.

    The host runs ahead of the device, so that it decides only where it needs longer for all kernels of a pass than the
    device. Measured micro batches of the Ultra-Scale Playbook (Hugging Face 2025) have this floor: 16 blocks take 71 to
    84 ms on 4 and 8 tensor-parallel ranks, with 4,096 to 16,384 tokens.

    host: seconds per kernel. splits: whether the backward is two passes, `splits_backward`.
    """
    forward = max(times.forward, host * kernels.forward)
    if not splits:
        backward = host * (kernels.input_gradient + kernels.weight_gradient)
        return StageTimes(forward, max(times.input_gradient, backward - times.weight_gradient), times.weight_gradient)
    input_gradient = max(times.input_gradient, host * kernels.input_gradient)
    weight_gradient = max(times.weight_gradient, host * kernels.weight_gradient)
    return StageTimes(forward, input_gradient, weight_gradient)


def waits_for_sends(case: Case) -> bool:
    """Return whether a stage stands still while it sends; the published zero-bubble schedules send meanwhile."""
    return case.software.waits_for_sends and case.parallel.schedule not in PUBLISHED


def exposed(sent: float, behind: float, share: float) -> float:
    """Return the exposed time of a transfer that overlaps a computation: the excess, plus a share of the overlap."""
    return max(0.0, sent - behind) + share * min(sent, behind)


def repeated_share(recompute: Recompute, of_ffn: float) -> float:
    """Return the share of a forward's collectives that the backward repeats, on average over the blocks.

    of_ffn: share of them that belongs to the feed-forward layer.
    """
    match recompute.mode:
        case "full" | "segment":
            return 1.0
        case "every_k":
            return 1 / (recompute.k or DEFAULT_INTERVAL)
        case "ffn":
            return of_ffn
    return 0.0


def tensor_parallel(case: Case, products: float, input_gradients: float, weight_gradients: float) -> PassSeconds:
    """Return the seconds of a block's collectives over tp: forward, backward, recomputed.

    Two all-reduces of the hidden states per pass (Narayanan et al., arXiv 2104.04473, section 3.2), or with sequence
    parallelism gathers and scatters of the same bytes (Korthikanti et al., arXiv 2205.05198, section 4.2.2). Nothing
    hides them, but the backward's where a framework computes the weights' gradients meanwhile, and both passes' where
    it computes products in pieces. Norms of q and k over the whole width all-reduce a float32 per token each. Matrices
    that every rank has whole get gradients from each rank's part of the sequence: they are all-reduced.

    products, input_gradients, weight_gradients: seconds of the block's products in the forward and of its gradients.
    """
    parallel, software = case.parallel, case.software.under(case.parallel, case.recompute)
    if parallel.tp == 1:
        return NO_WAIT
    constants = software.constants
    over_tp = case.group([TP])
    has_sp = parallel.sequence_parallel
    parts = summed_parts(case)
    hidden = ELEMENT_BYTES * case.piece.tokens * case.model.hidden
    gathering = over_tp.gather(hidden)
    summing = 2 * gathering if has_sp else over_tp.reduce(hidden)
    latents = mixer_costs(case.model, case.piece).latents
    before_heads = ELEMENT_BYTES * case.piece.tokens * latents if latents else hidden
    others = over_tp.gather(before_heads) - gathering if has_sp else over_tp.reduce(before_heads) - summing

    forward = parts * (summing + constants.wait) + others * has_sp
    if case.model.qk_norm == "width":
        norm_sum = over_tp.reduce(FLOAT32_BYTES * case.piece.tokens)
        forward += 2 * (norm_sum + constants.wait)
    backward = forward + others * (not has_sp)
    if software.gate_apart and case.model.features.gated_ffn and not has_sp:
        backward += summing + constants.wait
    if has_sp and software.regathers:
        of_ffn = (gathering + constants.wait) * (1 - repeated_share(case.recompute, of_ffn=1.0))
        backward += (gathering + others + constants.wait) * (1 - repeated_share(case.recompute, of_ffn=0.0))
        gathers_mixture = software.keeps_gathered and case.piece.ep == 1  # a recomputation has no choice
        backward += of_ffn * (dense_width(case.model) > 0 or gathers_mixture)
    elif has_sp and not software.keeps_gathered:  # the inputs of the products, once more
        backward += parts * (gathering + constants.wait)
    if has_sp and (whole := whole_matrices(case.model)):
        backward += over_tp.reduce(ELEMENT_BYTES * whole) + constants.wait

    if software.overlaps_products:
        forward = exposed(forward, products, constants.exposed)
        backward = exposed(backward, input_gradients + weight_gradients, constants.exposed)
    elif software.overlaps_tensor_parallel:
        backward = exposed(backward, weight_gradients, constants.exposed)
    return PassSeconds(forward, backward, recomputed=forward * repeated_share(case.recompute, of_ffn=0.5))


def summed_parts(case: Case) -> float:
    """Return how often a block's forward sums hidden states over tp: after attention and the feed-forward layer.

    With ep a rank routes its own part of the sequence: sequence parallelism leaves it that part, else the results are
    gathered, which is half of a sum. Shared experts are cut by tp, and sum.
    """
    if case.piece.ep == 1:
        return 1.0 + feed_forward(case.model).sums
    if dense_width(case.model):
        return 2.0
    if case.parallel.sequence_parallel:
        return 1.0
    return 1.5


ROUTER_WAITS, ROUTER_WAITS_BACKWARD = 3, 2
"""collectives over ep that wait for the slowest rank: numbers of rows, rows, results; gradients of the last two"""


GATE_SHARE = 1 / 3
"""share of the shared experts' products that compute while rows travel to the routed experts: gate; on the way back: up
and down (`torchllm/models/experts.py`)"""


def expert_parallel(case: Case, shared: float, routed: PerPass = NOTHING) -> PassSeconds:
    """Return the seconds of a block's all-to-alls over ep, forward and backward, recomputation included.

    There are two per pass and chunk: rows to their experts, and results back. The shared experts compute meanwhile
    (`shared` seconds), and the products of other chunks (`routed` seconds of all). Each waits for the slowest rank, as
    the host waits for the number of rows.
    """
    software, constants = case.software, case.software.constants
    exchange = exchange_seconds(case.model, case.piece, case.mesh, case.hardware, software.sends_tokens_once)
    if not exchange:
        return NO_WAIT
    chunks, share = case.piece.chunks, constants.exposed
    gate, up_and_down = GATE_SHARE * shared, (1 - GATE_SHARE) * shared
    exchanges = exchange + (chunks - 1) * exposed(exchange, routed.forward / chunks, share)
    there = exposed(exchanges, gate, share)
    back = exposed(exchanges, up_and_down, share)
    forward = there + back + chunks * ROUTER_WAITS * constants.wait
    # The gradients of a product are two products; they go the same ways in the other order.
    exchanges = exchange + (chunks - 1) * exposed(exchange, routed.backward / chunks, share)
    gradients_there = exposed(exchanges, 2 * up_and_down, share)
    gradients_back = exposed(exchanges, 2 * gate, share)
    backward = gradients_there + gradients_back + chunks * ROUTER_WAITS_BACKWARD * constants.wait
    backward += forward * repeated_share(case.recompute, of_ffn=1.0)
    return PassSeconds(forward, backward)


ALL_TO_ALLS = 4
"""all-to-alls of Ulysses per pass: of queries, keys, values and results (arXiv 2309.14509)"""


class SentOverContext(NamedTuple):
    """Bytes that a mixer of a rank gives to other ranks of cp in a forward; a backward gives the same number."""

    exchanged: float
    """by all-to-alls, its own part included"""
    turned: float
    """to the next rank of a ring, cp - 1 times; in the backward with their gradients"""
    to_neighbors: float
    gathered: float
    """to all others"""


def sent_over_context(case: Case) -> SentOverContext:
    """Return the bytes that the mixer of a view sends over cp."""
    costs = mixer_costs(case.model, case.piece)
    of_numbers = ELEMENT_BYTES * case.piece.tokens
    if not case.piece.ring:
        return SentOverContext(of_numbers * (costs.inputs + costs.results), 0.0, 0.0, 0.0)
    if case.tokens_before:  # both pieces send the keys and values that windows reach
        before = of_numbers * costs.turns * case.tokens_before
        return SentOverContext(0.0, 0.0, before * case.piece.share.pieces_sent / 2, 0.0)
    return SentOverContext(0.0, *(of_numbers * numbers for numbers in (costs.turns, costs.sent, costs.gathered)))


def context_parallel(case: Case, core: float) -> PassSeconds:
    """Return the seconds of a block's exchanges over cp, forward and backward; `core`: seconds of its attention.

    Ring: keys and values go round while attention computes on those before; their gradients with them in the backward.
    A shorter window: the keys and values that it reaches go to both neighbors, and queries before each piece are
    computed too (`parallel/windows.py`). Ulysses: all-to-alls of queries, keys, values and results, which wait. Other
    mixers may gather states, and send the last tokens of pieces to the next ones: both wait.
    """
    parallel = case.parallel
    if parallel.cp == 1:
        return NO_WAIT
    over_cp = case.group([CP])
    share = case.software.constants.exposed
    sent = sent_over_context(case)
    if parallel.cp_method == "ulysses":
        exchange = over_cp.exchange(sent.exchanged)
        exchange += (ALL_TO_ALLS - 1) * over_cp.latency  # `exchange` has the latency of one
        return PassSeconds(exchange, exchange)
    if case.tokens_before:
        exchange = over_cp.send(sent.to_neighbors)
        more = core * case.tokens_before / 2  # the first of these queries have few keys
        return PassSeconds(exchange + more, exchange + FLASH_BACKWARD_OPERATIONS * more)
    keys_and_values = sent.turned
    waiting = over_cp.gather(parallel.cp * sent.gathered) if sent.gathered else 0.0
    waiting += over_cp.send(sent.to_neighbors) if sent.to_neighbors else 0.0
    repeated = waiting * repeated_share(case.recompute, of_ffn=0.0)
    turns = parallel.cp - 1 if keys_and_values else 0
    core_per_turn = core / parallel.cp
    forward_turn = exposed(over_cp.send(keys_and_values), core_per_turn, share)
    and_gradients = keys_and_values * (1 + case.software.ring_gradients / ELEMENT_BYTES)
    backward_turn = exposed(over_cp.send(and_gradients), FLASH_BACKWARD_OPERATIONS * core_per_turn, share)
    return PassSeconds(turns * forward_turn + waiting, turns * backward_turn + waiting, repeated)


def sharded_weights(case: Case, forward: float, backward: float) -> PassSeconds:
    """Return the exposed seconds of FSDP's gathers and scatters of one block, forward and backward.

    Under pp gradients are reduced once per step (`predict.tail`). forward, backward: seconds of the overlapping work.
    """
    parallel, software = case.parallel, case.software
    if parallel.dp_shard * parallel.cp == 1 or parallel.zero < 2:
        return NO_WAIT
    share = software.constants.exposed
    gather = _block_gather(case, software.gathered)
    scatter = 0.0 if parallel.pp > 1 else _block_gather(case, software.sent_gradients)
    if parallel.zero == 2:
        return PassSeconds(0.0, exposed(scatter, backward, share))
    return PassSeconds(exposed(gather, forward, share), exposed(gather + scatter, backward, share))


def _block_gather(case: Case, bytes_per_parameter: float) -> float:
    """Return the seconds of FSDP's gather of a block, or of its scatter of gradients. Experts have other shards."""
    model, tp, ep = case.model, case.parallel.tp, case.piece.ep
    over_shards = case.group([SHARD, CP], case.software.one_card)
    parameters = block_parameters(model, tp)
    if ep == 1:
        return over_shards.gather(bytes_per_parameter * parameters)
    parameters -= expert_parameters(model, tp)
    over_experts = expert_shards(case.mesh, ep, case.hardware, case.software)
    common = over_shards.gather(bytes_per_parameter * parameters)
    routed = over_experts.gather(bytes_per_parameter * expert_parameters(model, ep))
    return common + routed


class EndTimes(NamedTuple):
    """Times of the model's ends in a stage: embedding, head and loss."""

    times: StageTimes
    tensor_parallel: float
    """part of the times: seconds of tensor parallelism"""


def end_times(case: Case, size: StageSize, over_tp: float) -> EndTimes:
    """Return the seconds of the embedding, the head and the loss, and how many of them are tensor parallelism's.

    over_tp: seconds of one all-reduce of the hidden states: of the embedding's rows that other ranks have, and of the
    head's input gradient.
    """
    model, piece, software, hardware = case.model, case.piece, case.software, case.hardware
    constants = software.constants
    forward = input_gradient = weight_gradient = tensor_parallel_seconds = 0.0
    trains_ends = software.trained == 1  # not with updates of frozen weights
    trains_head = not model.freezes("embed_tokens.weight" if model.tied_embeddings else "lm_head.weight")
    if size.first:
        embedding = embedding_seconds(model, piece, software, hardware)
        look_ups = model.predictions if size.last else 1
        forward += look_ups * (embedding.look_up.total(constants) + over_tp)
        tensor_parallel_seconds += look_ups * over_tp
        if trains_ends and not model.freezes("embed_tokens.weight"):
            weight_gradient += embedding.gradient.total(constants)
    if size.last:
        head = head_seconds(model, piece, case.kernels, software, hardware)
        predictions = model.predictions
        forward += predictions * head.forward.total(constants)
        input_gradient += predictions * head.inputs.total(constants)
        if trains_ends and trains_head:
            weight_gradient += predictions * head.weights.total(constants)
        input_gradient += predictions * over_tp
        tensor_parallel_seconds += predictions * over_tp
        if software.whole_logits:
            logit_bytes = ELEMENT_BYTES * piece.tokens * model.vocab
            forward += case.group([TP]).gather(logit_bytes)
    return EndTimes(StageTimes(forward, input_gradient, weight_gradient), tensor_parallel_seconds)


def boundary(case: Case) -> float:
    """Return the seconds from the end of one micro batch in a stage to its beginning in the next.

    Unless a stage waits for its sends (`waits_for_sends`), a schedule may hide some of it: that is simulated.
    """
    parallel = case.parallel
    if parallel.pp == 1:
        return 0.0
    hidden = ELEMENT_BYTES * case.piece.tokens * case.model.hidden
    senders = parallel.tp if parallel.sequence_parallel or parallel.scatter_gather else 1
    seconds = case.group([PP]).send(hidden / senders)
    if senders > 1 and not parallel.sequence_parallel:
        seconds += case.group([TP]).gather(hidden)
    return seconds + case.software.constants.message
