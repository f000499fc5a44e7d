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
    of_values = "k_proj" if view.keys_as_values else "v_proj"
    return MixerCosts(
        inputs=queries + 2 * keys,
        results=queries,
        kept=2.0 * queries * has_ulysses,  # the results in both arrangements
        keeps_results=() if view.v_norm else (of_values,),
        heads=view.heads / share.tp,
        turned=(queries + keys) * view.has_rotary_positions,
        copied=(queries + keys) * (1.5 if view.rope_interleaved else 1.0) + queries * (view.rope_query_scale > 0),
        normed=normed * has_weights,
        normed_without_weight=keys * view.v_norm + normed * (not has_weights),
        normed_results=("q_proj", "k_proj") * (normed > 0) + (of_values,) * view.v_norm,
        gated=queries * (view.attention_gate != "none"),
        gates={"none": 0.0, "element": queries, "head": view.heads / share.tp}[view.attention_gate],
        turns=2 * keys,
    )
