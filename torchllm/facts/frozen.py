"""Which parameters are trained, and the gradients of others, which are not computed. No torch.

Only runs that freeze some import this.
"""

import difflib
import math
import re
from collections.abc import Collection, Sequence
from functools import lru_cache

from torchllm.config import Model, TrainedParameters
from torchllm.facts.parameters import is_low_rank_factor
from torchllm.facts.shapes import parameter_shapes


def problem_of_frozen(pattern: str, names: Collection[str]) -> str:
    """Return the error in a model.frozen that is not empty; empty if it is right. names: of all parameters."""
    try:
        frozen = [name for name in names if re.fullmatch(pattern, name)]
    except re.error as error:
        return f"'{pattern}' is no regular expression: {error}; an example is 'layers\\.[01]\\..*'"
    if len(frozen) == len(names):
        return "matches all parameters, so nothing would be trained"
    if frozen:
        return ""
    if part := next((name for name in names if re.search(pattern, name)), ""):
        return f"'{pattern}' matches only a part of {part}: it must match whole names, e.g. '.*({pattern}).*'"
    plain = pattern.replace("\\", "")
    nearest = difflib.get_close_matches(plain, names, n=1, cutoff=0.0)[0]
    return f"'{pattern}' matches no parameter: did you mean '{re.escape(nearest)}'?"


def is_trained(name: str, model: Model, trained: TrainedParameters) -> bool:
    """Return whether a parameter is trained. name: canonical."""
    return is_low_rank_factor(name) if trained.only_updates else not model.freezes(name)


@lru_cache(maxsize=1024)
def blocks_without_backward(model: Model) -> int:
    """Return the number of first blocks that need no backward pass: they and the embedding are frozen."""
    for name in parameter_shapes(model):
        if not model.freezes(name):
            block = re.match(r"layers\.(\d+)\.", name)
            return 0 if name.startswith("embed_") else int(block[1]) if block else model.layers
    return model.layers


def flops_without_gradients(model: Model, core_flops: Sequence[float]) -> float:
    """Return the FLOPs of one token's gradients that model.frozen saves: a third of the FLOPs of a frozen weight.

    It is two thirds where no gradient of the input is needed either: before the first trained parameter. core_flops:
    `flops.core_flops` of each block.
    """
    first = blocks_without_backward(model)
    before = [f"layers.{layer}." for layer in range(first)] + ["embed_"] * (not model.tied_embeddings)
    head = f"{'embed_tokens' if model.tied_embeddings else 'lm_head'}.weight"
    saved = 2.0 * sum(core_flops[:first])
    for name, shape in parameter_shapes(model).items():
        if model.freezes(name):
            used = math.prod(shape) * (model.top_k / model.experts if ".experts." in name else 1.0)
            used *= model.predictions if name == head else 1
            saved += (4 if name.startswith(tuple(before)) else 2) * used
    return saved


def first_recomputed_block(model: Model, mode: str, interval: int) -> int:
    """Return the index of the first block that recompute.mode recomputes. interval: of `recompute_interval`."""
    first = 0 if model.experts else blocks_without_backward(model)  # experts have one, which counts their tokens
    if mode == "segment" and first < model.layers:
        return first - first % interval  # a segment is recomputed as a whole
    return first + -first % interval if mode == "every_k" else first
