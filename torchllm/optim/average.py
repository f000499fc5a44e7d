"""An exponential moving average of the weights, with the sharding of the weights.

While the learning rate is high, averages of weights generalize better than the weights of any one step (Izmailov et
al. 2018, arXiv 1803.05407). It needs no communication.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchllm.config.applied_keys import BY_LIBRARY, applied, needs_state, wants_average
from torchllm.facts.parameters import canonical_name
from torchllm.parallel.local_tensor import is_gathered_as_float8, local_tensor, scale_gathered_weights

EMA = "ema."
"""prefix of the averages' names: `ema.<canonical parameter name>`"""

_AVERAGES: "weakref.WeakSet[WeightAverage]" = weakref.WeakSet()


class WeightAverage:
    """The average of this rank's weights: after each applied step, decay x average + (1 - decay) x weight.

    Buffers, e.g. the routers' biases, are averaged like weights.

    With a decay of 0 it has no tensors, and its methods do nothing.
    """

    def __init__(self, stages: Sequence[nn.Module], decay: float, offload: bool = False) -> None:
        """Begin with the weights of `stages`. Call it before the first step, while FSDP's weights are sharded.

        offload: keep the averages in the host's memory. FOOTGUN: each step waits for the device and for copies of all
        weights.
        """
        self.decay = decay
        self.stages = stages
        self.tensors: dict[str, Tensor] = {}
        """averages by name, for `Checkpointer(extra_state=...)`; they have the sharding of the weights"""
        self.weights: dict[str, list[Tensor]] = {}
        """by the same names; two where a rank holds both copies of a tied embedding"""
        self.device = torch.device("cpu") if offload else None
        """of the averages; None: the weights'"""
        self._is_followed = self._is_restarted = False
        _AVERAGES.add(self)
        if not decay:
            return
        for stage in stages:
            for name, weight in stage.named_parameters():
                if not weight.requires_grad:  # frozen: it is its own average
                    continue
                self.weights.setdefault(f"{EMA}{canonical_name(name)}", []).append(weight)
            for name, buffer in stage.named_buffers():
                self.weights.setdefault(f"{EMA}{canonical_name(name)}", []).append(buffer)
        for name, (averaged, *_) in self.weights.items():
            # The average of weights in bfloat16 is float32: it moves by less than bfloat16 can tell.
            dtype = torch.float32 if averaged.dtype == torch.bfloat16 else averaged.dtype
            self.tensors[name] = torch.zeros_like(averaged, dtype=dtype, device=self.device).detach()
        needs_state("optimizer.ema_decay", self.tensors)
        self._copy_weights(self.tensors)

    def restart(self, names: Sequence[str]) -> None:
        """Reset averages to the current weights. names: the averages that a checkpoint did not have.

        Call it when the weights of the first step are loaded, initial or from a checkpoint.
        """
        self._copy_weights(names)
        self._is_restarted = True
        self._note_applied()

    @torch.no_grad()
    def _copy_weights(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.tensors:
                local_tensor(self.tensors[name]).copy_(local_tensor(self.weights[name][0]))

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook the update into an optimizer: it runs after each step that `apply_if_finite` takes."""
        if self.tensors:
            optimizer.register_step_post_hook(self._update)
        self._is_followed = True
        self._note_applied()

    def _note_applied(self) -> None:
        if self._is_followed and self._is_restarted:
            applied("optimizer.ema_decay", self.decay)
            applied("optimizer.ema_offload", self.device is not None)

    @torch.no_grad()
    def _update(self, optimizer: Any, *_: object) -> None:
        """Move the averages towards the weights; no change if the step was not applied.

        Each operation rounds once. A fused one would round differently by an element's position in its shard.
        """
        skipped = torch.as_tensor(getattr(optimizer, "found_inf", 0))  # without it, it is not called for a skipped step
        share = ((skipped == 0) * (1.0 - self.decay)).to(self.device or skipped.device)
        for name, average in self.tensors.items():
            local = local_tensor(average)
            weight = local_tensor(self.weights[name][0]).to(self.device or local.device)
            local.add_((weight - local).mul_(share))

    @contextmanager
    def in_place_of_weights(self, wanted: bool) -> Iterator[None]:
        """Return a context that replaces the model's weights by the averages, if wanted."""
        applied("evaluate.ema", wanted)
        if not wanted:
            yield
            return
        with self.in_place():
            yield

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context that replaces the model's weights by the averages, rounded to the dtype of the weights."""
        unlike = [name for name in self.tensors if not self._is_like_weight(name)]
        former = {name: self._copy_of_weight(name) for name in unlike}
        self._swap()
        self._fill({name: local_tensor(self.tensors[name]) for name in unlike})
        self._scale()
        try:
            yield
        finally:
            self._fill(former)
            self._swap()
            self._scale()

    def _is_like_weight(self, name: str) -> bool:
        """Return whether an average has the dtype of its weight, and is on the same device."""
        average, weight = self.tensors[name], self.weights[name][0]
        return average.dtype == weight.dtype and average.device == weight.device

    def _copy_of_weight(self, name: str) -> Tensor:
        """Return a copy of this rank's part of a weight, on the device of the averages."""
        weight = local_tensor(self.weights[name][0]).detach()
        return weight.to(self.device or weight.device, copy=True)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        """Write values, by name, into this rank's parts of weights."""
        for name, value in values.items():
            for copy in self.weights[name]:
                local_tensor(copy).copy_(value)

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap averages and weights of the same dtype and device, one tensor at a time."""
        for name, average in self.tensors.items():
            if not self._is_like_weight(name):
                continue
            local = local_tensor(average)
            former_weight = local_tensor(self.weights[name][0]).clone()
            self._fill({name: local})
            local.copy_(former_weight)

    def _scale(self) -> None:
        """Compute the scales of weights that FSDP gathers as float8. Call it when all of the weights are replaced."""
        if any(is_gathered_as_float8(weight) for copies in self.weights.values() for weight in copies):
            scale_gathered_weights(self.stages)


def average_of(stages: Sequence[nn.Module]) -> WeightAverage | None:
    """Return the average of the weights of these stages, if there is one."""
    return next((average for average in _AVERAGES if average.stages == stages), None)


@contextmanager
def average_in_place_if_due(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Return a context with the average of the weights in their place if `evaluate.ema` wants it and no recipe puts it.

    For recipes that lack `in_place_of_weights`: removed, or copied before the key.
    """
    average = average_of(stages) if wants_average() else None
    if average is None:
        yield
        return
    applied("evaluate.ema", BY_LIBRARY)
    with average.in_place():
        yield
