"""Matrix products of the blocks in float8 (package torchao; Micikevicius et al. 2022, arXiv 2209.05433).

A linear layer's three products (its output, the gradients of its input and of its weight) take factors of 8 bits: each
is scaled, so that its largest element is float8's largest, and rounded; sums are float32, results bfloat16.
Stored tensors do not change: float32 weights and gradients, bfloat16 activations. The embedding, the head and
attention's scores are not converted, since that costs accuracy.

rowwise             a scale for each row of the first factor and each column of the second (the sums run along them);
                    scales are powers of two
rowwise_with_gw_hp  the same for outputs and gradients of inputs; gradients of weights in bfloat16
tensorwise          one scale for a whole factor. FOOTGUN: which tokens share a scale depends on micro batch size and
                    context parallelism: layouts round differently

FSDP gathers the weights of tensorwise layers as float8, half the bytes, unless tensor parallelism cuts them too. Their
scales are about whole weights, so that ranks agree on them: `scale_gathered_weights` after each step of the optimizer,
one all-reduce of a number per layer.

Applied before tensor parallelism, because it replaces the layers. Under tensor parallelism a scale still covers a whole
row or tensor, so sharded factors need one small all-reduce each.

The fast products need a GPU with sm_89 or later, and compiled blocks, which fuse scaling and rounding into their
neighbors. On a CPU the rounding is the same and the products of the rounded factors are float32 (torchao's `emulate`).
"""

import logging
from dataclasses import replace

import torch

from torchllm.config import Float8
from torchllm.config.errors import UserError
from torchllm.models.decoder import Decoder

OLDEST_GPU = (8, 9)
"""compute capability that torch's float8 products need"""


def apply_float8(stage: Decoder, float8: Float8, dtype: torch.dtype, device_type: str, shards_weights: bool) -> None:
    """Replace every linear layer of a stage's blocks, in place, by a float8 layer with the same parameters.

    dtype: of the computation. shards_weights: FSDP alone cuts the weights, and may gather them as float8. UserError if
    dtype is not bfloat16, the GPU is too old, or torchao is not installed.
    """
    is_gpu = device_type == "cuda"
    _check(float8, dtype, is_gpu)
    logging.disable(logging.WARNING)  # torchao's warnings about unrelated kernels that this machine lacks
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError(
            f"float8.recipe = {float8.recipe!r} cannot be used here: {error}. Install the extra (pip install -e "
            "'.[float8]'), or set it to none."
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    config = replace(
        Float8LinearConfig.from_recipe_name(float8.recipe),
        emulate=not is_gpu,
        enable_fsdp_float8_all_gather=shards_weights and float8.recipe == "tensorwise",
    )
    convert_to_float8_training(stage.layers, config=config)


def _check(float8: Float8, dtype: torch.dtype, is_gpu: bool) -> None:
    """Raise UserError if this machine cannot compute the products of a recipe."""
    if dtype != torch.bfloat16:
        raise UserError(
            f"float8.recipe = {float8.recipe!r} rounds factors that are bfloat16, but training.dtype is {dtype} here: "
            "set training.dtype = bfloat16 (a CPU emulates float8, slowly), or float8.recipe = none."
        )
    if is_gpu and torch.cuda.get_device_capability() < OLDEST_GPU:
        capability = "".join(map(str, torch.cuda.get_device_capability()))
        raise UserError(
            f"float8.recipe = {float8.recipe!r} needs a GPU with sm_89 or later (L4, L40S, H100), but "
            f"{torch.cuda.get_device_name()} has sm_{capability}: set float8.recipe = none."
        )
