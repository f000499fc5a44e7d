"""Tensor parallelism of experts and a dense layer: each is cut as it is alone, and summed before its second norm."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from torchllm.parallel.tensor import WholeInput, WholeNorm
from torchllm.parallel.tensor_experts import style_of_mixture, style_of_routed


def styles_of_beside(layer: nn.Module, hidden: Placement, shares_experts: bool) -> dict[str, ParallelStyle]:
    """Return the style of each module inside the layer, by name.

    hidden: placement of hidden states (B, S, D). shares_experts: each rank has some experts, whole.
    """
    of_tokens: Placement = Partial() if isinstance(hidden, Shard) else Replicate()  # gradient of a whole weight
    return {
        "routed": RoutedAlone(hidden, shares_experts),
        "routed.input_norm": WholeNorm(Partial()),
        "routed_norm": WholeNorm(of_tokens),
        "dense_input_norm": WholeNorm(of_tokens),
        "dense": WholeInput(hidden),
        "dense.gate_proj": ColwiseParallel(),
        "dense.up_proj": ColwiseParallel(),
        "dense.down_proj": RowwiseParallel(output_layouts=hidden),
        "dense_norm": WholeNorm(of_tokens),
    }


class RoutedAlone(ParallelStyle):
    """Routed experts whose results are summed over tp without another layer's."""

    def __init__(self, hidden: Placement, shares_experts: bool) -> None:
        self.inside = style_of_routed(hidden, shares_experts)
        self.around = style_of_mixture(hidden, shares_experts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.around._apply(self.inside._apply(module, device_mesh), device_mesh)
