"""Read the kernels and the recomputation of a row of measurements. No torch."""

import re
from dataclasses import replace
from typing import NamedTuple, get_args

from evidence.cells import Cells
from torchllm.config import Recompute
from torchllm.tools.planner.compute import Kernels
from torchllm.tools.planner.software import AttentionKernel, Software

ATTENTION = {
    "flash_attn2": "flash2",
    "flash_attention_2": "flash2",
    "flash_attention_3": "flash3",
    "sdpa": "flash2",
    "sdpa_flash": "flash2",
    "flex": "flash2",
    "cudnn": "flash3",
    "te": "flash3",  # Transformer Engine takes cuDNN's
    "torch": "eager",
    "unfused": "eager",
    "megatron": "fused_softmax",
}
"""kernels by their other names"""
RECOMPUTATION = {
    "0": "none",
    "1": "full",
    "disabled": "none",
    "every_layer": "full",
    "selective op": "selective",
    "selective (layernorm, moe_act)": "selective",
    "selective (core_attn)": "selective",
    "selective layer (every other)": "every_k",
}
"""modes of recomputation, by their other names"""
ELEMENTWISE = ("selective op", "selective (layernorm, moe_act)")
"""names of modes that recompute elementwise work, whatever a framework usually selects"""
NO_FLOAT8 = re.compile(r"auto|(amp_)?(bf16|bfloat16|fp16|float16|float32)( .*)?")
FLOAT8 = re.compile(
    r"(amp_)?(mx)?(float8|fp8)(-\w+|_cublas|_cublas_rceil)?( dynamic| nocompile)*"
    r"( tensorwise| rowwise| rowwise_with_gw_hp| current scaling| linears \+ grouped gemm)?( \+ fp8 all-gather)?"
)
"""precisions with 8-bit operands in all products of the blocks"""

FLOAT8_SHARES = {"rowwise": 0.62, "rowwise_with_gw_hp": 0.575}
TENSORWISE, TRANSFORMER_ENGINE = 0.8, 0.88
"""by recipe, the gain of products as a share of the ratio of peaks (2 on an H100); tensorwise: all others, MXFP8 too.

github.com/pytorch/ao at 36027d82, docs/source/workflows/training.md: Llama 3 8B on 8 H100 takes 1.332 s per step in
bfloat16, 1.065 s tensorwise and 1.210 s rowwise. The blocks' products are about 0.65 s of these, so they gain 1.6 to
1.7 and 1.23. With gradients of weights in high precision, two of three products gain. Transformer Engine casts in the
kernels before a product, so that it gains all that products gain: on an H100 the largest reach 1,403 TFLOP/s of
1,979, and 794.5 of 989 in bfloat16 (github.com/stas00/ml-engineering, compute/accelerator)."""


class Recomputed(NamedTuple):
    """The recomputation of a row, and its software if the row says more than the mode."""

    recompute: Recompute
    software: Software


def recompute_of(cells: Cells, software: Software) -> Recomputed:
    """Return the recomputation of a row: none in a table without this column.

    ValueError if only this row does not say it, or in unknown words.
    """
    word = cells.text("act_ckpt").lower()
    if "act_ckpt" not in cells.texts:
        cells.assume("act_ckpt none")
        word = "none"
    if not word:
        raise ValueError("act_ckpt is missing: name the recomputation in it, or in the column assumed")
    mode = RECOMPUTATION.get(word, word)
    modes = get_args(Recompute.__annotations__["mode"])
    if mode not in modes:
        raise ValueError(f"act_ckpt {word!r} is unknown ({', '.join([*modes, *RECOMPUTATION])})")
    if mode == "selective" and word != "selective":  # the words say which of the two selections it is
        software = replace(software, recomputes_attention_only=word not in ELEMENTWISE)
    return Recomputed(Recompute(mode=mode), software)  # type: ignore[arg-type]  # checked above


def measured_kernels(cells: Cells, software: Software) -> Kernels:
    """Return which kernels a row used. ValueError if its words are unknown."""
    return Kernels(
        attention=_attention(cells, software),
        fused_norm=cells.is_set("rmsnorm_kernel", default=software.fused_norm),
        compiled=cells.is_set("compile"),
        compiled_loss=cells.is_set("compile_loss"),
        float8=_float8_share(cells, software),
    )


def _attention(cells: Cells, software: Software) -> AttentionKernel:
    """Return the attention kernel of a row, or its framework's. ValueError if its name is unknown."""
    word = cells.text("attn_impl").lower()
    if not word:
        cells.assume(f"attention {software.attention}")
    if word in ("", "flash"):  # the framework's kernel at that time
        return software.attention
    kind = ATTENTION.get(word, word)
    kinds = get_args(AttentionKernel)
    if kind not in kinds:
        raise ValueError(f"attn_impl {word!r} is unknown ({', '.join([*kinds, *ATTENTION])})")
    return kind  # type: ignore[return-value]  # checked above


def _float8_share(cells: Cells, software: Software) -> float:
    """Return `Kernels.float8`. ValueError if the precision does not apply to all products of the blocks."""
    word = cells.text("precision").lower()
    if not word:
        cells.assume("precision bf16")
        return 0.0
    if NO_FLOAT8.fullmatch(word):
        return 0.0
    if not FLOAT8.fullmatch(word):
        raise ValueError(f"precision {word!r} is unknown, or does not apply to all products")
    for recipe, share in FLOAT8_SHARES.items():
        if recipe in word.split():
            return share
    return TENSORWISE if software.fsdp else TRANSFORMER_ENGINE
