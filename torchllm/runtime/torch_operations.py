"""Private operations of torch that few runs call, as `torch_compat.py` has the others: attention and messages."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import varlen_attn

VARLEN_ATTENTION = torch.ops.torch_attn._varlen_attn.default
"""the operation that `torch.nn.attention.varlen.varlen_attn` calls; private; selective recomputation looks for it"""

VARLEN_FLASH = torch.ops.aten._flash_attention_forward
"""attention within sequences by torch's flash kernel; private; from 2.15 on `varlen_attn` may take cuDNN's instead, and
the next operation reads flash attention's log-sum-exp alone"""

VARLEN_GRADIENTS = torch.ops.aten._flash_attention_backward
"""its gradients, from any out and lse; private; autograd passes out and lse of one call's keys, a ring of all keys"""


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, window: int = 0, scale: float | None = None
) -> Tensor:
    """Return the causal attention within sequences of unequal length: q (T, H, Q), k and v (T, K, Q) -> (T, H, Q).

    offsets: start of each sequence, and end of the last one, (N + 1,) int32. longest: upper bound of their length.
    window: number of tokens that a token sees, itself included; 0: all before it. scale: of scores; None: 1 / sqrt(Q).
    """
    options = {"window_size": (window - 1, 0), "scale": scale, **_group_option(q, k)}  # -1: no limit
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, **options)
    assert isinstance(out, Tensor)  # without unused results
    return out


def _group_option(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Return the argument of varlen attention for grouped query heads: from torch 2.12 on; 2.11 detects them."""
    return {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in _VARLEN_PARAMETERS else {}


_VARLEN_PARAMETERS = inspect.signature(varlen_attn).parameters


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send x[i] to rank i of `group` and return the received tensors: (n, ...) -> (n, ...) for n ranks.

    Not differentiable. Private: the public `all_to_all_single` writes into a tensor that it is given, which selective
    recomputation cannot keep.
    """
    rows_per_rank = [1] * len(x)
    return end_all_to_all(begin_all_to_all(x, rows_per_rank, rows_per_rank, group))


def begin_all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Start sending sent[i] rows of x to rank i of `group`: (N, ...) -> (M, ...), for `end_all_to_all`.

    sent: their sum is N; received: rows from each rank, their sum is M. Not differentiable. Private: as `all_to_all`.
    """
    return torch.ops._c10d_functional.all_to_all_single(x, received, sent, group.group_name)


def end_all_to_all(x: Tensor) -> Tensor:
    """Wait for the result of `begin_all_to_all`. Not differentiable. Private: as `all_to_all`."""
    return torch.ops._c10d_functional.wait_tensor(x)


@contextmanager
def gradients_inside_operation() -> Iterator[None]:
    """Let a custom operation (`torch.library.custom_op`) use `torch.autograd.grad` inside.

    Private: there torch excludes autograd, and `torch.func.vjp`, which works without, fails under a dispatch mode.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        yield


def chosen_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """Return the kernel that `scaled_dot_product_attention` takes: math, flash, efficient, cudnn or overrideable.

    Arguments (B, H, S, Q) as for that function; without a mask, attention is causal. Private: public functions such as
    `torch.backends.cuda.can_use_flash_attention` tell which kernels could run, not which one torch prefers.
    """
    grouped = q.shape[1] != k.shape[1]
    number = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return SDPBackend(number).name.partition("_")[0].lower()
