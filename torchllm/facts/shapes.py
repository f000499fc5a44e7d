"""The shape of every parameter of a model, by canonical name, without building the model. No torch."""

from torchllm.config import Model
from torchllm.facts.parts.part import Shape as Shape
from torchllm.facts.parts.part import shapes_of
from torchllm.facts.parts.registry import BUFFERS, NORMS, feed_forward, mixer, norm


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
    shapes |= norm_shapes(model, "norm")
    if not model.tied_embeddings:
        shapes["lm_head.weight"] = (model.vocab_rows, model.hidden)
    return shapes


def block_shapes(model: Model, layer: int) -> dict[str, Shape]:
    """Return the shapes of the parameters of a block, by name within it. layer: its index."""
    view = model.of_block(layer)
    shapes = shapes_of_view(view)
    if view.block:
        from torchllm.facts.block_kinds import block_kind  # of no use to other models

        shapes |= block_kind(view).shapes(view)
    return shapes


def shapes_of_view(view: Model) -> dict[str, Shape]:
    """Return the shapes of the parameters of a block of a view, by name within it, without a fork's additions."""
    before, between, after = NORMS[view.norm_position]
    if feed_forward(view).norms_input:
        after = after[1:]
    shapes = norm_shapes(view, *before) | mixer(view).shapes(view)
    shapes |= norm_shapes(view, *between) | feed_forward(view).shapes(view)
    return shapes | norm_shapes(view, *after)


def buffer_shapes(view: Model) -> dict[str, Shape]:
    """Return the shapes of the buffers of a block of a view, by name within it."""
    declared = (*BUFFERS, *mixer(view).buffers, *feed_forward(view).buffers)
    return {buffer.name: shape for buffer in declared if (shape := buffer.shape(view)) is not None}


def norm_shapes(view: Model, *names: str) -> dict[str, Shape]:
    """Return the shapes of some norms of the residual stream."""
    return shapes_of((parameter for name in names for parameter in norm(name)), view)
