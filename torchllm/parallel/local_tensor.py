"""This rank's part of a tensor, also where FSDP gathers the weight as float8 (`float8.py`)."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, of its gradient or of its state, as a plain tensor."""
    return _plain_tensor(tensor.to_local()) if isinstance(tensor, DTensor) else tensor


def is_gathered_as_float8(parameter: Tensor) -> bool:
    """Return whether FSDP gathers a parameter as float8: its shard has torch's hook that makes the gathered tensor."""
    return isinstance(parameter, DTensor) and hasattr(parameter.to_local(), "fsdp_pre_all_gather")


def scale_gathered_weights(stages: Iterable[nn.Module]) -> None:
    """Compute the scale of every weight that is gathered as float8; call it on all ranks when weights have changed.

    Without it the ranks reduce the largest element of each weight at each of its gathers.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for stage in stages:
        precompute_float8_dynamic_scale_for_fsdp(stage)


def _plain_tensor(local: Tensor) -> Tensor:
    """Return the float32 tensor within a shard that is gathered as float8; any other tensor unchanged.

    They share their memory. torchao's tensor is a wrapper without storage, which cannot be copied, hashed or written.
    """
    if not hasattr(local, "fsdp_pre_all_gather"):
        return local
    wrapper: Any = local.detach()  # without its scale: the next line would read its value, and wait for the device
    (name, *_), _ = wrapper.__tensor_flatten__()
    plain: Tensor = getattr(wrapper, name)
    return plain
