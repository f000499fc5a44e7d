"""The dry run against eight real ranks: what they hold by purpose, what autograd saves, what is sent."""

import time
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.trace import Collective, Trace
from tests.parity import CPU, Settings, build, my_batches, tiny, world_size
from tests.tools.dry_run import apart
from tests.workers import run
from torchllm.config import Kinds, Model, gradient_accumulation
from torchllm.models.experts import Router, Routing
from torchllm.optim.average import WeightAverage
from torchllm.optim.grad_norm import gradients
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.expert import routed_experts
from torchllm.parallel.parallelize import build_forward_backward
from torchllm.tools.dry_run.replay import Traced
from torchllm.tools.dry_run.trace import trace
from torchllm.tools.mesh_axes import axis_of_group
from torchllm.train.step import TrainStep

LAYOUTS: dict[str, Settings] = {
    "fsdp, ring and sequence parallel, moments in 8 bits": {
        "parallel.dp_shard": 2,
        "parallel.cp": 2,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "training.micro_batch_size": 2,
        "model.ffn": 128,
        "optimizer.state_dtype": "int8",
    },
    "pipeline, HSDP, recompute, all in 16 bits": {
        "parallel.pp": 2,
        "parallel.dp_replicate": 2,
        "parallel.dp_shard": 2,
        "recompute.mode": "full",
        "training.weights_dtype": "bfloat16",
        "optimizer.state_dtype": "bfloat16",
    },
    "interleaved pipeline, tensor parallel, ZeRO 1": {
        "parallel.pp": 2,
        "parallel.dp_shard": 2,
        "parallel.tp": 2,
        "parallel.schedule": "Interleaved1F1B",
        "parallel.zero_stage": 1,
        "training.loss_chunk": 16,
    },
    "experts shared by tensor and data parallel ranks": {
        "parallel.dp_shard": 4,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "parallel.ep": 4,
        "model.experts": 8,
        "model.top_k": 2,
        "model.shared_experts": 1,
        "model.shared_gate": True,
        "model.dense_layers": 1,
    },
    "experts in padded buffers, pipeline, recompute": {
        "parallel.pp": 2,
        "parallel.dp_shard": 4,
        "parallel.ep": 4,
        "parallel.expert_dispatch": "optimistic",
        "parallel.expert_chunks": 3,
        "model.experts": 8,
        "model.top_k": 2,
        "recompute.mode": "full",
    },
    "experts cut by hidden states": {
        "parallel.dp_shard": 4,
        "parallel.tp": 2,
        "parallel.ep": 2,
        "model.experts": 4,
        "model.top_k": 2,
        "training.global_batch_size": 16,
    },
    "kinds of blocks over pipeline, windows and rings, FSDP": {
        "parallel.pp": 2,
        "parallel.dp_shard": 2,
        "parallel.cp": 2,
        "model.pattern": ("local", "mid", "full"),
        "model.kinds": Kinds(
            local={"window": 7, "rotary_fraction": 0.0}, mid={"window": 9, "rotary_fraction": 0.5}, full={}
        ),
        "model.attention": "eager",
    },
    "Muon, moving average and z-loss over HSDP and tensor parallel": {
        "parallel.dp_replicate": 2,
        "parallel.dp_shard": 2,
        "parallel.tp": 2,
        "optimizer.name": "muon",
        "optimizer.ema_decay": 0.9,
        "training.z_loss": 0.02,
    },
}


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address to bytes of the memory behind tensors, or behind their local parts."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}


