"""A rank that runs out of memory says how much there was, and which three settings would free the most."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.planner.search.savers import savers
from torchllm.runtime.torch_compat import dump_memory

log = logging.getLogger("torchllm")


@contextmanager
def explain_out_of_memory(config: Config, folder: Path, rank: int, device: torch.device) -> Iterator[None]:
    """Around the training loop. UserError in place of an error of want of memory; config: resolved."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU's has no name of its own
        if not is_out_of_memory(error):
            raise
        raise UserError("\n".join(explain(error, config, folder, rank, device))) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of a GPU, or of torch's allocator for CPUs."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def explain(error: RuntimeError, config: Config, folder: Path, rank: int, device: torch.device) -> Iterator[str]:
    """Lines for the user."""
    yield f"rank {rank} is out of memory: {str(error).splitlines()[0]}"
    if device.type == "cuda":
        file = folder / f"memory-rank-{rank}.pickle"
        dump_memory(str(file))
        yield f"what the memory holds: {file}, for pytorch.org/memory_viz"
    found = savers(config)
    if found:
        yield "the settings that would free most, by the planner's figures, each alone:"
        yield from (f"  {saver}" for saver in found)
    else:
        yield "set cluster.name (train_configs/clusters) to be told which settings would free most"
