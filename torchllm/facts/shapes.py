"""The shape of every parameter of a model, by canonical name, without building the model. No torch."""

from torchllm.config import Model

Shape = tuple[int, ...]


def parameter_shapes(model: Model) -> dict[str, Shape]:
    """Return the shapes of a model's parameters, in the order of its layers; a tied head is the embedding.

    Shapes: D hidden, H heads, K key-value heads, Q head width, F feed-forward, V vocabulary, S positions.
    """
    shapes: dict[str, Shape] = {"embed_tokens.weight": (model.vocab_rows, model.hidden)}
    if model.features.learned_positions:
        shapes["embed_positions.weight"] = (model.max_sequence_length, model.hidden)
    for index in range(model.layers):
        for name, shape in block_shapes(model, index).items():
            shapes[f"layers.{index}.{name}"] = shape
    shapes |= _norm_shapes(model, "norm")
    if not model.tied_embeddings:
        shapes["lm_head.weight"] = (model.vocab_rows, model.hidden)
    return shapes


def block_shapes(model: Model, layer: int) -> dict[str, Shape]:
    """Return the shapes of the parameters of a block, by name within it. layer: its index."""
    model = model.of_block(layer)
    hidden = model.hidden
    q_width = model.heads * model.head_width
    kv_width = model.kv * model.head_width
    biases = model.features.biases
    shapes: dict[str, Shape] = {}
    if model.norm_position == "before":
        shapes |= _norm_shapes(model, "input_layernorm")
    shapes |= _linear_shapes("self_attn.q_proj", q_width, hidden, model.has_qkv_bias)
    shapes |= _linear_shapes("self_attn.k_proj", kv_width, hidden, model.has_qkv_bias)
    shapes |= _linear_shapes("self_attn.v_proj", kv_width, hidden, model.has_qkv_bias)
    shapes |= _linear_shapes("self_attn.o_proj", hidden, q_width, biases)
    if model.qk_norm == "head":
        shapes["self_attn.q_norm.weight"] = (model.head_width,)
        shapes["self_attn.k_norm.weight"] = (model.head_width,)
    if model.qk_norm == "width":
        shapes["self_attn.q_width_norm.weight"] = (q_width,)
        shapes["self_attn.k_width_norm.weight"] = (kv_width,)
    shapes |= _norm_shapes(model, "post_attention_layernorm")
    if model.experts:
        shapes |= _expert_shapes(model)
    else:
        shapes |= _feed_forward_shapes(model, "mlp", model.ffn)
    if model.norm_position == "after":
        shapes |= _norm_shapes(model, "post_feedforward_layernorm")
    if model.block:
        from torchllm.facts.block_kinds import block_kind  # of no use to other models

        shapes |= block_kind(model).shapes(model)
    return shapes


def _expert_shapes(model: Model) -> dict[str, Shape]:
    """Return the shapes of a mixture of experts: E experts, whose matrices are stacked."""
    experts, width, hidden = model.experts, model.expert_width, model.hidden
    shapes: dict[str, Shape] = {
        "mlp.routed.router.weight": (experts, hidden),
        "mlp.routed.experts.gate_proj": (experts, width, hidden),
        "mlp.routed.experts.up_proj": (experts, width, hidden),
        "mlp.routed.experts.down_proj": (experts, hidden, width),
    }
    if model.shared_experts:
        shapes |= _feed_forward_shapes(model, "mlp.shared", model.shared_experts * width)
    return shapes


def _feed_forward_shapes(model: Model, name: str, width: int) -> dict[str, Shape]:
    """Return the shapes of a dense feed-forward layer."""
    hidden, biases = model.hidden, model.features.biases
    shapes: dict[str, Shape] = {}
    if model.features.gated_ffn:
        shapes |= _linear_shapes(f"{name}.gate_proj", width, hidden, biases)
    shapes |= _linear_shapes(f"{name}.up_proj", width, hidden, biases)
    return shapes | _linear_shapes(f"{name}.down_proj", hidden, width, biases)


def _norm_shapes(model: Model, name: str) -> dict[str, Shape]:
    """Return the shapes of a norm of the residual stream."""
    shapes: dict[str, Shape] = {f"{name}.weight": (model.hidden,)}
    if model.features.norm == "layer":
        shapes[f"{name}.bias"] = (model.hidden,)
    return shapes


def _linear_shapes(name: str, outputs: int, inputs: int, has_bias: bool) -> dict[str, Shape]:
    """Return the shapes of a matrix and of its bias."""
    shapes: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    if has_bias:
        shapes[f"{name}.bias"] = (outputs,)
    return shapes
