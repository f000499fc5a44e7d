"""A rank that runs out of memory says how much there was, and which three settings would free most."""

import torch

from torchllm.config import Config
from torchllm.runtime.process import Runtime
from torchllm.tools.planner.search.savers import savers
from torchllm.tools.torch_names import dump_memory


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU, or torch's allocator for CPUs, had no memory left."""
    # torch has no exception class for a CPU's allocator
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def explain(error: RuntimeError, config: Config, runtime: Runtime) -> str:
    """Return lines for the user. On a GPU, write a memory snapshot to a file in the run folder.

    config: the run's, resolved.
    """
    first_line = str(error).splitlines()[0]
    lines = [f"rank {runtime.rank} is out of memory: {first_line}"]
    if runtime.device.type == "cuda":
        file = runtime.folder / f"memory-rank-{runtime.rank}.pickle"
        dump_memory(str(file))
        lines.append(f"memory snapshot: {file}, for pytorch.org/memory_viz")
    settings = savers(config)
    if settings:
        lines.append("settings that would free most memory, by the planner's estimate, each alone:")
        lines.extend(f"  {setting}" for setting in settings)
    else:
        lines.append("set cluster.name (train_configs/clusters) to see which settings would free most memory")
    return "\n".join(lines)
