"""The same experts for the same tokens, in every layout and type.

In bfloat16 a router's input is rounded, so that a token may get other experts, which score nearly the same, in another
layout. The gradient of an expert then lacks a whole token, and no bound can tell that from an error. So the choices of
one process in float32 are recorded, and the routers compared with it are forced to make the same choices; their scores
are still their own.

One process in bfloat16 has the tokens in the same order, so its choices are forced in that order. In a layout a token
is matched to the nearest recorded router input of that process: the same rounding of nearly the same numbers.
FOOTGUN: in float32 two tokens with one id may be nearer to each other than to themselves in bfloat16. If they have
different experts, one may take those of the other: `least_distance` detects it.

In float32 layouts choose for themselves, because their inputs differ only in the last digits. But one of a few thousand
choices may depend on these digits: layouts cannot be compared on such a model, and `gap` detects it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.facts.parameters import canonical_name
from torchllm.models.experts import Router, Routing, group_scores

NEAREST = 0.3
"""largest distance of a token from the recorded one, relative to its norm: correct layouts are below 0.05"""


class RouterUse(NamedTuple):
    """A router in the training step, or in the evaluation after it.

    They are separate because the step moves the routers' biases in between: the same input may have other experts.
    """

    name: str
    """canonical"""
    trains: bool


class Choices(NamedTuple):
    """The choices of a router in one or several forward passes."""

    inputs: Tensor
    """hidden states of the tokens, (N, D) float32"""
    experts: Tensor
    """(N, K) int64, best first"""


def routers_of(stages: Sequence[nn.Module]) -> dict[str, Router]:
    """Return the routers of a rank's stages, by canonical name."""
    routers = {}
    for stage in stages:
        for name, module in stage.named_modules():
            if isinstance(module, Router):
                routers[canonical_name(name)] = module
    return routers


LEAST_GAP = 1.5e-5
"""if two experts were closer, a token could go to one of them in one layout and to the other in another: layouts differ
by 5e-7 in most models, and by 1e-5 in a hybrid of DeltaNet after two steps"""
SEEDS = 60
"""number of seeds tried for such a gap: one of eight has it in a model with ten sparse blocks"""


LEAST_DISTANCE = 0.01
"""bfloat16 moves a token by up to 0.004 of its norm in a first block, where tokens with one id differ as little"""


def least_distance(choices: Mapping[RouterUse, Choices]) -> float:
    """Return how near two tokens of a router with different experts are, relative to their norm; inf without any."""
    least = math.inf
    for inputs, experts in choices.values():
        chosen = experts.sort(dim=-1).values
        differ = (chosen[:, None] != chosen).any(dim=-1)
        distances = torch.cdist(inputs, inputs) / inputs.norm(dim=-1, keepdim=True)
        least = min(least, distances.masked_fill(~differ, math.inf).min().item())
    return least


def told_apart(configs: Iterable[Config], choices_of: Callable[[Config], Mapping[RouterUse, Choices]]) -> Config:
    """Return the first config whose tokens can be told apart in bfloat16; if none, the one that comes nearest to it."""
    by_distance: dict[float, Config] = {}
    for config in configs:
        by_distance[least_distance(choices_of(config))] = config
        if max(by_distance) >= LEAST_DISTANCE:
            break
    return by_distance[max(by_distance)]


