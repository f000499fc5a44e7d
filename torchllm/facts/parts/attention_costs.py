"""The costs of softmax attention on one rank, for the planner. A run does not load them."""

from torchllm.config import Model
from torchllm.facts.parts.costs import MixerCosts, RankShare


def costs_of_attention(view: Model, share: RankShare) -> MixerCosts:
    """Return the costs of softmax attention, for any projections of queries, keys and values."""
    queries = view.heads * view.head_width / share.tp
    keys = view.kv * view.head_width / share.tp
    has_ulysses = share.cp > 1 and not share.ring
    normed = (queries + keys) * (view.qk_norm != "none")
    has_weights = view.features.norm_weights
    scales_queries = view.has_yarn and view.rope_query_scale > 0
    return MixerCosts(
        inputs=queries + 2 * keys,
        results=queries,
        kept=2.0 * queries * has_ulysses,  # the results in both arrangements
        heads=view.heads / share.tp,
        turned=(queries + keys) * view.has_rotary_positions,
        copied=(queries + keys) * (1.5 if view.rope_interleaved else 1.0) + queries * scales_queries,
        normed=normed * has_weights,
        normed_without_weight=keys * view.v_norm + normed * (not has_weights),
        gated=queries * (view.attention_gate != "none"),
        working=_held_by_ring(view, share, queries, keys),
        gates={"none": 0.0, "element": queries, "head": view.heads / share.tp}[view.attention_gate],
        turns=2 * keys,
    )


def _held_by_ring(view: Model, share: RankShare, queries: float, keys: float) -> float:
    """Return the bytes per token that a ring's backward holds at its peak (`parallel/ring.py`); 0 without a ring.

    The sums of gradients are in float32, all else in 16 bits.
    """
    length = share.cp * share.length
    if not share.ring or view.window_within(length) < length:
        return 0.0
    passed_on = 2 * keys
    received = 2 * view.hidden / share.spread + 2 * queries  # gradients of the residual stream and of the results
    sums = 4 * queries + 3 * 4 * passed_on  # of keys and values: this rank's, those sent and those received
    if share.cp == 2:  # after the kernel of the other rank's keys and values
        return received + sums + 2 * passed_on + 2 * queries + passed_on
    of_kernel = 3 * (2 * queries + keys)  # results and copies, with half of the keys
    return received + sums + 2 * 2 * passed_on + of_kernel
