"""Tensor parallelism of the modules that multi-token prediction adds to a block."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleOutput, RowwiseParallel, parallelize_module

from torchllm.parallel.tensor import WholeNorm


def styles_of_prediction(block: nn.Module, hidden: Placement, shares_experts: bool) -> dict[str, ParallelStyle]:
    """Return the style of each module, by name. hidden: placement of hidden states (B, S, D)."""
    of_tokens: Placement = Partial() if isinstance(hidden, Shard) else Replicate()  # gradient of a whole weight
    norms: dict[str, ParallelStyle] = {name: WholeNorm(of_tokens) for name in ("enorm", "hnorm", "post_norm")}
    return norms | {"eh_proj": RowwiseOfWhole(hidden)}


class RowwiseOfWhole(ParallelStyle):
    """A linear layer cut by input features, whose input has all of them on every rank.

    FOOTGUN: torch's RowwiseParallel returns a sum that is still in flight; a compiled function that takes it as an
    input fails in its backward.
    """

    def __init__(self, hidden: Placement) -> None:
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        partial_sums = RowwiseParallel(input_layouts=self.hidden, output_layouts=Partial(), use_local_output=False)
        finished = PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=self.hidden)
        return parallelize_module(parallelize_module(module, device_mesh, partial_sums), device_mesh, finished)