class ChoiceRecord:
    """The choices of the routers of a whole model from now on."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        """Record the choices of each router. stages: of one process in float32."""
        self.smallest_gap = math.inf
        """least `gap` of all passes; infinite before the first, and without experts"""
        self._passes: dict[RouterUse, list[Choices]] = {}
        for name, router in routers_of(stages).items():
            router.register_forward_hook(partial(self._note, name))

    def choices(self) -> dict[RouterUse, Choices]:
        """Return the choices of all passes."""
        joined = {}
        for use, passes in self._passes.items():
            inputs = torch.cat([choices.inputs for choices in passes])
            joined[use] = Choices(inputs, torch.cat([choices.experts for choices in passes]))
        return joined

    def _note(self, name: str, router: Router, inputs: tuple[Tensor], routing: Routing) -> None:
        """Add a forward pass: a forward hook."""
        choices = Choices(inputs[0].detach().flatten(0, -2).float().clone(), routing.experts)
        self._passes.setdefault(RouterUse(name, torch.is_grad_enabled()), []).append(choices)
        self.smallest_gap = float(np.minimum(self.smallest_gap, gap(router, inputs[0])))  # which keeps a NaN


@torch.no_grad()
def gap(router: Router, x: Tensor) -> float:
    """Return how close a token of x (B, S, D) is to choosing another expert.

    It is the least difference between the preferences for a chosen expert and for another one, in standard deviations.
    Preferences are the logits, which without a bias have the order of the scores, or else score + bias. Infinite if all
    experts are chosen.
    """
    weight = router.local(router.weight)
    preferences = x.to(weight.dtype) @ weight.T
    if router.bias is not None or router.groups > 1:
        preferences = router.preferences(router.score(preferences))
    smallest = _least_difference(router.candidates(preferences), router.top_k)
    if router.groups > 1:
        of_groups = _least_difference(group_scores(preferences, router.groups), router.top_groups)
        smallest = float(np.minimum(smallest, of_groups))  # which keeps a NaN
    return smallest / float(preferences.std()) if smallest else 0.0


def _least_difference(scores: Tensor, count: int) -> float:
    """Return the least difference of a token between the last of the `count` largest scores (..., N) and the next one.

    Infinite if there is no next one, or if it is -inf.
    """
    if count == scores.shape[-1]:
        return math.inf
    ordered = scores.sort(dim=-1, descending=True).values
    return float((ordered[..., count - 1] - ordered[..., count]).min())


def force_choices(stages: Sequence[nn.Module], choices: Mapping[RouterUse, Choices], in_order: bool = False) -> None:
    """From now on, make the routers of a rank's stages choose the experts that `choices` has for the same tokens.

    in_order: the tokens come in the order of `choices`, as in one process.
    """
    for name, router in routers_of(stages).items():
        forced = ForcedChoices(name, choices, in_order)
        router.register_forward_pre_hook(forced.find)
        router.preferences = forced.preferences  # type: ignore[method-assign]  # whatever the scores are


class ForcedChoices:
    """Makes a router choose as another one did."""

    def __init__(self, name: str, choices: Mapping[RouterUse, Choices], in_order: bool) -> None:
        self.name = name
        self.choices = choices
        self.position: Counter[RouterUse] | None = Counter() if in_order else None
        """number of tokens so far"""
        self.experts: Tensor | None = None
        """of the current forward pass, (B, S, K)"""

    def find(self, router: nn.Module, inputs: tuple[Tensor]) -> None:
        """Find the recorded choices for the tokens of a forward pass: a forward pre-hook.

        Raises UserError if a token was not recorded.
        """
        use = RouterUse(self.name, torch.is_grad_enabled())
        choices = self.choices[use]
        x = inputs[0].detach().float()
        if self.position is not None:
            first = self.position[use]
            self.position[use] = end = first + x.shape[:-1].numel()
            choices = Choices(choices.inputs[first:end], choices.experts[first:end])
            nearest = (x.flatten(0, -2) - choices.inputs).norm(dim=-1)
            index = torch.arange(end - first)
        else:
            nearest, index = torch.cdist(x.flatten(0, -2), choices.inputs).min(dim=-1)
        if not (nearest <= NEAREST * x.flatten(0, -2).norm(dim=-1)).all():
            raise UserError(f"{self.name}: gets a token that one process in float32 does not have")
        self.experts = choices.experts[index].view(*x.shape[:-1], -1)

    def preferences(self, scores: Tensor) -> Tensor:
        """Return preferences for the recorded experts, in place of the scores (..., E): see `Router.preferences`."""
        assert self.experts is not None
        top_k = self.experts.shape[-1]
        ranks = torch.arange(top_k, 0, -1, device=scores.device, dtype=scores.dtype)
        return torch.zeros_like(scores).scatter(-1, self.experts, ranks.expand_as(self.experts))
