"""Exchange of data on the host between all ranks: records of equal size, and texts, which usually agree.

torch's collectives of Python objects send two rounds and unpickle an object per rank. These send one round of bytes.
Gloo sends them along a ring, so a rank has two neighbors, whatever the number of ranks.
"""

import hashlib
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Scalar = TypeVar("Scalar", bound=np.generic)
"""any dtype, also structured"""


def gather_records(record: npt.NDArray[Scalar], group: dist.ProcessGroup) -> npt.NDArray[Scalar]:
    """Return the arrays of all ranks, (...) -> (ranks, ...); shape and dtype must be the same on all ranks."""
    ranks = dist.get_world_size(group)
    gathered = torch.empty(ranks, record.nbytes, dtype=torch.uint8)
    dist.all_gather(list(gathered), _as_bytes(record), group=group)
    return np.frombuffer(gathered.numpy(), record.dtype).reshape(ranks, *record.shape)


def broadcast_record(record: npt.NDArray[Scalar], group: dist.ProcessGroup) -> npt.NDArray[Scalar]:
    """Return the array of the group's first rank; the others pass an array of the same shape and dtype."""
    data = _as_bytes(record)
    dist.broadcast(data, group_src=0, group=group)
    return np.frombuffer(data.numpy(), record.dtype).reshape(record.shape)


def gather_texts(text: str | None, group: dist.ProcessGroup) -> list[str | None]:
    """Return the text of every rank, by rank.

    If all ranks pass the same text, or None, they exchange only its hash: 32 bytes in one all-reduce, whatever the
    number of ranks. Otherwise each rank gets the texts of all ranks.
    """
    ranks = dist.get_world_size(group)
    if same_on_all_ranks(text, group):
        return [text] * ranks
    texts: list[str | None] = [None] * ranks
    dist.all_gather_object(texts, text, group=group)
    return texts


def same_on_all_ranks(text: str | None, group: dist.ProcessGroup) -> bool:
    """Return whether all ranks pass the same text: they exchange its hash, in one all-reduce of 32 bytes."""
    digest = hashlib.sha256(repr(text).encode()).digest()[:16]
    hashes = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    # The largest of all ~x is the inverse of the smallest x: one reduction finds both.
    bounds = torch.cat([hashes, ~hashes])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    largest, smallest = bounds[:2], ~bounds[2:]
    return torch.equal(largest, smallest)


def _as_bytes(record: npt.NDArray[Any]) -> torch.Tensor:
    """Return a copy of an array's memory as bytes."""
    return torch.frombuffer(bytearray(record.tobytes()), dtype=torch.uint8)
