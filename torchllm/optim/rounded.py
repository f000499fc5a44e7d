"""AdamW with weights, moments or both in bfloat16, rounded stochastically.

A float32 becomes one of the two nearest bfloat16, up with a probability equal to its distance from the lower one: 16
random bits are added to its bits, of which the lower 16 are then cut off. The mean of many roundings is the float32
(Gupta et al. 2015, arXiv 1502.02551), while the nearest bfloat16 would lose every change of less than 2⁻⁹ of the
value: a second moment with beta2 = 0.999 would hardly move, nor would a weight at the end of a schedule.

The random bits are a hash of (seed, step, canonical parameter name, global element index), as in
`parallel/initialize.py`: every layout rounds equally, and so does a run that is resumed. A step that is not applied
rounds values that bfloat16 has, and so changes no bit.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchllm.config import Optimizer as OptimizerConfig
from torchllm.config.applied_keys import config_in_use
from torchllm.facts.parameters import canonical_name
from torchllm.optim.fused import Group, ShardedAdamW, start_adamw, update_by_adamw
from torchllm.parallel.initialize import hashed, key_of, with_indices
from torchllm.parallel.local_tensor import local_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class RoundedAdamW(ShardedAdamW):
    """torch's fused AdamW over this rank's shards, with weights or moments in bfloat16 between the steps.

    A step needs float32 copies of them, and of a bfloat16 gradient, of one parameter at a time.
    """

    def __init__(self, groups: list[Group], config: OptimizerConfig, stages: Sequence[nn.Module]) -> None:
        self.seed = config_in_use().run.seed
        self.store: Callable[[Tensor, str, Tensor], None] = self._store
        """replaceable: a dry run has no numbers to round"""
        self.state_dtype: torch.dtype = getattr(torch, config.state_dtype)
        named = [item for stage in stages for item in stage.named_parameters()]
        self.names: dict[Tensor, str] = {parameter: canonical_name(name) for name, parameter in named}
        super().__init__(groups, config)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group with its state; torch's constructor adds every group by this."""
        torch.optim.AdamW.add_param_group(self, param_group)
        start_adamw(self.param_groups[-1], self.state, self.state_dtype)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad)

    def _update(self, group: Group, parameter: Tensor, gradient: Tensor) -> None:
        """Update float32 copies of a parameter and its moments, and store them again."""
        state = self.state[parameter]
        weight = local_tensor(parameter).detach().float()  # of a float32 tensor no copy
        weight.grad = local_tensor(gradient).float()
        exact = {name: self._load(parameter, name) for name in MOMENTS}
        update_by_adamw({**group, "params": [weight]}, {weight: state | exact}, self.found_inf)
        for name, tensor in {"weight": weight, **exact}.items():
            self.store(parameter, name, tensor)

    def _load(self, parameter: Tensor, name: str) -> Tensor:
        """Return this rank's part of a moment as float32."""
        return local_tensor(self.state[parameter][name]).float()

    def _store(self, parameter: Tensor, name: str, exact: Tensor) -> None:
        """Round an updated copy to bfloat16 if the tensor is stored so. name: of a moment, or weight."""
        state = self.state[parameter]
        stored = local_tensor(parameter if name == "weight" else state[name])
        if stored.dtype == torch.bfloat16:
            key = key_of(self.seed, f"{self.names[parameter]}.{name}")
            round_stochastically(parameter, exact, stored, key, state["step"])


def round_stochastically(parameter: Tensor, exact: Tensor, rounded: Tensor, key: int, step: Tensor) -> None:
    """Write float32 numbers into a bfloat16 tensor: this rank's parts of tensors that are cut like the parameter.

    key: of the stream of random bits. step: number of the step, (), on the device.
    """
    key_of_step = hashed(step.long(), key)
    for index, values, target in with_indices(parameter, exact, rounded):
        noise = hashed(index, key_of_step).bitwise_and_(0xFFFF).int()
        # The lower half is 0 then, so that the conversion to bfloat16 is exact.
        target.copy_((values.view(torch.int32) + noise).bitwise_and_(-0x10000).view(torch.float32))
