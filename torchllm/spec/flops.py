"""Floating-point operations of a model and of a device: what MFU and HFU are made of. No torch.

One multiply-add is two operations. Everything is per input token of a training step, forward and backward, unless it
says otherwise. Shapes: D hidden, H heads, K key-value heads, Q head width, F feed-forward, V vocabulary, L blocks,
S sequence.

- Model FLOPs (`flops_per_token`): PaLM (arXiv 2204.02311, appendix B), 6 N + 12 L H Q S with N = all parameters. They
  do not depend on how the step is computed, so two layouts compare by MFU = tokens/s * model FLOPs / peak.
- `flops_per_token(pairs=...)`: the same with the attention that a causal or document mask leaves.
- HFU adds `recomputed_flops_per_token`.
- `executed_flops_per_token`: the matrix products that really run. It lacks what N counts though it multiplies nothing:
  the embedding's look-up, norms, biases.
"""

import math
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from torchllm.config import SCHEDULES, Model, Parallel, Recompute, Training


class Matrices(NamedTuple):
    """Numbers of elements in one model's weight matrices."""

    attention: int
    """q, k, v and output projection of one block"""
    ffn: int
    """feed-forward layer of one block"""
    down: int
    """output projection of the feed-forward layer, included in `ffn`"""
    head: int
    """output projection; when tied, the embedding is the same matrix"""


def matrices(model: Model) -> Matrices:
    """Return the sizes of the weight matrices that tokens are multiplied with."""
    q_and_output = 2 * model.hidden * model.heads * model.head_width
    k_and_v = 2 * model.hidden * model.kv * model.head_width
    down = model.hidden * model.ffn
    ffn_matrices = 3 if model.features.gated_ffn else 2
    return Matrices(
        attention=q_and_output + k_and_v,
        ffn=ffn_matrices * down,
        down=down,
        head=model.vocab * model.hidden,
    )


def product_sizes(model: Model) -> list[int]:
    """Return the sizes of a block's weight matrices in the order of their use: q, k, v, o, (gate,) up, down."""
    q = model.hidden * model.heads * model.head_width
    k = model.hidden * model.kv * model.head_width
    up = model.hidden * model.ffn
    gate_and_up = [up, up] if model.features.gated_ffn else [up]
    return [q, k, k, q, *gate_and_up, up]


def half_of_products(model: Model) -> int:
    """Return the size of those of a block's matrices whose products recompute.mode selective_half computes again.

    They are the first, third and fifth; the last product's result is not needed again.
    """
    return sum(product_sizes(model)[:-1:2])


def parameter_count(model: Model) -> int:
    """Return the number of parameters (N): both embedding matrices, a tied one once; norms, biases, positions."""
    sizes = matrices(model)
    norms = (2 * model.layers + 1) * model.hidden
    count = model.layers * (sizes.attention + sizes.ffn) + norms
    count += sizes.head
    if not model.tied_embeddings:
        count += sizes.head
    if model.qk_norm:
        count += model.layers * 2 * model.head_width
    if model.features.norm == "layer":
        count += norms  # a bias as long as the weight
    if model.features.biases:
        qkv_biases = (model.heads + 2 * model.kv) * model.head_width
        wide_biases = 2 if model.features.gated_ffn else 1
        ffn_biases = wide_biases * model.ffn
        output_biases = 2 * model.hidden  # of attention and of the feed-forward layer
        count += model.layers * (qkv_biases + ffn_biases + output_biases)
    if model.features.learned_positions:
        count += model.max_sequence_length * model.hidden
    return count


