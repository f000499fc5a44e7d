"""What a computation does, operation by operation."""

from typing import Any

from torch.distributed.tensor import DTensor

from torchllm.runtime.torch_compat import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Notes the operations that run while it is active: on a GPU each is a kernel or a few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # their inner operations are dispatched here too
        self.all.append(func)
        return func(*args, **(kwargs or {}))
