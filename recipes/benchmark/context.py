"""benchmark.py context: what one rank of a context-parallel job keeps and sends, over cp at a fixed sequence.

One micro batch goes forward and backward through the model, without FSDP: its weights are no activations and what it
sends is not context parallelism's. The degrees of [parallel] are not read: cp goes over the divisors of the ranks.

Activations: the storages that the forward leaves for the backward, each once, without the weights. Bytes are those that
a rank hands to the network over cp, beside them what the formulas say, for each layer and n = cp:
  ring      forward (n - 1) x 2 B S/n K Q numbers, backward as many and their gradients in float32
  ulysses   forward and backward each (n - 1) / n x B S/n (2 H + 2 K) Q numbers
A backward that recomputes attention sends the forward's again, which the formulas leave out.
"""

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchllm.adapt.trial import synthetic_batches
from torchllm.config import Model, Training
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.context import apply_context_parallel, shard_sequence
from torchllm.parallel.initialize import initialize
from torchllm.parallel.mesh import Mesh, build_mesh
from torchllm.parallel.recompute import apply_recompute
from torchllm.runtime.process import Runtime, compute_dtype

from .tools import TableRow, Tables

if TYPE_CHECKING:
    from .settings import BenchmarkConfig

MIB = 2**20


class TrafficRecorder(TorchDispatchMode):
    """While active: bytes that this rank sends, and the storages that are made."""

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
        """Bytes of the storages that are there still, but for those of a module's weights, of which views are made."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        alive = [(address, reference()) for address, reference in self.made.items() if address not in weights]
        return sum(storage.nbytes() for _, storage in alive if storage is not None)


def context(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Both methods, as far as the heads and the sequence divide."""
    model, training, rows = config.model, config.training, list[TableRow]()
    itemsize = compute_dtype(training, runtime.device).itemsize
    for method in ("ring", "ulysses"):
        one = 0
        for ranks in (n for n in range(1, runtime.world_size + 1) if runtime.world_size % n == 0):
            if training.sequence_length % (2 * ranks) or (method == "ulysses" and model.kv % ranks):
                continue
            degrees = replace(
                config.parallel, pp=1, dp_replicate=1, dp_shard=runtime.world_size // ranks, cp=ranks, tp=1
            )
            mesh = build_mesh(replace(degrees, cp_method=method, zero_stage=3), runtime.device)
            stage = built(config, runtime)
            if ranks > 1:  # else the plain core: what the others are compared with
                apply_context_parallel(stage, mesh.cp, method)
            kept, forward, backward = measured(stage, config, runtime, mesh)
            one = one or kept
            formulas = numbers_sent(model, training, method, ranks, itemsize)
            row: TableRow = {"method": method, "ranks": ranks, "tokens_a_rank": training.sequence_length // ranks}
            row |= {"activations_mib": kept / MIB, "share": kept / one, "share_of_ideal": kept * ranks / one}
            row |= {"forward_mib": forward / MIB, "formula_mib": formulas[0] / MIB}
            rows.append({**row, "backward_mib": backward / MIB, "backward_formula_mib": formulas[1] / MIB})
    return {"one micro batch of one rank": rows}


def measured(stage: Decoder, config: "BenchmarkConfig", runtime: Runtime, mesh: Mesh) -> tuple[int, int, int]:
    """Bytes kept; sent forward; sent backward. The most of any rank."""
    apply_recompute(stage, config.recompute, config.model.layers)
    batch = shard_sequence(synthetic_batches(config, mesh, runtime.device)[0], mesh)
    with TrafficRecorder() as forward:
        loss = stage(batch.tokens, batch.positions, batch.document_ids, batch.labels)
    kept = forward.kept(stage)
    with TrafficRecorder() as backward:
        loss.backward()
    most = torch.tensor([kept, forward.sent, backward.sent], device=runtime.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    bytes_kept, sent, sent_back = most.tolist()
    return bytes_kept, sent, sent_back


def built(config: "BenchmarkConfig", runtime: Runtime) -> Decoder:
    """The model, whole on every rank."""
    with torch.device("meta"):
        stage = build_model(config.model, config.training.loss_chunk)
    initialize([stage], config.model, runtime.device, config.run.seed)
    return stage.to(compute_dtype(config.training, runtime.device))


def numbers_sent(model: Model, training: Training, method: str, ranks: int, itemsize: int) -> tuple[float, float]:
    """Bytes that one rank sends forward and backward, by the formulas above."""
    tokens = training.micro_batch_size * training.sequence_length / ranks * model.layers
    if method == "ring":
        numbers = (ranks - 1) * tokens * 2 * model.kv * model.head_width
        return numbers * itemsize, numbers * (itemsize + 4)
    numbers = (ranks - 1) / ranks * tokens * 2 * (model.heads + model.kv) * model.head_width
    return numbers * itemsize, numbers * itemsize