def causal_pairs(lengths: Iterable[int]) -> int:
    """Count the (query, key) pairs that a causal mask leaves in documents of these lengths, in tokens."""
    return sum(length * (length + 1) // 2 for length in lengths)


def flops_per_token(model: Model, sequence_length: int, pairs: float | None = None) -> float:
    """Return the model FLOPs of one token (PaLM, appendix B).

    pairs: keys that a query sees, on average; None: all S of them, as PaLM counts.
    """
    keys = sequence_length if pairs is None else pairs
    attention = 12 * model.layers * model.heads * model.head_width * keys
    return 6 * parameter_count(model) + attention


def forward_flops_per_token(model: Model, sequence_length: int) -> int:
    """Return the FLOPs of one token's forward pass as it runs, attention unmasked; the backward pass is twice that."""
    sizes = matrices(model)
    attention = 4 * model.heads * model.head_width * sequence_length  # scores, and their product with the values
    block = 2 * (sizes.attention + sizes.ffn) + attention
    return model.layers * block + 2 * sizes.head


def recomputes_logits(training: Training, parallel: Parallel) -> bool:
    """Return whether the backward pass computes the logits again, instead of the forward pass all their gradients.

    It does with training.loss_chunk under pipeline schedules that split the backward pass, or run the forward passes of
    all micro batches first.
    """
    if not training.loss_chunk or parallel.pp == 1:
        return False
    return SCHEDULES[parallel.schedule].splits_backward or parallel.schedule in ("GPipe", "LoopedBFS")


def recomputed_flops_per_token(
    model: Model, recompute: Recompute, sequence_length: int, has_logits_again: bool = False
) -> int:
    """Return the FLOPs of the matrix products that the backward pass runs a second time.

    has_logits_again: the output projection too (`recomputes_logits`). torch ends a recomputation at the last tensor
    that it needs, so the last product of whatever is recomputed at once (always a down projection) is not among them;
    nor, for every mode, is what fused attention kernels recompute inside their backward (no published HFU counts it).
    """
    sizes = matrices(model)
    ffn, down = 2 * sizes.ffn, 2 * sizes.down
    attention = 4 * model.heads * model.head_width * sequence_length
    block = 2 * sizes.attention + attention + ffn
    size = recompute_interval(recompute, model.layers)
    runs = math.ceil(model.layers / size)
    by_mode = {
        "none": 0,
        "full": model.layers * (block - down),
        "segment": model.layers * block - runs * down,
        "every_k": runs * (block - down),
        "ffn": model.layers * (ffn - down),
        "selective": 0,
        "selective_half": model.layers * 2 * half_of_products(model),
    }
    head = 2 * sizes.head if has_logits_again else 0
    return by_mode[recompute.mode] + head


def recompute_interval(recompute: Recompute, layers: int) -> int:
    """Return `recompute.k` with its default filled in."""
    if recompute.k:
        return recompute.k
    return 2 if recompute.mode == "every_k" else round(math.sqrt(layers))


def executed_flops_per_token(model: Model, recompute: Recompute, sequence_length: int) -> int:
    """Return the FLOPs that a training step runs: forward, backward and what is recomputed; attention unmasked."""
    recomputed = recomputed_flops_per_token(model, recompute, sequence_length)
    return 3 * forward_flops_per_token(model, sequence_length) + recomputed


class DevicePeak(NamedTuple):
    """Dense matrix-product peak of one kind of GPU, in TFLOP/s."""

    name: str
    """regular expression of the whole device name, without NVIDIA and GeForce"""
    bfloat16: float
    """rate with float32 accumulation"""
    tf32: float
    float8: float
    """rate with float32 accumulation; 0: the chip has no unit for it"""
    source: str
    """data sheet or white paper that gives the rates"""


# FOOTGUN: data sheets print the figure with 2:4 sparsity, twice the dense one that is here. Names are matched whole: an
# H100 PCIe is not an H100, a laptop's or a MIG slice's peak is not the card's, an A100 of 64 GB is another chip.
DEVICE_PEAKS = (
    DevicePeak(r"A100-(SXM4?|PCIE)-[48]0GB|A100 80GB PCIe", 312, 156, 0, "NVIDIA A100 data sheet"),
    DevicePeak(r"A800-SXM4-80GB|A800 80GB PCIe", 312, 156, 0, "NVIDIA A800 data sheet"),
    DevicePeak(r"A40", 149.7, 74.8, 0, "NVIDIA A40 data sheet"),
    DevicePeak(r"A10", 125, 62.5, 0, "NVIDIA A10 data sheet"),
    DevicePeak(r"A10G", 70, 35, 0, "NVIDIA A10G data sheet (AWS)"),
    DevicePeak(r"H100 80GB HBM3", 989.5, 494.5, 1979, "NVIDIA H100 data sheet, SXM"),
    DevicePeak(r"H100 PCIe", 756.5, 378, 1513, "NVIDIA H100 data sheet of 2022, PCIe"),
    DevicePeak(r"H100 NVL", 835.5, 417.5, 1671, "NVIDIA H100 data sheet, NVL, one GPU"),
    DevicePeak(r"H800", 989.5, 494.5, 1979, "NVIDIA H800 data sheet, SXM"),
    DevicePeak(r"H200", 989.5, 494.5, 1979, "NVIDIA H200 data sheet, SXM"),
    DevicePeak(r"H200 NVL", 835.5, 417.5, 1671, "NVIDIA H200 data sheet, NVL"),
    DevicePeak(r"GH200 (480|144G)\w*( HBM3e)?", 989.5, 494.5, 1979, "NVIDIA GH200 data sheet"),
    DevicePeak(r"B200", 2250, 1125, 4500, "NVIDIA HGX B200 data sheet, an eighth"),
    DevicePeak(r"GB200", 2500, 1250, 5000, "NVIDIA GB200 NVL72 data sheet, one GPU"),
    DevicePeak(r"L4", 121, 60, 242.5, "NVIDIA L4 data sheet"),
    DevicePeak(r"L40", 181, 90.5, 362, "NVIDIA L40 data sheet"),
    DevicePeak(r"L40S", 362, 183, 733, "NVIDIA L40S data sheet"),
    DevicePeak(r"RTX A6000", 154.8, 77.4, 0, "NVIDIA RTX A6000 data sheet"),
    DevicePeak(r"RTX 6000 Ada Generation", 364.2, 182.1, 728.5, "NVIDIA Ada architecture white paper, appendix"),
    DevicePeak(r"RTX 3090", 71.2, 35.6, 0, "NVIDIA Ampere GA102 white paper, appendix A"),
    DevicePeak(r"RTX 4090", 165.2, 82.6, 330.3, "NVIDIA Ada architecture white paper, appendix A"),
    DevicePeak(r"RTX 5090", 209.5, 104.8, 419, "NVIDIA RTX Blackwell architecture white paper, appendix A"),
)


def device_peak_flops(name: str, precision: Literal["bfloat16", "tf32", "float8"]) -> float | None:
    """Return the dense peak of a GPU in FLOP/s by its driver's name for it.

    None if it is not in `DEVICE_PEAKS`, or has no unit for that precision.
    """
    bare = re.sub(r"^(NVIDIA )?(GeForce )?", "", name.strip())
    for peak in DEVICE_PEAKS:
        if re.fullmatch(peak.name, bare, re.IGNORECASE):
            teraflops: float = getattr(peak, precision)
            return teraflops * 1e12 or None
    return None
