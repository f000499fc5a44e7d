"""Checks, before training, that this device's fused attention computes the blocks of ring attention correctly.

Nothing is sharded or sent. A kernel that is wrong for a device, dtype or mask would silently train a wrong model, so a
small block of each kind in a ring is compared with the eager kernel first.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchllm.config.errors import UserError
from torchllm.models.attention_kernels import BlockKernel, EagerKernel, Entries, KeyMask, PartialAttention

LENGTH = 48
"""queries and keys of the blocks"""
TOLERANCES = {
    torch.float32: 1e-3,  # allows for factors rounded to tf32, by up to 2**-11
    torch.bfloat16: 3e-2,  # bfloat16 rounds by up to 2**-8, in sums of some terms
}
"""largest difference from float64, of the largest element"""


class _Inputs(NamedTuple):
    """Random inputs of one block."""

    q: Tensor
    """(1, H, S, Q)"""
    kv: Tensor
    """(2, 1, K, S, Q)"""
    d_out: Tensor
    """(1, H, S, Q)"""

    def widened(self) -> "_Inputs":
        """Return the same numbers in float64."""
        return _Inputs(*(tensor.double() for tensor in self))


def check_kernel(kernel: BlockKernel, device: torch.device, groups: int, width: int, dtype: torch.dtype) -> None:
    """Compare a kernel in the run's `dtype` with the eager kernel in float64 on each kind of block of a ring.

    groups: query heads per key-value head; width: of a head. Raises UserError if they differ or the kernel fails.
    """
    generator = torch.Generator().manual_seed(0)
    heads = (2 * groups, LENGTH, width)
    q = torch.randn(1, *heads, generator=generator).to(device, dtype)
    d_out = torch.randn(1, *heads, generator=generator).to(device, dtype)
    kv = torch.randn(2, 1, 2, LENGTH, width, generator=generator).to(device, dtype)
    for mask in _masks(device):
        try:
            errors = _errors(kernel, _Inputs(q, kv, d_out), mask)
        except RuntimeError as error:
            raise _unusable(dtype, str(error).splitlines()[0]) from error
        for name, error_of in errors.items():  # report the first wrong result: later ones are computed from it
            if not error_of <= TOLERANCES[dtype]:  # not `>`: nan must fail
                raise _unusable(dtype, f"{name} is off by {error_of:.1e}")


def _masks(device: torch.device) -> list[KeyMask]:
    """Return one mask of each kind, without and with documents: for a rank's own keys, and for another rank's."""
    same_rank, queries, keys = torch.tensor(
        [[0, 20, 40, LENGTH], [0, 0, 20, LENGTH], [0, 10, LENGTH, LENGTH]], dtype=torch.int32, device=device
    )
    documents = Entries(same_rank, same_rank)
    other_rank = Entries(queries, keys)  # some queries see nothing, and nothing sees some keys
    return [KeyMask(causal=True), KeyMask(), KeyMask(True, documents), KeyMask(entries=other_rank)]


def _errors(kernel: BlockKernel, inputs: _Inputs, mask: KeyMask) -> dict[str, float]:
    """Return how far each result is from the eager kernel's in float64, as a share of the largest element, in order."""
    expected = _forward_backward(EagerKernel(kernel.scale), inputs.widened(), mask)
    results = _forward_backward(kernel, inputs, mask)
    errors = {}
    for name, expected_result in expected.items():
        difference = (results[name].double() - expected_result).abs().max()
        errors[name] = float(difference / expected_result.abs().max())
    return errors


def _forward_backward(kernel: BlockKernel, inputs: _Inputs, mask: KeyMask) -> dict[str, Tensor]:
    """Return out, lse, dq, dk and dv by name.

    As in a ring, the tensors are slices of larger ones, and the backward gets the out and lse of rows that have seen
    more than this block.
    """
    q = _as_second_half(inputs.q)
    d_out = _as_second_half(inputs.d_out)
    out, lse = kernel.forward(q, inputs.kv, mask)
    out = _as_second_half(out)
    lse = _as_second_half(lse.logaddexp(torch.ones_like(lse)))
    gradients = kernel.backward(d_out, q, inputs.kv, PartialAttention(out, lse), mask)
    return {"out": out, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}


def _as_second_half(x: Tensor) -> Tensor:
    """Return a copy that is a view of the second half of twice the rows."""
    return torch.cat((torch.zeros_like(x), x), dim=2)[:, :, x.shape[2] :]


def _unusable(dtype: torch.dtype, reason: str) -> UserError:
    name = str(dtype).removeprefix("torch.")
    return UserError(
        f"parallel.cp: this device's fused attention is not usable for the ring in {name} ({reason}): "
        'use model.attention = "eager", or parallel.cp_method = "ulysses"'
    )
