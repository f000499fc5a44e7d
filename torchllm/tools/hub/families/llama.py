"""Llama 1, 2, 3 and 3.1 to 3.3 (Touvron et al. 2023, arXiv 2302.13971 and 2307.09288; Dubey et al. 2024, arXiv
2407.21783), and all that has its form: TinyLlama, SmolLM2.
"""

from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField, TensorRule, tensors_of_block

ATTENTION = "model.layers.{}.self_attn."
MLP = "model.layers.{}.mlp."

ENDS = (
    TensorRule("model.embed_tokens.weight", ("embed_tokens.weight",)),
    TensorRule("model.norm.weight", ("norm.weight",)),
    TensorRule("lm_head.weight", ("lm_head.weight",)),
)
ATTENTION_TENSORS = tensors_of_block(*(f"self_attn.{name}_proj.weight" for name in "qkvo"))
MLP_TENSORS = tensors_of_block(*(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")))
DECODER_TENSORS = (*ENDS, *ATTENTION_TENSORS, *MLP_TENSORS)
"""of all dense families that follow Llama's names"""

NORMS_BEFORE = tensors_of_block("input_layernorm.weight", "post_attention_layernorm.weight")
"""norms of the input of attention and feed-forward layer"""
NORMS_AROUND = tensors_of_block(
    *(f"{place}_layernorm.weight" for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"))
)
"""norms on both sides of attention and feed-forward layer"""

SILU = RequiredField("hidden_act", ("silu", "swish"), "another activation of the feed-forward layer")
NO_ATTENTION_BIAS = RequiredField("attention_bias", (False,), "biases of all matrices of the attention")
INVERSE_FREQUENCIES = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""buffers that old versions saved"""


def decoder_fields(
    *,
    vocab: int,
    ffn: int,
    kv_heads: int | None,
    length: int,
    epsilon: float = 1e-6,
    head_dim: int | None = None,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    ffn_key: str = "ffn",
    tied: bool = False,
) -> tuple[ConfigField, ...]:
    """Return the fields of a family that follows Llama's names; arguments: the defaults of its class.

    ffn_key: key of [model] for intermediate_size: "expert_ffn" where all blocks have experts.
    """
    return (
        ConfigField("num_hidden_layers", "layers", layers),
        ConfigField("hidden_size", "hidden", hidden),
        ConfigField("num_attention_heads", "heads", heads),
        ConfigField("num_key_value_heads", "kv_heads", kv_heads),
        ConfigField("head_dim", "head_dim", head_dim),
        ConfigField("intermediate_size", ffn_key, ffn),
        ConfigField("vocab_size", "vocab", vocab),
        ConfigField("tie_word_embeddings", "tied_embeddings", tied),
        ConfigField("max_position_embeddings", "max_sequence_length", length, is_fixed=False),
        ConfigField("rms_norm_eps", "norm_epsilon", epsilon, is_fixed=False),
        ConfigField("initializer_range", "initial_std", 0.02, is_fixed=False),
    )


LLAMA = HubFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    features={"family": "llama"},
    fields=decoder_fields(vocab=32000, ffn=11008, kv_heads=None, length=2048),
    required=(
        SILU,
        NO_ATTENTION_BIAS,
        RequiredField("mlp_bias", (False,), "biases of the feed-forward layer"),
    ),
    tensors=DECODER_TENSORS + NORMS_BEFORE,
    ignored_tensors=INVERSE_FREQUENCIES,
    ignored_fields=("pretraining_tp",),
    heads_divide_hidden=True,
)
