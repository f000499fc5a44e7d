"""Gemma 3 (Gemma Team 2025, arXiv 2503.19786), its language model: norms on both sides whose weights are added to 1,
GELU, scaled embeddings, and a window in five of six blocks, which turn positions with another base.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torchllm.tools.hub.families.family import FULL, SLIDING, ConfigField, FieldError, HubFamily, RequiredField
from torchllm.tools.hub.families.llama import DECODER_TENSORS, NO_ATTENTION_BIAS, NORMS_AROUND, decoder_fields
from torchllm.tools.hub.families.qwen3 import HEAD_NORMS

GELU = RequiredField("hidden_activation", ("gelu_pytorch_tanh",), "another activation of the feed-forward layer")
CAUSAL = RequiredField("use_bidirectional_attention", (False, None), "attention to later tokens")


# Functions with names: a table is sent to the other ranks, and a lambda cannot be pickled.
def scale_of(scalar: float) -> float:
    """Return model.softmax_scale of query_pre_attn_scalar."""
    return float(scalar**-0.5)


def scalar_of(scale: float) -> int:
    """Return query_pre_attn_scalar of model.softmax_scale."""
    return round(scale**-2)


def root(hidden: int) -> float:
    """Return the factor of the embeddings of a model of this width."""
    return float(hidden**0.5)


SCALE = ConfigField("query_pre_attn_scalar", "softmax_scale", 256, conversion=(scale_of, scalar_of))
FEATURES = {"family": "llama", "norm_position": "both", "norm_offset": True, "activation": "gelu_tanh"}


def one_of_six_is_full(fields: Mapping[str, Any], have_rope: Sequence[bool]) -> list[str]:
    """Return layer_types: every sixth block, or every `sliding_window_pattern`-th one, has no window."""
    period = fields.get("sliding_window_pattern") or 6
    if not isinstance(period, int):
        raise FieldError(f"sliding_window_pattern: must be a whole number, not {period!r}")
    return [SLIDING if (index + 1) % period else FULL for index in range(len(have_rope))]


GEMMA3 = HubFamily(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    features=FEATURES | {"qk_norm": "head"},
    fields=(
        *decoder_fields(
            vocab=262208, ffn=9216, kv_heads=4, length=131072, head_dim=256, layers=26, hidden=2304, heads=8, tied=True
        ),
        SCALE,
        ConfigField("sliding_window", "window", 4096, is_fixed=False),
        ConfigField("final_logit_softcapping", "logit_softcap", None),
    ),
    required=(GELU, NO_ATTENTION_BIAS, CAUSAL),
    unwritten=(RequiredField("attn_logit_softcapping", (None,), "a soft cap of scores, which transformers ignores"),),
    tensors=(*DECODER_TENSORS, *HEAD_NORMS, *NORMS_AROUND),
    ignored_fields=("sliding_window_pattern", "_sliding_window_pattern", "cache_implementation"),
    default_layer_types=one_of_six_is_full,
    has_rope_by_type=True,
    heads_divide_hidden=True,
    rope_theta=1e6,
    window_rope_theta=10000.0,
    derived={"embedding_multiplier": root},
)
