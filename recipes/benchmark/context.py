"""benchmark context: memory and traffic of one rank of a context-parallel job, by cp, for sequences of one length.

One micro batch goes forward and backward through the model without FSDP, whose weights are no activations and whose
traffic is not context parallelism's. The degrees of [parallel] are not read: cp is every divisor of the ranks.

Activations are the storages that the forward leaves for the backward, each counted once, without the weights. Bytes
sent are counted where a rank hands them to the network over cp; the formulas are, per layer and with n = cp:
  ring      forward (n - 1) x 2 B S/n K Q numbers, backward the same number, and their gradients in float32
  ulysses   forward and backward each (n - 1) / n x B S/n (2 H + 2 K) Q numbers
A backward that recomputes attention repeats the forward's traffic, which the formulas do not count.
"""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchllm.config import Model, Training
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.context import apply_context_parallel
from torchllm.parallel.initialize import initialize
from torchllm.parallel.mesh import build_mesh
from torchllm.parallel.recompute import apply_recompute
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.process import Runtime
from torchllm.tools.adapt.trial import synthetic_batches

from .tools import TableRow, Tables

if TYPE_CHECKING:
    from .settings import BenchmarkConfig

MIB = 2**20
Method = Literal["ring", "ulysses"]
METHODS: tuple[Method, ...] = get_args(Method)


class TrafficRecorder(TorchDispatchMode):
    """Counts the bytes that this rank sends, and remembers the storages that are made, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0
        self.made: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::send":
            self.sent += sum(tensor.nbytes for tensor in args[0])
        elif func.name() == "_c10d_functional::all_to_all_single":
            self.sent += args[0].nbytes * (len(args[0]) - 1) // len(args[0])  # one part stays here
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made[storage.data_ptr()] = weakref.ref(storage)
        return out

    def kept(self, module: nn.Module) -> int:
        """Return the bytes of the storages that still exist, without the module's weights, which have views."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        total = 0
        for address, reference in self.made.items():
            storage = reference()
            if storage is not None and address not in weights:
                total += storage.nbytes()
        return total


class Traffic(NamedTuple):
    """Bytes of one micro batch on the rank that has most."""

    activations: float
    """bytes that the forward leaves for the backward"""
    forward: float
    """sent in the forward"""
    backward: float
    """sent in the backward"""


class BytesSent(NamedTuple):
    """Bytes that one rank sends by the formulas above."""

    forward: float
    backward: float


def context(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Measure both methods with every number of ranks that divides the heads and the sequence."""
    rows = []
    for method in METHODS:
        of_one_rank = 0.0
        for ranks in possible_ranks(config, runtime.world_size, method):
            traffic = measured(config, runtime, method, ranks)
            of_one_rank = of_one_rank or traffic.activations
            rows.append(traffic_row(config, runtime, method, ranks, traffic, of_one_rank))
    return {"one micro batch of one rank": rows}


def possible_ranks(config: "BenchmarkConfig", world_size: int, method: str) -> Iterator[int]:
    """Yield the numbers of ranks that can share a sequence, ascending."""
    for ranks in range(1, world_size + 1):
        divides_sequence = config.training.sequence_length % (2 * ranks) == 0
        divides_heads = method == "ring" or config.model.kv % ranks == 0
        if world_size % ranks == 0 and divides_sequence and divides_heads:
            yield ranks


def measured(config: "BenchmarkConfig", runtime: Runtime, method: Method, ranks: int) -> Traffic:
    """Run one micro batch on `ranks` ranks that share its sequences."""
    shards = runtime.world_size // ranks
    degrees = replace(config.parallel, pp=1, dp_replicate=1, dp_shard=shards, cp=ranks, tp=1)
    mesh = build_mesh(replace(degrees, cp_method=method, zero_stage=3), runtime.device)
    stage = built(config, runtime)
    if ranks > 1:  # one rank runs the plain attention core, the baseline
        apply_context_parallel(stage, mesh.cp, method, compute_dtype(config.training, runtime.device))
    apply_recompute(stage, config.recompute, config.model.layers)
    batch = synthetic_batches(config, mesh, runtime.device)[0]
    with TrafficRecorder() as forward:
        loss = stage(batch.tokens, batch.positions, batch.document_ids, batch.labels)
    activations = forward.kept(stage)
    with TrafficRecorder() as backward:
        loss.backward()
    largest = torch.tensor([activations, forward.sent, backward.sent], device=runtime.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return Traffic(*largest.tolist())


def traffic_row(
    config: "BenchmarkConfig", runtime: Runtime, method: str, ranks: int, traffic: Traffic, of_one_rank: float
) -> TableRow:
    """Return the table's row: measurements, and the formulas' values."""
    itemsize = compute_dtype(config.training, runtime.device).itemsize
    formula = bytes_sent(config.model, config.training, method, ranks, itemsize)
    return {
        "method": method,
        "ranks": ranks,
        "tokens_per_rank": config.training.sequence_length // ranks,
        "activations_mib": traffic.activations / MIB,
        "share": traffic.activations / of_one_rank,
        "share_of_ideal": traffic.activations * ranks / of_one_rank,
        "forward_mib": traffic.forward / MIB,
        "formula_mib": formula.forward / MIB,
        "backward_mib": traffic.backward / MIB,
        "backward_formula_mib": formula.backward / MIB,
    }


def built(config: "BenchmarkConfig", runtime: Runtime) -> Decoder:
    """Return the model, whole on every rank."""
    with torch.device("meta"):
        stage = build_model(config.model, config.training.loss_chunk)
    initialize([stage], config.model, runtime.device, config.run.seed)
    return stage.to(compute_dtype(config.training, runtime.device))


def bytes_sent(model: Model, training: Training, method: str, ranks: int, itemsize: int) -> BytesSent:
    """Return the bytes that one rank sends, by the formulas above."""
    tokens = training.micro_batch_size * training.sequence_length / ranks * model.layers
    if method == "ring":
        numbers = (ranks - 1) * tokens * 2 * model.kv * model.head_width
        return BytesSent(numbers * itemsize, numbers * (itemsize + 4))
    numbers = (ranks - 1) / ranks * tokens * 2 * (model.heads + model.kv) * model.head_width
    return BytesSent(numbers * itemsize, numbers * itemsize)
