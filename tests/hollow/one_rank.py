"""Takes steps of one rank of any layout on the hollow GPU: the library's own model, step and optimizer, in one process.

    python -m tests.hollow python -m tests.hollow.one_rank train_configs/llama3_8b_8gpu.toml --compile.block=false

NCCL is hollow, so the other ranks need not exist: torch's NCCL process groups, streams and caching allocator are real.
With `--cases` the standard input has a JSON list of lists of arguments; each is run in a process of its own, forked
from one that has imported torch, and printed as a line of JSON when it is done.
"""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.hollow import counts
from torchllm.config import Config
from torchllm.data.batch import Batch
from torchllm.models.decoder import Decoder
from torchllm.parallel.expert import ExchangeDispatch, Splits, read_splits, routed_experts
from torchllm.parallel.mesh import build_mesh
from torchllm.parallel.pipeline import Pipeline
from torchllm.tools.adapt.trial import build_trial, synthetic_batches
from torchllm.tools.config.load import load_config
from torchllm.tools.dry_run.trace import even_splits
from torchllm.tools.torch_names import skip_pipeline_vote
from torchllm.train.step import TrainStep

Measure = Callable[[Config, int], Any]
"""returns a dataclass for a resolved config and a rank"""
STEPS = 3
"""to take; the last one counts: the first compiles, and allocates what stays"""
GIB = 2**30


class AbsentRanks(dist.Store):
    """The store of a job whose other ranks do not exist: what they would have written is 128 zero bytes.

    torch asks it for nothing but the ids of NCCL communicators, which have that length.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:  # type: ignore[override]  # torch's stubs have overloads for its own stores
        return self.values.get(key, bytes(128))

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else str(value).encode()

    def add(self, key: str, number: int) -> int:
        total = int(self.values.get(key, b"0")) + number
        self.values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Return at once."""


_stores: list[dist.Store] = []
"""those in use: a process group keeps a store of Python's own, but not its methods"""


def join_absent_ranks(rank: int, ranks: int) -> None:
    """Make NCCL process groups of a job whose other ranks do not exist."""
    _stores.append(AbsentRanks())
    dist.init_process_group("cuda:nccl", store=_stores[-1], rank=rank, world_size=ranks)
    assert dist.group.WORLD is not None
    # From torch 2.15 on a group with a device makes others of its communicator, whose sizes NCCL's ranks agree on.
    dist.group.WORLD.bound_device_id = None


@dataclass
class RankReport:
    """What one rank's last step did, and what it held."""

    launches: int
    syncs: dict[str, int]
    """how often the host waited for the GPU, by the function that did"""
    memsets: int
    copies: dict[str, int]
    collectives: dict[str, int]
    live: float
    """largest memory of tensors during the step, GiB"""
    reserved: float
    """most memory that torch's allocator held, GiB"""
    retries: int
    """how often the allocator gave its cache back to the driver to find memory, in all steps"""
    graph_breaks: int
    compilations: int
    """graphs that Dynamo compiled in the last step"""
    kernels: dict[str, int] = field(default_factory=dict)
    forbidden: dict[str, int] = field(default_factory=dict)
    """calls of all steps that a capture forbids"""


def prepare() -> None:
    """Set this process up as a rank of a run is."""
    torch.cuda.set_device(0)
    torch.set_float32_matmul_precision("high")


def build(config: Config, rank: int) -> tuple[TrainStep, list[Batch]]:
    """Return the step of `rank` of the ranks of a resolved config, and micro batches for it."""
    prepare()
    join_absent_ranks(rank, config.parallel.ranks)
    device = torch.device("cuda", 0)
    mesh = build_mesh(config.parallel, device)
    trial = build_trial(config, SimpleNamespace(device=device), mesh)  # type: ignore[arg-type]  # it needs no more
    share_rows(trial.stages)
    forward_backward = trial.step.forward_backward
    if isinstance(forward_backward, Pipeline):
        skip_pipeline_vote(forward_backward.schedule)
    return trial.step, synthetic_batches(config, mesh, device)


def measure(config: Config, rank: int) -> RankReport:
    """Take steps as `rank` of the ranks of a resolved config, and report the last one."""
    step, batches = build(config, rank)
    numbers = count(1)
    return report(lambda: step(next(numbers), batches), STEPS + config.compile.graphs)  # the third is captured


def share_rows(stages: Sequence[Decoder]) -> None:
    """Let experts on all ranks get equally many rows: their numbers are read as in a run, but are zero here."""
    for stage in stages:
        for routed in routed_experts(stage):
            if isinstance(routed.dispatch, ExchangeDispatch):
                routed.dispatch.splits = _read_and_share


def _read_and_share(sent: Tensor, received: Tensor, rows: int) -> Splits:
    read_splits(sent, received, rows)
    return even_splits(sent, received, rows)


def report(take_step: Callable[[], object], steps: int = STEPS) -> RankReport:
    """Take steps and report the last one; the peak is of all from the third on."""
    for _ in range(STEPS - 1):
        take_step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps - STEPS):  # in which a graph is captured
        take_step()
    forbidden = counts.names(counts.read(), "obstacle")
    compiled = _graphs()
    counts.reset()
    take_step()
    counted = counts.read()
    return RankReport(
        launches=counts.times(counted, "launch"),
        syncs=counts.names(counted, "sync"),
        memsets=counts.times(counted, "memset"),
        copies=counts.names(counted, "copy"),
        collectives=counts.names(counted, "collective"),
        live=torch.cuda.max_memory_allocated() / GIB,
        reserved=torch.cuda.max_memory_reserved() / GIB,
        retries=torch.cuda.memory_stats()["num_alloc_retries"],
        graph_breaks=sum(_dynamo("graph_break").values()),
        compilations=_graphs() - compiled,
        kernels=counts.names(counted, "launch"),
        forbidden={**forbidden, **counts.names(counted, "obstacle")},
    )


def _dynamo(counter: str) -> dict[str, int]:
    from torch._dynamo.utils import counters

    return counters[counter]


def _graphs() -> int:
    return _dynamo("stats").get("unique_graphs", 0)


def run_forked(arguments: list[str], measure: Measure) -> dict[str, Any]:
    """Measure in a forked process; return the report as a dict, or {"error": ...}.

    arguments: a command line with its degrees; --rank=N in front: of that rank.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            rank = 0
            if arguments and arguments[0].startswith("--rank="):
                rank = int(arguments.pop(0).removeprefix("--rank="))
            resolved_as_for_a_dry_run = "--run.dry_run=true"  # the number of ranks is the product of the degrees
            result = asdict(measure(load_config([*arguments, resolved_as_for_a_dry_run]), rank))
        except BaseException:
            result = {"error": traceback.format_exc()}
        with os.fdopen(writer, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)  # without the destructors of process groups whose peers do not exist
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"the process ended with status {status}"}


def main(arguments: list[str], measure: Measure = measure) -> None:
    """Print the report of one config, or of those of the standard input."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = json.load(sys.stdin) if arguments == ["--cases"] else [arguments]
    for case in cases:
        print(json.dumps(run_forked(list(case), measure)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
