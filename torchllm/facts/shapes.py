"""The shape of every parameter of a model, by canonical name, without building the model. No torch."""

from torchllm.config import Model
from torchllm.facts.parts import registry
from torchllm.facts.parts.part import Shape as Shape


def parameter_shapes(model: Model) -> dict[str, Shape]:
    """Return the shapes of a model's parameters, in the order of its layers; a tied head is the embedding.

    Shapes: D hidden, V vocabulary, S positions.
    """
    shapes: dict[str, Shape] = {"embed_tokens.weight": (model.vocab_rows, model.hidden)}
    if model.features.learned_positions:
        shapes["embed_positions.weight"] = (model.max_sequence_length, model.hidden)
    for index in range(model.blocks):
        for name, shape in block_shapes(model, index).items():
            shapes[f"layers.{index}.{name}"] = shape
    shapes |= registry.norm_shapes(model, "norm")
    if not model.tied_embeddings:
        shapes["lm_head.weight"] = (model.vocab_rows, model.hidden)
    return shapes


def block_shapes(model: Model, layer: int) -> dict[str, Shape]:
    """Return the shapes of the parameters of a block, by name within it. layer: its index."""
    view = model.of_block(layer)
    shapes = registry.shapes_of_view(view)
    if view.block:
        from torchllm.facts.block_kinds import block_kind  # of no use to other models

        shapes |= block_kind(view).shapes(view)
    return shapes
