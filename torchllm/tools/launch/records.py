"""Exchange of records of equal size on the host between all ranks.

torch's collectives of Python objects send two rounds and unpickle an object per rank. These send one round of bytes.
Gloo sends them along a ring, so a rank has two neighbors, whatever the number of ranks.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from torchllm.checkpoint.agreement import gather_rows

Scalar = TypeVar("Scalar", bound=np.generic)
"""any dtype, also structured"""


def gather_records(record: npt.NDArray[Scalar], group: dist.ProcessGroup) -> npt.NDArray[Scalar]:
    """Return the arrays of all ranks, (...) -> (ranks, ...); shape and dtype must be the same on all ranks."""
    rows = gather_rows(group, torch.frombuffer(bytearray(record.tobytes()), dtype=torch.uint8))
    return np.frombuffer(rows.numpy(), record.dtype).reshape(len(rows), *record.shape)
