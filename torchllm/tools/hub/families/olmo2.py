"""OLMo 2 (OLMo Team 2024, arXiv 2501.00656): norms after attention and feed-forward layer; one of all heads of q, one
of all heads of k.
"""

from torchllm.tools.hub.families.family import HubFamily, TensorRule, tensors_of_block
from torchllm.tools.hub.families.llama import ATTENTION, DECODER_TENSORS, NO_ATTENTION_BIAS, SILU, decoder_fields

WIDTH_NORMS = (
    TensorRule(ATTENTION + "q_norm.weight", ("layers.{}.self_attn.q_width_norm.weight",)),
    TensorRule(ATTENTION + "k_norm.weight", ("layers.{}.self_attn.k_width_norm.weight",)),
)
NORMS_AFTER = tensors_of_block("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")

OLMO2 = HubFamily(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    features={"family": "llama", "qk_norm": "width", "norm_position": "after"},
    fields=decoder_fields(vocab=50304, ffn=11008, kv_heads=None, length=2048, epsilon=1e-5),
    required=(SILU, NO_ATTENTION_BIAS),
    tensors=(
        *DECODER_TENSORS,
        *WIDTH_NORMS,
        *NORMS_AFTER,
    ),
)
