"""Logs which fused attention kernel a GPU will run: torch chooses it by architecture, wheel, dtypes, masks and heads.

Two runs with `model.attention = "sdpa"` may run different kernels, and the kernel called math keeps the scores, S x S,
in memory. docs/hollow_gpu.md has a table of torch's choices.
"""

import logging

import torch
from torch import Tensor

from torchllm.config import Model, Parallel

log = logging.getLogger(__name__)


def log_attention_kernel(
    model: Model, parallel: Parallel, sequence_length: int, documents: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Log the kernel of `model.attention = "sdpa"` on a GPU, with a warning if it keeps S x S scores in memory.

    documents: whether tokens see only their own document. dtype: of the computation. A ring calls its kernels directly
    (`attention_kernels.py`), and the other values of `model.attention` name their kernel.
    """
    is_ring = parallel.cp > 1 and parallel.cp_method == "ring"
    if device.type != "cuda" or "sdpa" not in model.attention_kernels or is_ring:
        return
    settings = parallel, sequence_length, documents, dtype, device
    kernels = {attention_kernel(view, *settings) for view in set(model.views) if view.attention == "sdpa"}
    log.info("attention: torch's %s kernel", " and ".join(sorted(kernels)))
    if "math" in kernels:
        log.warning(
            'model.attention = "sdpa" has no fused kernel on this GPU for these heads in %s: the scores of a layer, '
            "(H, S, S), will be in memory",
            str(dtype).removeprefix("torch."),
        )


def attention_kernel(
    model: Model, parallel: Parallel, sequence_length: int, documents: bool, dtype: torch.dtype, device: torch.device
) -> str:
    """Return the kernel of blocks of one kind: varlen (flash attention of documents), flash, efficient, cudnn or math.

    A window is masked as documents are (`models.attention.ScaledDotProductAttention`).
    """
    from torchllm.models.document_attention import QUERY_BLOCK  # these are of no use to most runs on a CPU
    from torchllm.models.fused_attention import heads_of_kernel
    from torchllm.models.varlen_attention import has_flash_attention, takes_varlen
    from torchllm.runtime.torch_operations import chosen_attention

    ranks = parallel.tp * parallel.cp  # with ulysses a rank has whole sequences of some heads
    is_masked = documents or model.window_within(sequence_length) < sequence_length
    queries = min(QUERY_BLOCK, sequence_length) if is_masked else sequence_length
    q = _heads(model.heads // ranks, queries, model.head_width, dtype, device)
    k = _heads(max(1, model.kv // ranks), sequence_length, model.head_width, dtype, device)
    mask = None
    if is_masked:
        if takes_varlen(q) and has_flash_attention(device):
            return "varlen"
        mask = torch.ones(1, 1, queries, sequence_length, dtype=torch.bool, device=device)
    k = heads_of_kernel(q, k, mask)
    return chosen_attention(q, k, k, mask)


def _heads(heads: int, length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an example tensor of one sequence, (1, H, S, Q), with memory layout (1, S, H, Q)."""
    return torch.empty(1, length, heads, width, dtype=dtype, device=device).transpose(1, 2).requires_grad_()
