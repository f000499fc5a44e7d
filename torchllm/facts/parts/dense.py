"""The dense feed-forward layer: three matrices with a gate, or two (`Features.feed_forward`)."""

from torchllm.config import Model
from torchllm.facts.parts.part import BlockPart, linear


def _has_biases(view: Model) -> bool:
    return view.features.biases


PART = BlockPart(
    name="dense",
    build="torchllm.models.layers:build_feed_forward",
    parameters=(
        *linear(
            "mlp.gate_proj",
            lambda view: (view.ffn, view.hidden),
            "colwise",
            is_there=lambda view: view.features.gated_ffn,
        ),
        *linear("mlp.up_proj", lambda view: (view.ffn, view.hidden), "colwise", has_bias=_has_biases),
        *linear(
            "mlp.down_proj", lambda view: (view.hidden, view.ffn), "rowwise", has_bias=_has_biases, to_residual=True
        ),
    ),
    unread=("expert_ffn",),
)
