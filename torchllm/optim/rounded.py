"""AdamW with weights, moments or both in bfloat16, rounded stochastically; `eightbit.py` has moments in 8 bits.

A float32 becomes one of the two nearest bfloat16, up with a probability equal to its distance from the lower one: 16
random bits are added to its bits, and the lower 16 are then cut off. The mean of many roundings is the float32
(Gupta et al. 2015, arXiv 1502.02551), while the nearest bfloat16 would lose every change of less than 2⁻⁹ of the
value: a second moment with beta2 = 0.999 would hardly move, nor would a weight at the end of a schedule.

The random bits are a hash of (seed, step, canonical parameter name, global element index), as in
`parallel/initialize.py`: every layout rounds equally, and so does a run that is resumed. A step that is not applied
rounds values that bfloat16 has, and so changes no bit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchllm.config import Optimizer as OptimizerConfig
from torchllm.config.applied_keys import config_in_use
from torchllm.facts.parameters import canonical_name
from torchllm.optim.fused import Group, ShardedAdamW, update_by_adamw
from torchllm.parallel.initialize import hashed, key_of, with_indices
from torchllm.parallel.local_tensor import local_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class Rows(NamedTuple):
    """Rows of this rank's part of a parameter, and of the tensors that are cut like it."""

    of: Callable[[Tensor], Tensor]
    """returns these rows of a tensor"""
    first: int
    """index of the first one on this rank"""


ALL_ROWS = Rows(local_tensor, 0)


class RoundedState:
    """Keeps the moments of an optimizer in bfloat16 between its steps; also rounds weights that are bfloat16."""

    def __init__(self, stages: Sequence[nn.Module], dtype: torch.dtype, device: torch.device | None = None) -> None:
        """dtype: of the moments, float32 or bfloat16. device: of the state; None: each parameter's."""
        self.seed = config_in_use().run.seed
        self.dtype = dtype
        self.device = device
        named = [item for stage in stages for item in stage.named_parameters()]
        self.names: dict[Tensor, str] = {parameter: canonical_name(name) for name, parameter in named}
        self.store: Callable[..., None] = self._store
        """replaceable: a dry run has no numbers to round"""

    def start(self, parameter: Tensor, moments: Sequence[str]) -> dict[str, Tensor]:
        """Return the state of a parameter: zeros, and the number of its steps."""
        state = {"step": torch.zeros((), dtype=torch.float32, device=self.device or parameter.device)}
        return state | {name: torch.zeros_like(parameter, dtype=self.dtype, device=self.device) for name in moments}

    def load(self, state: Mapping[str, Tensor], name: str, rows: Rows = ALL_ROWS) -> Tensor:
        """Return rows of a moment as float32."""
        return rows.of(state[name]).float()

    def _store(
        self,
        parameter: Tensor,
        state: Mapping[str, Tensor],
        name: str,
        exact: Tensor,
        found_inf: Tensor,
        rows: Rows = ALL_ROWS,
    ) -> None:
        """Store an updated copy of rows, rounded if they are bfloat16. FOOTGUN: `exact` may be overwritten.

        name: of a moment, or weight. found_inf: if it is not 0, `exact` equals the stored rows.
        """
        stored = rows.of(state[name])
        if stored.dtype == torch.bfloat16:
            round_stochastically(parameter, exact, stored, self.key(parameter, name), state["step"], rows.first)
        elif stored.data_ptr() != exact.data_ptr():  # AdamW updates float32 in place
            stored.copy_(exact)

    def key(self, parameter: Tensor, name: str) -> int:
        """Return the key of the random bits of a moment, or of the weight."""
        return key_of(self.seed, f"{self.names[parameter]}.{name}")

    def update_by_adamw(self, group: Group, states: Mapping[Tensor, Any], found_inf: Tensor) -> None:
        """Update the parameters of a group that have a gradient, one at a time."""
        for parameter in group["params"]:
            if parameter.grad is not None:
                weight, gradient = local_tensor(parameter), local_tensor(parameter.grad)
                self.update_part(group, parameter, {**states[parameter], "weight": weight}, gradient, found_inf)

    def update_part(
        self, group: Group, parameter: Tensor, state: Mapping[str, Tensor], gradient: Tensor, found_inf: Tensor
    ) -> None:
        """Update this rank's part of a parameter by float32 copies.

        state: moments and counter, and the weight, as a plain tensor; all on one device, as the gradient.
        """
        weight = state["weight"].detach().float()  # of a float32 tensor no copy
        weight.grad = gradient.float()
        exact = {name: self.load(state, name) for name in MOMENTS}
        update_by_adamw({**group, "params": [weight]}, {weight: {**state, **exact}}, found_inf)
        for name, tensor in {"weight": weight, **exact}.items():
            self.store(parameter, state, name, tensor, found_inf)


class RoundedAdamW(ShardedAdamW):
    """torch's fused AdamW over this rank's shards, whose moments are stored in fewer bits between the steps."""

    def __init__(self, groups: list[Group], config: OptimizerConfig, storage: RoundedState) -> None:
        self.storage = storage
        super().__init__(groups, config)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group with its state; torch's constructor adds every group by this."""
        torch.optim.AdamW.add_param_group(self, param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter] = self.storage.start(parameter, MOMENTS)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            self.storage.update_by_adamw(group, self.state, self.found_inf)


def round_stochastically(
    parameter: Tensor, exact: Tensor, rounded: Tensor, key: int, step: Tensor, first: int = 0
) -> None:
    """Write float32 numbers into a bfloat16 tensor: this rank's parts of tensors that are cut like the parameter.

    key: of the stream of random bits. step: number of the step, (), on the device. first: as in `with_indices`.
    """
    key_of_step = hashed(step.long(), key)
    for index, values, target in with_indices(parameter, exact, rounded, first=first):
        noise = hashed(index, key_of_step).bitwise_and_(0xFFFF).int()
        # The lower half is 0 then, so that the conversion to bfloat16 is exact.
        target.copy_((values.view(torch.int32) + noise).bitwise_and_(-0x10000).view(torch.float32))