class Born(TorchDispatchMode):
    """Notes the memory that operations make, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        before = storages(x for x in args if type(x) is Tensor)
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if type(tensor) is Tensor and tensor.untyped_storage().data_ptr() not in before:
                self.storages.append(weakref.ref(tensor.untyped_storage()))
        return out


def choose_evenly(router: Router, inputs: Any, routing: Routing) -> Routing:
    """Forward hook: the tokens use all experts equally often, as the dry run assumes."""
    count = routing.experts.numel()
    even = torch.arange(count).view_as(routing.experts) % len(router.weight)
    return routing._replace(experts=even)


def bytes_in_a_ring(message: Collective, ranks: int) -> float:
    """Return the bytes that one rank sends: an all-reduce is a reduce-scatter and a gather."""
    size = message.elements * message.dtype.itemsize
    if message.kind == "send":
        return size
    rounds = 2 if message.kind == "reduce" else 1
    return rounds * size * (ranks - 1) / ranks


def really_held(settings: Settings) -> dict[str, Any]:
    """On a rank: bytes by purpose, bytes that each forward saves, bytes sent by axis."""
    config = tiny(settings)
    mesh, stages = build(config)
    optimizer = build_optimizer(stages, config.optimizer)
    average = WeightAverage(stages, config.optimizer.ema_decay, config.optimizer.ema_offload)
    average.follow(optimizer)
    step = build_forward_backward(stages, mesh, config.parallel, config.training, torch.float32)
    batches = my_batches(config, mesh, 1, ragged=False)
    gradient_bytes = 0

    def complete(*arguments: Any) -> Tensor:
        nonlocal gradient_bytes
        loss = step(*arguments)
        sums = [routed.router.sums for stage in stages for routed in routed_experts(stage)]
        counts = [total for total in sums if total is not None]
        gradient_bytes = sum(storages([*gradients(stages), *counts]).values())  # both are what a backward leaves
        return loss

    complete.stages, complete.loss_sum = step.stages, step.loss_sum  # type: ignore[attr-defined]
    rate = LearningRate(config.schedule, config.optimizer.learning_rate, config.training.steps)
    train = TrainStep(stages, complete, optimizer, rate, mesh, config.training, CPU)  # type: ignore[arg-type]
    for stage in stages:
        for routed in routed_experts(stage):
            routed.router.register_forward_hook(choose_evenly)
    train(1, batches)

    born = Born()
    left: list[int] = []

    def end(module: nn.Module, args: Any, output: Tensor) -> None:
        time.sleep(0.01)  # gloo's threads let go of what they have sent a moment after it has been waited for
        weights = storages(module.parameters())  # gathered ones, where they stay so
        here = {s.data_ptr(): s.nbytes() for s in (reference() for reference in born.storages) if s is not None}
        left.append(sum(size for at, size in here.items() if at not in weights))

    for stage in stages:
        stage.register_forward_pre_hook(lambda module, args: born.storages.clear(), prepend=True)
        stage.register_forward_hook(end)
    sent = Trace(mesh)
    sizes = {axis.name: axis.size for axis in axis_of_group(mesh).values()}
    sent.axes = {group: axis.name for group, axis in axis_of_group(mesh).items()}
    with born, sent:
        train(2, batches)
    by_axis: Counter[str] = Counter()
    for event in sent.events:
        assert not isinstance(event, str)
        by_axis[event.axis] += bytes_in_a_ring(event, sizes[event.axis])
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    return {
        "parameters": sum(storages(p for stage in stages for p in stage.parameters()).values()),
        "optimizer": sum(storages([*states, *average.tensors.values()]).values()),
        "gradients": gradient_bytes,
        "saved": left,
        "sent": {axis: count for axis, count in by_axis.items() if count},
    }


def foretold(settings: Settings, pp_rank: int) -> dict[str, Any]:
    """The same, from the dry run."""
    config = tiny(settings)
    count = gradient_accumulation(config.training, config.parallel.data_ranks)
    traced: Traced = apart(trace, config, torch.float32, pp_rank, count, config.parallel.pp, pp_rank)
    tail = traced.spans[-1].start
    sent: Counter[str] = Counter()
    for span in traced.spans:
        for one in span.sent:
            sent[one.axis] += one.bytes
    return {
        "parameters": tail["parameters"],
        "optimizer": tail["optimizer"],
        "gradients": tail["gradients"],
        "saved": traced.saved,
        "sent": dict(sent),
    }


BY_DEFAULT = ("pipeline, HSDP, recompute, all in 16 bits",)
NAMES = [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_traced_is_what_eight_ranks_hold_and_send(name: str) -> None:
    settings = LAYOUTS[name]
    model, parallel = tiny(settings).model, tiny(settings).parallel
    ranks = world_size(tiny(settings))
    assert ranks == 8
    real = run(really_held, ranks, settings)
    for pp_rank in range(parallel.pp):
        told = foretold(settings, pp_rank)
        assert told["saved"]
        for rank in range(pp_rank * ranks // parallel.pp, (pp_rank + 1) * ranks // parallel.pp):
            fewer = moments_of_the_shared_gates(model) if rank // parallel.tp % parallel.dp_shard else 0
            assert real[rank] == told | {"optimizer": told["optimizer"] - fewer}, rank


def moments_of_the_shared_gates(model: Model) -> int:
    """Bytes of AdamW's moments of gates of shared experts: they have one row, which the first FSDP rank holds."""
    gates = model.layers - model.dense_layers if model.shared_gate else 0
    return 2 * 4 * model.hidden * gates


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_and_averages_on_the_host_are_no_memory_of_the_device(dtype: str) -> None:
    """Nothing else of a step changes, and their bytes are told separately."""
    settings: Settings = {"parallel.dp_shard": 2, "optimizer.state_dtype": dtype, "training.weights_dtype": dtype}
    settings["optimizer.ema_decay"] = 0.9
    offloads: list[Settings] = [{}, {"optimizer.offload": True}, {"optimizer.ema_offload": True}]
    offloads.append(offloads[1] | offloads[2])
    on_device, *others = (apart(trace, tiny(settings | keys), torch.float32, 0, 4, 1, 0) for keys in offloads)
    (states,) = {span.start["optimizer"] for span in on_device.spans}
    moments, averages, all_states = (on_host.host for on_host in others)
    assert (on_device.host, moments + averages, all_states) == (0, states, states)
    assert min(moments, averages) > 0
    for on_host in others:
        for before, after in zip(on_device.spans[:-1], on_host.spans[:-1], strict=True):
            assert before.peak - Counter(optimizer=on_host.host) == +after.peak
        assert on_host.spans[-1].peak.total() <= on_device.spans[-1].peak.total() - on_host.host
