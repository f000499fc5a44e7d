"""Tensor parallelism of a module with parameters that a fork's kind of block adds (`facts/block_kinds.py`)."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from torchllm.config.errors import UserError
from torchllm.facts.parts.part import Cut


class AddedParameters(ParallelStyle):
    """A module whose forward calls `self.local(parameter)`, which returns this rank's part as a plain tensor.

    colwise: a part of the first dimension, rowwise: of the last one. The gradient of a whole parameter is summed over
    the ranks, unless each of them computes the same.
    """

    def __init__(self, name: str, cuts: set[Cut], sequence_parallel: bool) -> None:
        """name: of the module in the stage. cuts: of its parameters. UserError if there are several."""
        if len(cuts) > 1:
            raise UserError(f"model.block: {name} has parameters that are cut differently: give each cut a module")
        (self.cut,) = cuts
        self.name = name
        is_repeated = self.cut == "whole" and not sequence_parallel
        self.whole_gradient: Placement = Replicate() if is_repeated else Partial()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not hasattr(module, "local"):
            raise UserError(
                f"model.block: {self.name} has parameters, but no attribute `local` for tensor parallelism: "
                "set self.local = lambda parameter: parameter, and let its forward use self.local(parameter)"
            )
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter, device_mesh, [self._placement(parameter) or Replicate()])
            module.register_parameter(name, nn.Parameter(sharded))
        module.local = self._local  # type: ignore[assignment]  # nn.Module's attributes have no one type
        return module

    def _placement(self, parameter: Tensor) -> Placement | None:
        """Return the placement of a parameter that is cut; None: it is whole."""
        return {"colwise": Shard(0), "rowwise": Shard(parameter.dim() - 1)}.get(self.cut)

    def _local(self, parameter: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        return parameter.to_local(grad_placements=[self._placement(parameter) or self.whole_gradient])
