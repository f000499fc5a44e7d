"""Train in float64 throughout, also where a fork converts to float32."""

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_OF_TORCH = str(Path(torch.__file__).parent)


class Float64(TorchFunctionMode):
    """While entered, float64 is torch's default type, and a float64 tensor that is to be made float32 stays as it is.

    So `x.float()` in the model of a fork rounds nothing. What it writes into its own float32 tensors is rounded.
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
        """Call a function of torch, with float64 for the float32 that is asked for."""
        named = named or {}
        if given and _is_float64(given[0]) and function is not Tensor.view:  # a view has the same bits
            function = Tensor.double if function is Tensor.float else function
            given = (given[0], *map(_widened, given[1:]))
            named = {name: _widened(value) for name, value in named.items()}
        result = function(*given, **named)
        is_float32 = isinstance(result, Tensor) and result.dtype == torch.float32
        if is_float32 and not self.rounded and any(map(_is_float64, given)):
            self.rounded = _caller()
        return result


def _is_float64(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


def _widened(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


def _caller() -> str:
    """Return file:line of the innermost call outside of torch and of this file."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((_OF_TORCH, __file__)):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"
