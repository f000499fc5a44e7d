"""The attention cores that a run must choose, each a value of `model.attention`: see `attention.py`."""

import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.models.attention import Core
from torchllm.models.document_attention import ATTENTION_OPERATIONS, visible_keys
from torchllm.models.layers import soft_capped, widened

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def causal_mask(queries: int, keys: int, device: torch.device, window: int = 0) -> Tensor:
    """Return the keys that each query sees, (queries, keys) bool: keys that are not later.

    window: only the last `window` of these; 0: all.
    """
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
    return visible.triu(1 - window) if window else visible


class EagerAttention(Core):
    """Computes plain products and a softmax, as reference for tests. The compiled softmax is one fused kernel.

    Scores and mask take S x S memory: use another core for long sequences.
    """

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Tensor | None:
        """Return the keys that each query sees, the same for all heads: (B, 1, S, S)."""
        return None if document_ids is None else visible_keys(document_ids, document_ids, self.window).unsqueeze(1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *of_heads: Tensor) -> Tensor:
        """of_heads: further inputs of `weights`, (H)."""
        if mask is None:
            mask = causal_mask(q.shape[1], k.shape[1], q.device, self.window)
        queries_per_key = q.shape[2] // k.shape[2]  # neighboring query heads share a key head
        k = k.repeat_interleave(queries_per_key, dim=2)
        v = v.repeat_interleave(queries_per_key, dim=2)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        # The softmax in float32: the sum of many small weights in 16 bits would lose them.
        scores = soft_capped(widened(torch.einsum("bqhd,bkhd->bhqk", q, k)) * scale, self.softcap)
        weights = self.weights(scores.masked_fill(~mask, -torch.inf), *of_heads).to(v.dtype)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    def weights(self, scores: Tensor, *of_heads: Tensor) -> Tensor:
        """Return the weights of the keys: (B, H, S, S) -> (B, H, S, S)."""
        return scores.softmax(-1)


class FlashAttention(Core):
    """Calls the kernel of FlashAttention 3 (package flash_attn_interface), else of flash-attn-4, else of flash-attn.

    It is causal only, so the config refuses it with document masks. UserError if none of the packages is installed, or
    if flash-attn's kernels for AMD's GPUs would leave out a window or a soft cap.
    """

    def __init__(self, view: Model) -> None:
        super().__init__(view)
        self.kernel = _flash_attention_3() or _flash_attention_4(view) or _flash_attention_2()
        backend = sys.modules.get(self.kernel.__module__)
        if (view.window or view.score_softcap) and getattr(backend, "USE_TRITON_ROCM", False):
            # FOOTGUN: seen in 2.8.3, whose Triton kernels take both arguments and read neither.
            raise UserError(
                'model.attention = "flash": with FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE flash-attn ignores windows and '
                'soft caps of scores. Use "flex"; without model.score_softcap "sdpa" does as well'
            )
        window_size = (view.window - 1, 0) if view.window else (-1, -1)
        """tokens that a query sees before and behind its own; -1: all"""
        self.options: dict[str, Any] = {"causal": True, "window_size": window_size, "softmax_scale": self.scale}
        if self.softcap:  # old versions of the package have none
            self.options["softcap"] = self.softcap

    @staticmethod
    def mask(document_ids: Tensor | None, document_limit: int = 0) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        out: Tensor | tuple[Tensor, Tensor] = self.kernel(q, k, v, **self.options)
        return out[0] if isinstance(out, tuple) else out  # flash-attn-4 returns the sums of the softmax, too


def _flash_attention_3() -> Callable[..., Any] | None:
    """Return the kernel for Hopper GPUs; None on another GPU, or if its package is not installed."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return None
    _save_results_of("flash_attn_3::_flash_attn_forward", "flash_attn_3::fwd")
    kernel: Callable[..., Any] = flash_attn_func
    return kernel


def _save_results_of(*operations: str) -> None:
    """Let selective recomputation save the results of a package's operations, of those that its version has."""
    for name in operations:
        namespace, _, operation = name.partition("::")
        if (found := getattr(getattr(torch.ops, namespace), operation, None)) is not None:
            ATTENTION_OPERATIONS.add(found.default)


def _flash_attention_4(view: Model) -> Callable[..., Any] | None:
    """Return the kernel for Hopper and Blackwell GPUs; None on another GPU, or if its package is not installed.

    On Blackwell it has no heads of 130 to 248 features. Its kernels are no operations of torch, so selective
    recomputation computes them again.

    FOOTGUN: flash-attn 2.8 brings an early copy of this module, which flash-attn-4 replaces.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() and not torch.version.hip else (0, 0)
    has_width = capability < (10, 0) or view.head_width <= 128 or view.head_width == 256
    if capability < (9, 0) or not has_width:
        return None
    try:
        version("flash-attn-4")
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None
    kernel: Callable[..., Any] = torch.compiler.disable(flash_attn_func)  # it compiles its kernels when it is called
    return kernel


def _flash_attention_2() -> Callable[..., Any]:
    """Return the kernel of the package flash-attn. Raises UserError if it is not installed."""
    try:
        from flash_attn import flash_attn_func
    except ImportError as error:
        raise UserError(
            f"model.attention = \"flash\" cannot be used here: {error}. Install an extra (pip install -e '.[flash]', "
            "which compiles it, or '.[flash4]' for Hopper and Blackwell) or use \"sdpa\"."
        ) from error
    _save_results_of("flash_attn::_flash_attn_forward")
    kernel: Callable[..., Any] = flash_attn_func
    return kernel


class FlexAttention(Core):
    """Calls torch's FlexAttention, which skips blocks that documents and windows mask completely.

    It has no backward on a CPU: UserError there.
    """

    shares_causal_mask = True

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> "BlockMask | None":
        from torchllm.models.block_mask import document_block_mask

        return None if document_ids is None else document_block_mask(document_ids, self.window)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: "BlockMask | None") -> Tensor:
        from torchllm.models.block_mask import causal_block_mask

        if q.device.type == "cpu" and any(tensor.requires_grad for tensor in (q, k, v)):
            raise UserError('model.attention = "flex" has no backward on a CPU: use "sdpa" or "eager"')
        if mask is None:
            mask = causal_block_mask(q.shape[1], q.device, self.window)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, S, Q)
        grouped = q.shape[1] != k.shape[1]
        options = {"score_mod": capping(self.softcap), "scale": self.scale, "enable_gqa": grouped}
        out = compiled_flex_attention()(q, k, v, block_mask=mask, **options)
        return out.transpose(1, 2)


@cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    """Return FlexAttention compiled (uncompiled it is not fused); one compilation serves all layers."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@cache
def capping(softcap: float) -> Callable[..., Tensor] | None:
    """Return the change of FlexAttention's scores, one function for all layers, or each would compile; None: none."""
    if not softcap:
        return None

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_capped(score, softcap)

    return capped
