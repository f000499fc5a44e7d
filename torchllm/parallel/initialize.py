"""Initial weights as a function of (seed, canonical parameter name, global element index).

Every layout therefore starts from bitwise the same weights on one kind of device, a rank computes only its own shards,
and nothing is sent. torch's own generators return the next number of a stream, which depends on every earlier
draw; a counter-based generator hashes the index itself. Here: SplitMix64's output function (Steele, Lea, Flood 2014)
over the index, its top 53 bits as a uniform number, and the inverse of the normal distribution, cut at 3 standard
deviations.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchllm.config import Model
from torchllm.facts.parameters import canonical_name, rule_of, start_of_buffer
from torchllm.facts.parts.part import found
from torchllm.models.decoder import Decoder
from torchllm.parallel.local_tensor import local_tensor
from torchllm.runtime.torch_compat import local_region

_STD_BY_WIDTH = {"matrix": -0.5, "router": -1.0, "head": -1.0}
"""by role, the power of `Model.width_ratio` in the standard deviation: `settings_by_role` has the rates"""
_CUT = 3.0  # in standard deviations
_ELEMENTS_AT_A_TIME = 1 << 20  # bounds the temporary memory, a few times 8 bytes per element
_ELEMENTS_IN_CACHE = 1 << 16  # the same on a CPU: the temporary tensors stay in a core's cache


def initialize(stages: Sequence[Decoder], model: Model, device: torch.device, seed: int) -> None:
    """Give every parameter and buffer of stages built on the meta device its memory and its initial value.

    Call it after sharding: a rank makes only its shards.
    """
    materialize(stages, device)
    fill_all(stages, model, seed)


def materialize(stages: Sequence[Decoder], device: torch.device) -> None:
    """Give every parameter of stages built on the meta device its memory, uninitialized.

    FOOTGUN: `to_empty` replaces the parameters, so tied embeddings must be tied again.
    """
    for stage in stages:
        stage.to_empty(device=device)
        stage.tie_embeddings()


@torch.no_grad()
def fill_all(stages: Sequence[Decoder], model: Model, seed: int) -> None:
    """Write this rank's part of the initial value of every parameter and buffer of stages that have memory."""
    for stage in stages:
        for name, parameter in stage.named_parameters():
            fill(parameter, canonical_name(name), model, seed)
        for name, buffer in stage.named_buffers():
            local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
            local.fill_(start_of_buffer(canonical_name(name)))


def fill(parameter: Tensor, name: str, model: Model, seed: int) -> None:
    """Write this rank's part of the initial value of a parameter. name: canonical; KeyError if it has no row."""
    local = local_tensor(parameter)
    _, start, role = rule_of(name)
    if start == "identity":
        start = "zeros" if model.offsets_norms else "ones"
    if start in ("ones", "zeros"):
        local.fill_(float(start == "ones"))
        return
    std = model.initial_std * model.width_ratio ** _STD_BY_WIDTH.get(role, 0.0)
    if start == "residual":
        std = std / math.sqrt(2 * model.layers)
    key = key_of(seed, name)
    of_recurrence = found(f"torchllm.parallel.recurrences:{start}") if start in ("decay", "time_step") else None
    for index, part in with_indices(parameter, local):
        part.copy_(of_recurrence(index, key) if of_recurrence else normal(index, key).mul_(std))


def with_indices(parameter: Tensor, *tensors: Tensor, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Yield indices of elements in the whole parameter, int64 (n, m), and these elements of `tensors`, as views.

    tensors: contiguous, each this rank's part of the parameter or of a tensor that is cut like it; or rows of it, from
    the one with the index `first` on this rank.
    """
    shape, offset = local_region(parameter)
    if 0 in shape:
        return
    if shape:
        shape = (tensors[0].numel() // math.prod(shape[1:]), *shape[1:])
        offset = (offset[0] + first, *offset[1:])
    device = tensors[0].device
    # Elements that follow each other in the shard do so in the whole, up to the end of the last dimension that is cut.
    cut = max((i for i in range(len(shape)) if shape[i] != parameter.shape[i]), default=0)
    run = math.prod(shape[cut:])
    starts = torch.zeros(1, dtype=torch.int64, device=device)  # of the runs: indices in the whole parameter
    for i, whole in enumerate(parameter.shape):
        places = torch.arange(shape[i] if i < cut else 1, device=device) + offset[i]
        starts = (starts[:, None] * whole + places).view(-1)
    most = _ELEMENTS_IN_CACHE if device.type == "cpu" else _ELEMENTS_AT_A_TIME
    rows = max(1, most // run)
    runs = [tensor.view(-1, run).split(rows) for tensor in tensors]
    for some_starts, *some_runs in zip(starts.split(rows), *runs, strict=True):
        for begin in range(0, run, most):
            index = some_starts[:, None] + torch.arange(begin, min(run, begin + most), device=device)
            yield index, *(of_tensor[:, begin : begin + most] for of_tensor in some_runs)


def key_of(seed: int, name: str) -> int:
    """Return 64 bits that distinguish the numbers of one parameter from another's, as a signed integer."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def normal(index: Tensor, key: int) -> Tensor:
    """Return the index-th standard normal numbers of the stream `key`, cut at +-3: int64 -> float64, of any shape.

    float64 throughout: a vectorized kernel may round an element differently depending on its position in the buffer,
    and the rounding to float32 afterwards hides such a last bit.
    """
    tail = 0.5 * math.erfc(_CUT / math.sqrt(2.0))  # probability of a number below -3
    return torch.special.ndtri(uniform(index, key).mul_(1.0 - 2.0 * tail).add_(tail))


def uniform(index: Tensor, key: int) -> Tensor:
    """Return the index-th uniform numbers of the stream `key`, between 0 and 1: int64 -> float64, of any shape."""
    return hashed(index, key).to(torch.float64).add_(0.5).mul_(2.0**-53)


def hashed(index: Tensor, key: int | Tensor) -> Tensor:
    """Return the top 53 bits of SplitMix64's output for the state key + index * golden ratio.

    The constants are SplitMix64's, as signed integers: int64 products wrap around as unsigned ones do.
    """
    z = (index * -0x61C8864680B583EB).add_(key)
    z.bitwise_xor_(_shift(z, 30)).mul_(-0x40A7B892E31B1A47)
    z.bitwise_xor_(_shift(z, 27)).mul_(-0x6B2FB644ECCEEE15)
    return _shift(z.bitwise_xor_(_shift(z, 31)), 11)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift logically to the right; torch's own shift is arithmetic on int64."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
