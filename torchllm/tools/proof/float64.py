"""Train in float64 throughout, also where a fork converts to float32."""

import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchllm.runtime.torch_compat import TorchDispatchMode

_OF_TORCH = str(Path(torch.__file__).parent)
_BACKWARD = (torch.autograd.backward, torch.autograd.grad, Tensor.backward)


class Float64(TorchFunctionMode):
    """While entered, float64 is torch's default type, and a float64 tensor that is to be made float32 stays as it is.

    So `x.float()` in the model of a fork rounds nothing. Values written into its own float32 tensors are rounded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounded = ""
        """file:line of the first result in float32 of an operation on float64"""

    def __enter__(self) -> "Float64":
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(torch.float32)

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        """Call a function of torch, with float64 in place of a requested float32."""
        if function is Tensor.float and _is_float64(given[0]):
            function = Tensor.double
        given, named = _widen(given, named) if function is not Tensor.view else (given, named or {})  # the same bits
        with _Recomputation() if function in _BACKWARD else nullcontext():
            result = function(*given, **named)
        is_float32 = isinstance(result, Tensor) and result.dtype == torch.float32
        if is_float32 and not self.rounded and any(map(_is_float64, given)):
            self.rounded = _caller()
        return result


def _is_float64(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


class _Recomputation(TorchDispatchMode):
    """The same for the operators of a recomputation: a function mode does not see calls within a backward pass.

    Operators of the backward pass itself, which builds no graph, stay as they are.
    """

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if torch.is_grad_enabled() and function is not torch.ops.aten.view.dtype:
            given, named = _widen(given, named)
        return function(*given, **(named or {}))


def _widen(given: Any, named: Any) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call with float64 for float32, if its first one is a float64 tensor."""
    named = named or {}
    if not given or not _is_float64(given[0]):
        return given, named
    return (given[0], *map(_widened, given[1:])), {name: _widened(value) for name, value in named.items()}


def _widened(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


def _caller() -> str:
    """Return file:line of the innermost call outside of torch and of this file."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((_OF_TORCH, __file__)):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"
