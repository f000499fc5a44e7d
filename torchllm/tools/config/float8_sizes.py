"""The sizes that products in float8 need."""

from collections.abc import Iterator

from torchllm.config.schema import SCHEDULES, Config, Float8, Model
from torchllm.facts.parts.registry import feed_forward, mixer
from torchllm.tools.config.read import ConfigError, config_error

FLOAT8_MULTIPLE = 16
"""divisor of all sizes of a float8 product: cuBLAS takes rows whose bytes are a multiple of this"""


def float8_layout_problems(config: Config) -> Iterator[ConfigError]:
    """Check that all float8 products of a layout have sizes that are multiples of `FLOAT8_MULTIPLE`."""
    parallel, training = config.parallel, config.training
    if parallel.pp > 1 and SCHEDULES[parallel.schedule].splits_backward:
        yield config_error(
            "parallel.schedule",
            f"{parallel.schedule} computes gradients of inputs and weights separately, which the products of "
            f'float8.recipe = "{config.float8.recipe}" cannot: use Interleaved1F1B, or 1F1B with virtual_stages = 1',
        )
    remedy = 'or set float8.recipe = "none"'
    views = {path: of_kind.model for path, of_kind in config.of_kinds.items()}
    unfit = {width: path for path, view in views.items() for width in unfit_for_float8(view, parallel.tp)}
    for width, path in unfit.items():
        yield config_error(
            "float8.recipe",
            f"{path}.{width} is no multiple of {FLOAT8_MULTIPLE}, which float8 products need: change it, {remedy}",
        )
    tokens = training.micro_batch_size * training.sequence_length // parallel.cp
    if training.sequence_length % parallel.cp == 0 and not takes_float8_tokens(config.float8, tokens):
        yield config_error(
            "training.micro_batch_size",
            f"{training.micro_batch_size} x sequence_length {training.sequence_length} / cp {parallel.cp} = {tokens} "
            f"tokens are no multiple of {FLOAT8_MULTIPLE}, which gradients of weights in float8 need: change it, "
            f"{remedy}",
        )


def unfit_for_float8(model: Model, tp: int) -> Iterator[str]:
    """Yield the widths of a rank's matrices that do not fit float8 products, e.g. "ffn = 1032 / tp 2"."""
    if model.hidden % FLOAT8_MULTIPLE:
        yield f"hidden = {model.hidden}"
    widths = {
        "heads x head_dim": model.heads * model.head_width,
        "kv_heads x head_dim": model.kv * model.head_width,
        "ffn": model.ffn,
    }
    share = f" / tp {tp}" if tp > 1 else ""
    for name, width in widths.items():
        if width % tp == 0 and width // tp % FLOAT8_MULTIPLE:
            yield f"{name} = {width}{share}"
    for parameter in (*mixer(model).parameters, *feed_forward(model).parameters):
        shape = parameter.shape(model)
        if shape is None or len(shape) != 2 or parameter.role != "matrix":
            continue
        layer = parameter.module.rpartition(".")[2]
        for side, width, cut in zip(("outputs", "inputs"), shape, ("colwise", "rowwise"), strict=True):
            ranks = tp if parameter.cut == cut else 1
            is_known = width in widths.values() or (width == model.hidden and ranks == 1)
            if not is_known and width % ranks == 0 and width // ranks % FLOAT8_MULTIPLE:
                yield f"{layer}'s {side} = {width}{share if ranks > 1 else ''}"


def takes_float8_tokens(float8: Float8, tokens: int) -> bool:
    """Return whether float8 products can sum over `tokens` tokens of a rank, as gradients of weights do."""
    return tokens % FLOAT8_MULTIPLE == 0 or float8.recipe == "rowwise_with_gw_hp"
