"""Initial weights as a function of (seed, canonical parameter name, global element index).

Every layout therefore starts from bitwise the same weights on one kind of device, a rank computes only its own shards,
and nothing is sent. torch's own generators return the next number of a stream, which depends on every earlier
draw; a counter-based generator hashes the index itself. Here: SplitMix64's output function (Steele, Lea, Flood 2014)
over the index, its top 53 bits as a uniform number, and the inverse of the normal distribution, cut at 3 standard
deviations.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchllm.config import Model
from torchllm.facts.parameters import canonical_name, rule_of
from torchllm.models.decoder import Decoder
from torchllm.parallel.float8 import plain_tensor
from torchllm.runtime.torch_compat import local_region

_CUT = 3.0  # in standard deviations
_ELEMENTS_AT_A_TIME = 1 << 20  # bounds the temporary memory, a few times 8 bytes per element


def initialize(stages: Sequence[Decoder], model: Model, device: torch.device, seed: int) -> None:
    """Give every parameter and buffer of stages built on the meta device its memory and its initial value.

    Call it after sharding: a rank makes only its shards.
    """
    materialize(stages, device)
    fill_all(stages, model, seed)


def materialize(stages: Sequence[Decoder], device: torch.device) -> None:
    """Give every parameter of stages built on the meta device its memory, uninitialised.

    FOOTGUN: `to_empty` replaces the parameters, so tied embeddings must be tied again.
    """
    for stage in stages:
        stage.to_empty(device=device)
        stage.tie_embeddings()


@torch.no_grad()
def fill_all(stages: Sequence[Decoder], model: Model, seed: int) -> None:
    """Write this rank's part of the initial value of every parameter of stages that have memory; buffers are 0."""
    for stage in stages:
        for name, parameter in stage.named_parameters():
            fill(parameter, canonical_name(name), model, seed)
        for buffer in stage.buffers():
            local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
            local.zero_()


def fill(parameter: Tensor, name: str, model: Model, seed: int) -> None:
    """Write this rank's part of the initial value of a parameter. name: canonical; KeyError if it has no row."""
    shape, offset = local_region(parameter)
    local = plain_tensor(parameter.to_local()) if isinstance(parameter, DTensor) else parameter
    start = rule_of(name).start
    if start in ("ones", "zeros"):
        local.fill_(float(start == "ones"))
        return
    if local.numel() == 0:
        return
    std = model.initial_std
    if start == "residual":
        std = std / math.sqrt(2 * model.layers)
    key = key_of(seed, name)
    flat = local.view(-1)
    for first in range(0, len(flat), _ELEMENTS_AT_A_TIME):
        part = flat[first : first + _ELEMENTS_AT_A_TIME]
        here = torch.arange(len(part), device=local.device) + first
        part.copy_(normal(_whole_index(here, shape, offset, parameter.shape), key).mul_(std))


def _whole_index(here: Tensor, shape: Sequence[int], offset: Sequence[int], whole: Sequence[int]) -> Tensor:
    """Return the row-major indices within a whole parameter of elements of a shard, by their indices in the shard.

    here: int64 (N). shape, offset: of the shard, in each dimension. whole: shape of the parameter.
    """
    index = torch.zeros_like(here)
    stride = 1
    for size, first, whole_size in reversed(list(zip(shape, offset, whole, strict=True))):
        index += (here % size + first) * stride
        here = here // size
        stride *= whole_size
    return index


def key_of(seed: int, name: str) -> int:
    """Return 64 bits that distinguish the numbers of one parameter from another's, as a signed integer."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def normal(index: Tensor, key: int) -> Tensor:
    """Return the index-th standard normal numbers of the stream `key`, cut at +-3: int64 (N) -> float64 (N).

    float64 throughout: a vectorised kernel may round an element differently depending on its position in the buffer,
    and the rounding to float32 afterwards hides such a last bit.
    """
    tail = 0.5 * math.erfc(_CUT / math.sqrt(2.0))  # probability of a number below -3
    uniform = (_hash(index, key).to(torch.float64) + 0.5) * 2.0**-53
    return torch.special.ndtri(tail + uniform * (1.0 - 2.0 * tail))


def _hash(index: Tensor, key: int) -> Tensor:
    """Return the top 53 bits of SplitMix64's output for the state key + index * golden ratio.

    The constants are SplitMix64's, as signed integers: int64 products wrap around as unsigned ones do.
    """
    z = index * -0x61C8864680B583EB + key
    z = (z ^ _shift(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shift(z, 27)) * -0x6B2FB644ECCEEE15
    return _shift(z ^ _shift(z, 31), 11)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift logically to the right; torch's own shift is arithmetic on int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
