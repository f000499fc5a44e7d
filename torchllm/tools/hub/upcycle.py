"""Experts that start as copies of a dense model's feed-forward layers (Komatsuzaki et al. 2022, arXiv 2212.05055).

A rank reads its part of a layer once, into the first of its experts, and copies it to the others. Nothing is sent.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchllm.checkpoint.agreement import Group
from torchllm.checkpoint.index import Region
from torchllm.checkpoint.initial import InitialWeights
from torchllm.checkpoint.state import WEIGHTS, Part, TensorSharding, parts_of
from torchllm.config import Model
from torchllm.parallel.initialize import fill
from torchllm.tools.hub.weights import initial_model_tensors

ROUTER = ".mlp.routed.router."
EXPERTS = re.compile(r"(.+\.mlp)\.routed\.experts\.(\w+)")
"""key of a stacked parameter"""


def dense_parts(stages: Sequence[nn.Module]) -> dict[str, Part]:
    """Return this rank's parts of a dense model, by its keys: a feed-forward layer is read into the first expert."""
    parts = {}
    for key, part in parts_of(initial_model_tensors(stages)).items():
        experts = EXPERTS.fullmatch(key)
        if experts is not None and len(part.local):
            parts[f"{experts[1]}.{experts[2]}.weight"] = _first_expert(part)
        elif experts is None and ROUTER not in key:
            parts[key] = part
    return parts


def _first_expert(part: Part) -> Part:
    """Return the first of a rank's experts, as a part of a matrix of one expert."""
    region = Region(part.region.offset[1:], part.region.size[1:])
    return Part(part.local[0], region, TensorSharding(part.sharding.shape[1:], None, ()))


@torch.no_grad()
def copy_first_expert(stages: Sequence[nn.Module], model: Model, seed: int) -> None:
    """Make each expert of this rank a copy of the first one, plus model.upcycle_noise x its random initial values.

    The noise is a function of seed, name and element, as initial weights are, so that no layout changes it.
    """
    tensors = initial_model_tensors(stages)
    for key, part in parts_of(tensors).items():
        if EXPERTS.fullmatch(key) is None or not len(part.local):
            continue
        copied = part.local[0].clone()
        if model.upcycle_noise:
            fill(tensors[key], key.removeprefix(WEIGHTS), model, seed)
            part.local.mul_(model.upcycle_noise).add_(copied)
        else:
            part.local.copy_(copied)


@dataclass(frozen=True)
class UpcycledWeights:
    """The weights of a dense model, of whose feed-forward layers all experts of a block are copies."""

    source: InitialWeights
    """fills `dense_parts`"""
    model: Model
    """of the run"""
    seed: int

    @property
    def key(self) -> str:
        return self.source.key

    def load(self, stages: Sequence[nn.Module], group: Group) -> dict[str, Any]:
        """Fill this rank's part of the model, except for the routers: see `InitialWeights`."""
        record = self.source.load(stages, group)
        copy_first_expert(stages, self.model, self.seed)
        return record
