"""Muon whose momentum, and AdamW's moments of all other parameters, are stored in fewer bits between the steps."""

import torch
from torch import Tensor

from torchllm.config import Optimizer as OptimizerConfig
from torchllm.optim.fused import Group
from torchllm.optim.muon import Muon, OwnedMatrices
from torchllm.optim.rounded import MOMENTS, RoundedState, Rows


class RoundedMuon(Muon):
    """Muon with its moments in bfloat16 or 8 bits. A step needs float32 copies of the moments of one parameter."""

    def __init__(self, groups: list[Group], config: OptimizerConfig, storage: RoundedState) -> None:
        self.storage = storage
        super().__init__(groups, config)

    def _start(self, group: Group) -> None:
        moments = ("momentum_buffer",) if group["orthogonalized"] else MOMENTS
        for parameter in group["params"]:
            self.state[parameter] = self.storage.start(parameter, moments)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Update every parameter that has a gradient."""
        for parameter in {owned.parameter: None for owned in self.matrices}:
            if parameter.grad is not None:
                self.state[parameter]["step"] += self.found_inf == 0  # the roundings of each step are others
        super().step()

    def _update_others(self, group: Group) -> None:
        self.storage.update_by_adamw(group, self.state, self.found_inf)

    def _load_momentum(self, owned: OwnedMatrices) -> Tensor:
        return self.storage.load(self.state[owned.parameter], "momentum_buffer", rows_of(owned))

    def _store_momentum(self, owned: OwnedMatrices, updated: Tensor) -> None:
        kept = torch.where(self.found_inf > 0, self._load_momentum(owned), updated)
        parameter, state = owned.parameter, self.state[owned.parameter]
        self.storage.store(parameter, state, "momentum_buffer", kept, self.found_inf, rows_of(owned))


def rows_of(owned: OwnedMatrices) -> Rows:
    """Return the rows of a stack that are these matrices; all of a single matrix."""
    return Rows(owned.parts, owned.first)
