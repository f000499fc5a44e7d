"""Qwen3-Next (Qwen Team 2025, Qwen3-Next-80B-A3B): three blocks of Gated DeltaNet (arXiv 2412.06464), then one with
gated attention (arXiv 2505.06708); experts, and a shared one with a gate.

A file may hold tensors mtp.*, a block that predicts the token after the next and is not read here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torchllm.config import Model
from torchllm.facts.parts.gated_delta import delta_sizes
from torchllm.tools.hub.families import llama
from torchllm.tools.hub.families.family import (
    FULL,
    LINEAR,
    ConfigField,
    FieldError,
    HubFamily,
    RequiredField,
    TensorRule,
)
from torchllm.tools.hub.families.mixtral import ROUTER_TRAINING_FIELDS, STACKED_TENSORS
from torchllm.tools.hub.families.qwen3 import HEAD_NORMS
from torchllm.tools.hub.families.qwen3_moe import EXPERT_TENSORS

MIXER = "layers.{}.self_attn."
"""of the parameters here; those of Gated DeltaNet share names with attention's"""


# Functions with names: a table is sent to the other ranks, and a lambda cannot be pickled.
def key_heads(view: Model) -> int:
    return delta_sizes(view).key_heads


def one_of_four_is_full(fields: Mapping[str, Any], have_rope: Sequence[bool]) -> list[str]:
    """Return layer_types: every fourth block has attention, or as full_attention_interval says. Raises FieldError."""
    interval = fields.get("full_attention_interval", 4)
    if type(interval) is not int or interval < 1:
        raise FieldError(f"full_attention_interval: must be a whole number of at least 1, not {interval!r}")
    return [LINEAR if (index + 1) % interval else FULL for index in range(len(have_rope))]


def delta_tensor(key: str, *names: str, by_key_head: bool = False, is_convolution: bool = False) -> TensorRule:
    """Return a tensor of Gated DeltaNet. by_key_head: it has the rows of all names for a key head, then the next."""
    groups = key_heads if by_key_head else None
    own = tuple(MIXER + name for name in names)
    place = f"model.layers.{{}}.linear_attn.{key}"
    return TensorRule(place, own, groups=groups, mixer="gated_delta", is_convolution=is_convolution)


DELTA_TENSORS = (
    delta_tensor("conv1d.weight", "of_heads.q_conv", "of_heads.k_conv", "of_heads.v_conv", is_convolution=True),
    delta_tensor("A_log", "of_heads.A_log"),
    delta_tensor("dt_bias", "of_heads.dt_bias"),
    delta_tensor("norm.weight", "o_norm.weight"),
    delta_tensor("out_proj.weight", "o_proj.weight"),
)
FUSED_TENSORS = (
    delta_tensor("in_proj_qkvz.weight", *(f"{name}_proj.weight" for name in "qkvg"), by_key_head=True),
    delta_tensor("in_proj_ba.weight", "b_proj.weight", "a_proj.weight", by_key_head=True),
)
SHARED = "layers.{}.mlp.shared."
SHARED_TENSORS = (
    *(
        TensorRule(f"{llama.MLP}shared_expert.{name}_proj.weight", (f"{SHARED}{name}_proj.weight",))
        for name in ("gate", "up", "down")
    ),
    TensorRule(llama.MLP + "shared_expert_gate.weight", (SHARED + "result_gate.weight",)),
)
BLOCK_TENSORS = (*DELTA_TENSORS, *llama.ENDS, *llama.ATTENTION_TENSORS, *HEAD_NORMS, *llama.NORMS_BEFORE)
OTHER_TENSORS = (*FUSED_TENSORS, *BLOCK_TENSORS, *llama.MLP_TENSORS, *SHARED_TENSORS)
DELTA_FIELDS = (
    ConfigField("linear_num_key_heads", "delta_key_heads", 16),
    ConfigField("linear_num_value_heads", "delta_value_heads", 32),
    ConfigField("linear_key_head_dim", "delta_key_dim", 128),
    ConfigField("linear_value_head_dim", "delta_value_dim", 128),
    ConfigField("linear_conv_kernel_dim", "delta_conv", 4),
)
EXPERT_FIELDS = (
    ConfigField("moe_intermediate_size", "expert_ffn", 512),
    ConfigField("shared_expert_intermediate_size", "shared_experts", 512),
)
FEATURES = {"family": "llama", "qk_norm": "head", "norm_offset": True, "attention_gate": "element"}
OF_EXPERTS = {"router_scale": 1.0, "shared_gate": True}
NO_WINDOW = RequiredField("use_sliding_window", (False,), "a sliding window")

QWEN3_NEXT = HubFamily(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    features=FEATURES | OF_EXPERTS,
    fields=(
        *llama.decoder_fields(
            vocab=151936, ffn=5632, kv_heads=2, length=32768, head_dim=256, layers=48, hidden=2048, heads=16
        ),
        *DELTA_FIELDS,
        *EXPERT_FIELDS,
        ConfigField("num_experts", "experts", 512),
        ConfigField("num_experts_per_tok", "top_k", 10, is_fixed=False),
        ConfigField("norm_topk_prob", "router_renormalize", True, is_fixed=False),
    ),
    required=(llama.SILU, llama.NO_ATTENTION_BIAS),
    unwritten=(NO_WINDOW,),
    tensors=(*OTHER_TENSORS, *EXPERT_TENSORS),
    stacked_tensors=(*OTHER_TENSORS, *STACKED_TENSORS),
    ignored_fields=(*ROUTER_TRAINING_FIELDS, "full_attention_interval", "number_of_conv_states"),
    default_layer_types=one_of_four_is_full,
    mixers={LINEAR: "gated_delta"},
    has_shared_width=True,
    has_sparse_step=True,
    has_prediction_blocks=True,
    rotary_fraction=0.25,
)
