"""Experts: fields and tensors that families share."""

from torchllm.tools.hub.families.family import ConfigField, TensorRule
from torchllm.tools.hub.families.llama import MLP, MLP_TENSORS

EXPERTS = "layers.{}.mlp.routed.experts."
"""of the parameters here, which stack the experts of a block"""
ROUTER = "layers.{}.mlp.routed.router.weight"
LAYERS = ("gate_proj", "up_proj", "down_proj")
STACKED_TENSORS = (
    TensorRule(MLP + "gate.weight", (ROUTER,)),
    TensorRule(MLP + "experts.gate_up_proj", (EXPERTS + "gate_proj", EXPERTS + "up_proj")),
    TensorRule(MLP + "experts.down_proj", (EXPERTS + "down_proj",)),
)
"""of all families with experts, as the modules of transformers 5 have them"""

ROUTER_TRAINING_FIELDS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""say how transformers trains a router; they do not change the model's computation"""

EXPERT_TENSORS = (
    TensorRule(MLP + "gate.weight", (ROUTER,)),
    *(TensorRule(f"{MLP}experts.{{expert}}.{layer}.weight", (EXPERTS + layer,)) for layer in LAYERS),
)
"""of all families with experts but Mixtral"""


def bias_of_router(key: str) -> TensorRule:
    """Return the tensor of the biases that choose experts, by its key within the feed-forward layer."""
    return TensorRule(MLP + key, ("layers.{}.mlp.routed.router.bias",), is_float32=True)


def shared_experts(key: str) -> tuple[TensorRule, ...]:
    """Return the tensors of shared experts, by the key of their layer within the feed-forward layer."""
    return tuple(TensorRule(f"{MLP}{key}.{name}.weight", (f"layers.{{}}.mlp.shared.{name}.weight",)) for name in LAYERS)


MIXTURE_TENSORS = (
    *MLP_TENSORS,
    bias_of_router("gate.e_score_correction_bias"),
    *shared_experts("shared_experts"),
)
"""of dense blocks, shared experts and the bias of routers"""
SHARED_TENSORS = (
    *shared_experts("shared_expert"),
    TensorRule(MLP + "shared_expert_gate.weight", ("layers.{}.mlp.shared.result_gate.weight",)),
)
"""of shared experts with a gate"""
EXPERT_FIELDS = (
    ConfigField("moe_intermediate_size", "expert_ffn", 512),
    ConfigField("shared_expert_intermediate_size", "shared_experts", 512),
)
OF_EXPERTS = {"router_scale": 1.0, "shared_gate": True}
"""of Qwen's experts, whose shared ones have a gate"""
MIXTURE_FIELDS = (
    ConfigField("num_experts_per_tok", "top_k", 8, is_fixed=False),
    ConfigField("n_shared_experts", "shared_experts", 1),
    ConfigField("norm_topk_prob", "router_renormalize", True, is_fixed=False),
)
