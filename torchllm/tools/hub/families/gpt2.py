"""GPT-2 (Radford et al. 2019). Its matrices are stored transposed (Conv1D); c_attn holds q, k and v."""

from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField, TensorRule

BLOCK = "transformer.h.{}."

GPT2 = HubFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    features={"family": "gpt"},
    fields=(
        ConfigField("n_layer", "layers", 12, aliases=("num_hidden_layers",)),
        ConfigField("n_embd", "hidden", 768, aliases=("hidden_size",)),
        ConfigField("n_head", "heads", 12, aliases=("num_attention_heads",)),
        ConfigField("n_inner", "ffn", None),
        ConfigField("vocab_size", "vocab", 50257),
        ConfigField("tie_word_embeddings", "tied_embeddings", True),
        ConfigField("n_positions", "max_sequence_length", 1024, aliases=("max_position_embeddings",)),
        ConfigField("layer_norm_epsilon", "norm_epsilon", 1e-5, is_fixed=False),
        ConfigField("initializer_range", "initial_std", 0.02, is_fixed=False),
    ),
    required=(
        RequiredField(
            "activation_function", ("gelu_new", "gelu_pytorch_tanh"), "another activation of the feed-forward layer"
        ),
        RequiredField("scale_attn_weights", (True,), "scores of the attention that are not scaled"),
        RequiredField("scale_attn_by_inverse_layer_idx", (False,), "scores that are scaled by the index of the block"),
        RequiredField("add_cross_attention", (False,), "attention to an encoder"),
    ),
    tensors=(
        TensorRule("transformer.wte.weight", ("embed_tokens.weight",)),
        TensorRule("transformer.wpe.weight", ("embed_positions.weight",)),
        TensorRule(BLOCK + "ln_1.weight", ("layers.{}.input_layernorm.weight",)),
        TensorRule(BLOCK + "ln_1.bias", ("layers.{}.input_layernorm.bias",)),
        TensorRule(
            BLOCK + "attn.c_attn.weight",
            (
                "layers.{}.self_attn.q_proj.weight",
                "layers.{}.self_attn.k_proj.weight",
                "layers.{}.self_attn.v_proj.weight",
            ),
            is_transposed=True,
        ),
        TensorRule(
            BLOCK + "attn.c_attn.bias",
            ("layers.{}.self_attn.q_proj.bias", "layers.{}.self_attn.k_proj.bias", "layers.{}.self_attn.v_proj.bias"),
        ),
        TensorRule(BLOCK + "attn.c_proj.weight", ("layers.{}.self_attn.o_proj.weight",), is_transposed=True),
        TensorRule(BLOCK + "attn.c_proj.bias", ("layers.{}.self_attn.o_proj.bias",)),
        TensorRule(BLOCK + "ln_2.weight", ("layers.{}.post_attention_layernorm.weight",)),
        TensorRule(BLOCK + "ln_2.bias", ("layers.{}.post_attention_layernorm.bias",)),
        TensorRule(BLOCK + "mlp.c_fc.weight", ("layers.{}.mlp.up_proj.weight",), is_transposed=True),
        TensorRule(BLOCK + "mlp.c_fc.bias", ("layers.{}.mlp.up_proj.bias",)),
        TensorRule(BLOCK + "mlp.c_proj.weight", ("layers.{}.mlp.down_proj.weight",), is_transposed=True),
        TensorRule(BLOCK + "mlp.c_proj.bias", ("layers.{}.mlp.down_proj.bias",)),
        TensorRule("transformer.ln_f.weight", ("norm.weight",)),
        TensorRule("transformer.ln_f.bias", ("norm.bias",)),
        TensorRule("lm_head.weight", ("lm_head.weight",)),
    ),
    unwritten=tuple(
        RequiredField(name, (None,), "rotary positions") for name in ("rope_theta", "rope_scaling", "rope_parameters")
    ),
    prefix="transformer.",
    ignored_tensors=r"h\.\d+\.attn\.(bias|masked_bias)",
    ignored_fields=(
        "attn_pdrop",
        "embd_pdrop",
        "n_ctx",
        "reorder_and_upcast_attn",
        "resid_pdrop",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
    ),
    computes_ffn=True,
)
