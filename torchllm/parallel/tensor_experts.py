"""Tensor parallelism of experts.

Sharded: each expert like a dense feed-forward layer, by F; the router is whole, and its gradient is summed. With expert
parallelism (`expert.py`) experts are not cut: each tp rank routes its part of the sequence, and without sequence
parallelism the results are gathered.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
)

from torchllm.models.experts import MixtureOfExperts, RoutedExperts, SharedExperts
from torchllm.parallel.added_parameters import AddedParameters
from torchllm.parallel.shared_sequence import sum_over_sequence
from torchllm.parallel.tensor import WholeInput, gathered


def styles_of_experts(layer: nn.Module, hidden: Placement, shares_experts: bool) -> dict[str, ParallelStyle]:
    """Return the style of each module inside a mixture of experts, and of itself, by name.

    hidden: placement of hidden states (B, S, D). shares_experts: each rank has some experts, whole.
    """
    assert isinstance(layer, MixtureOfExperts)
    of_modules = {"": style_of_mixture(hidden, shares_experts), "routed": style_of_routed(hidden, shares_experts)}
    if layer.shared is None:
        return of_modules
    # They are summed with the routed ones, or by themselves with expert parallelism.
    sums_of_rank = hidden if shares_experts else Partial()
    of_modules |= {
        "shared": SharedExpertsOfAllTokens(gathers=shares_experts),
        "shared.gate_proj": ColwiseParallel(),
        "shared.up_proj": ColwiseParallel(),
        "shared.down_proj": RowwiseParallel(output_layouts=sums_of_rank, use_local_output=False),
    }
    if layer.shared.result_gate is not None:
        of_modules["shared.result_gate"] = AddedParameters("result_gate", {"whole_summed"}, sequence_parallel=False)
    return of_modules


def style_of_mixture(hidden: Placement, shares_experts: bool) -> ParallelStyle:
    """Return the style around router and experts: one gather of their input, and one reduction of the sum of results.

    With expert parallelism routed experts need neither.
    """
    if shares_experts:
        same: dict[str, Any] = {"input_layouts": (hidden,), "desired_input_layouts": (hidden,)}
        return PrepareModuleInputOutput(**same, output_layouts=(hidden,), desired_output_layouts=(hidden,))
    return WholeInput(hidden, PrepareModuleOutput(output_layouts=(Partial(),), desired_output_layouts=(hidden,)))


def style_of_routed(hidden: Placement, shares_experts: bool) -> ParallelStyle:
    """Return the style of routed experts: each rank has some (`shares_experts`) or a part of each."""
    return ExpertsByTokens(hidden) if shares_experts else ExpertsByFeatures()


class ExpertsByFeatures(ParallelStyle):
    """Routed experts, each sharded like a dense feed-forward layer: a rank has a part of F of every expert.

    Every rank routes all tokens in the same way, with the whole router. Its output is a partial sum over tp; so are
    therefore its gradients of the router, which weights that output, and of the input.
    """

    gradient_of_router: Placement = Partial()
    """placement of the gradient of the router's weights"""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RoutedExperts)
        features = {"down_proj": Shard(2), "down_bias": Replicate()}
        for name, whole in list(module.experts.named_parameters(recurse=False)):
            weight = distribute_tensor(whole, device_mesh, [features.get(name, Shard(1))])
            module.experts.register_parameter(name, nn.Parameter(weight))
        module.experts.local = partial(self._own_features, device_mesh.get_local_rank())
        module.router.repeats = device_mesh.size()
        module.router.local = partial(_whole_router, self.gradient_of_router)
        module.own_tokens = self._all_tokens
        module.hidden_states = partial(self._part_of_sum, device_mesh)
        return distribute_module(module, device_mesh)

    def _own_features(self, rank: int, weight: Tensor) -> Tensor:
        """Return a rank's features; of a bias of the sum over ranks all on the first rank, and 0 on the others."""
        assert isinstance(weight, DTensor)
        if weight.placements[0].is_replicate():
            return weight.to_local(grad_placements=[Partial()]) * (rank == 0)
        return weight.to_local()

    def _all_tokens(self, x: Tensor) -> Tensor:
        assert isinstance(x, DTensor)
        return x.to_local(grad_placements=[Partial()])

    def _part_of_sum(self, mesh: DeviceMesh, out: Tensor) -> Tensor:
        return DTensor.from_local(out, mesh, [Partial()], run_check=False)


class ExpertsByTokens(ParallelStyle):
    """Routed experts under expert parallelism: a tp rank routes its part of the sequence, like a data-parallel rank.

    Its gradient of the router is therefore a partial sum over tp.
    """

    gradient_of_router: Placement = Partial()
    """placement of the gradient of the router's weights"""

    def __init__(self, hidden: Placement) -> None:
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RoutedExperts)
        distribute_module(module.router, device_mesh)
        module.router.local = partial(_whole_router, self.gradient_of_router)
        sum_over_sequence(module, device_mesh.get_group())
        module.own_tokens = self._part_of_sequence
        module.hidden_states = partial(self._laid_out, device_mesh)
        return module

    def _part_of_sequence(self, x: Tensor) -> Tensor:
        assert isinstance(x, DTensor)
        return x.redistribute(placements=[Shard(1)]).to_local()

    def _laid_out(self, mesh: DeviceMesh, out: Tensor) -> Tensor:
        part = DTensor.from_local(out, mesh, [Shard(1)], run_check=False)
        return part.redistribute(placements=[self.hidden])


class SharedExpertsOfAllTokens(ParallelStyle):
    """Shared experts. gathers: they gather the sequence over tp if it is sharded.

    Where their input is whole already, the backward of a gather would sum gradients that are summed with others' later.
    """

    def __init__(self, gathers: bool) -> None:
        self.gathers = gathers

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, SharedExperts)
        if self.gathers:
            module.gather = gathered  # type: ignore[assignment]  # a seam
            module.all_tokens = lambda x: module.gather(x)  # type: ignore[operator]
        module.for_own_features = self._plain
        return module

    def _plain(self, x: Tensor) -> Tensor:
        assert isinstance(x, DTensor)
        return x.to_local(grad_placements=[Partial()])


def _whole_router(gradient: Placement, weight: Tensor) -> Tensor:
    """Return the router's weights. gradient: placement of their gradient."""
    assert isinstance(weight, DTensor)
    return weight.to_local(grad_placements=[gradient])
