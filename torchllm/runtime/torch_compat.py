"""Every private torch name and every difference between torch 2.11 and 2.13, each with its reason.

`tests/runtime/test_torch_compat.py` fails when one of them moves.
"""

import pickle
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "accumulate_in_reduce_dtype",
    "all_to_all",
    "checkpoint_wrapper",
    "dump_memory",
    "flatten_mesh",
    "flight_records",
    "group_progress",
    "join_meshes",
    "limit_groups",
    "local_region",
    "profiled_events",
    "skip_pipeline_vote",
]
# No public path have: checkpoint_wrapper, which makes a module recompute its forward; FakeTensorMode, under which
# tensors have shapes but no memory; TorchDispatchMode, which sees every operation.

RECORDERS = [getattr(c10d, name) for name in ("_dump_fr_trace", "_dump_nccl_trace") if hasattr(c10d, name)]
"""what reads the flight recorders. FOOTGUN: NCCL, where torch has it, has one of its own, which the first leaves out"""


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The dimensions of a mesh as one, called `name`. Private because torch has no public name for it yet."""
    return mesh._flatten(name)


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """Meshes cut or flattened from one world as the dimensions of one mesh, outermost first.

    Private because torch has no public name for it; to cut a flattened dimension from the world by name is deprecated.
    """
    return DeviceMesh._concatenate(list(meshes))


def local_region(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset, per dimension, of what this rank holds of a parameter.

    A plain tensor is held whole. For a DTensor the private helper is the one that knows FSDP2's strided shards (FSDP
    over tensor parallel on one dimension) and uneven ones.
    """
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.dim()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(shape), tuple(offset)


def accumulate_in_reduce_dtype(unit: FSDPModule) -> None:
    """Move the gradients of an FSDP unit's gathered weights into their sums over micro batches, of the reduce dtype.

    FSDP does so itself in its backward hooks. A weight gradient that is computed outside a backward pass is left in the
    weight's own dtype: several of them would be summed in bfloat16.
    """
    state = unit._get_fsdp_state()
    # 2.13 allows several parameter groups a unit; 2.11 has one, or None.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for group in groups:
        for parameter in group.fsdp_params if group is not None else []:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n, ...) -> (n, ...): x[i] goes to rank i of the n of `group`, out[i] comes from it. Not differentiable.

    Private because the public `all_to_all_single` fills a given tensor, which selective recomputation cannot keep.
    """
    ops = torch.ops._c10d_functional
    each = [1] * len(x)
    return ops.wait_tensor(ops.all_to_all_single(x, each, each, group.group_name))


def skip_pipeline_vote(schedule: Any) -> None:
    """Let a pipeline schedule's first step begin without asking the other stages whether theirs have static shapes.

    All of ours have; and with fake tensors there is no answer to read. 2.11 does not ask.
    """

    def all_static(stages: Any, *rest: Any) -> None:
        from torch.distributed.pipelining._utils import InferenceMode

        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    if hasattr(schedule, "_warmup_p2p"):
        schedule._warmup_p2p = all_static


class ProfiledEvent(NamedTuple):
    """One thing that the profiler saw; times in nanoseconds since 1970."""

    name: str
    start: int
    end: int
    thread: int
    annotation: bool
    """a named stretch of the program (`record_function`), not an operator"""
    backward: bool
    """a node of autograd's graph, around its operators"""
    asynchronous: bool
    """goes on beside the thread that started it: a collective of gloo's"""
    kernel: bool
    """runs on the GPU"""
    launched: int
    """of a kernel: when the host asked for it"""


def profiled_events(profiler: profile) -> list[ProfiledEvent]:
    """What a stopped profiler has seen, in no order.

    Not public: `profiler.events()` makes objects of them, with their parents and memory, which takes ten times as long
    as a small step.
    """
    raw = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]  # None before it has run
    launched = {event.correlation_id(): event.start_ns() for event in raw if event.device_type().name == "CPU"}
    found = []
    for event in raw:
        start, on_gpu = event.start_ns(), event.device_type().name != "CPU"
        annotation = event.is_user_annotation()
        if not (on_gpu and annotation):  # the host's annotations again, as seen from the GPU
            found.append(
                ProfiledEvent(
                    event.name(),
                    start,
                    start + event.duration_ns(),
                    event.start_thread_id(),
                    annotation,
                    event.scope() == 1,
                    event.is_async(),
                    on_gpu,
                    launched.get(event.linked_correlation_id(), start) if on_gpu else start,
                )
            )
    return found


class FlightRecord(NamedTuple):
    """One collective or message of this rank, from the flight recorder."""

    number: int
    """counts all of this rank's"""
    group: str
    """torch's name of the process group"""
    name: str
    """backend and operation: gloo:all_reduce"""
    sequence: int
    """counts the collectives of the group, the same on all of its ranks; 0: a message"""
    created: int
    """when it was asked for, in nanoseconds since 1970"""
    done: bool
    where: str
    """file:line that asked for it, the innermost outside torch"""


def flight_records(since: int = 0, places: bool = False) -> list[FlightRecord]:
    """What this rank has sent since a time, in nanoseconds since 1970, as far back as TORCH_FR_BUFFER_SIZE goes;
    `places`: and from where.

    torch documents the flight recorder, and the tool that reads its files, but not this call, nor the file's keys.
    """
    found = []
    for dump in RECORDERS:
        for entry in pickle.loads(dump(True, places, False)).get("entries", []):
            ours = [at for at in entry.get("frames", []) if "/torch/" not in at["filename"]]
            sent = FlightRecord(
                entry["record_id"],
                entry["process_group"][0],
                entry["profiling_name"],
                0 if entry["is_p2p"] else entry["collective_seq_id"],
                entry["time_created_ns"],
                entry["retired"],
                f"{ours[0]['filename']}:{ours[0]['line']}" if ours else "",
            )
            if sent.created > since:
                found.append(sent)
    return found


def group_progress() -> dict[str, tuple[int, int]]:
    """Of each process group: the last operation that was asked for, and the last that is done. Takes microseconds.

    FOOTGUN: of two that end together the first may be noted last, and so seem the last that is done. Gloo counts no
    messages (`send`, `recv`), nor records them.
    """
    return {
        f"{recorder}/{group}": (status["last_enqueued_collective"], status["last_completed_collective"])
        for recorder, dump in enumerate(RECORDERS)
        for group, status in pickle.loads(dump(False, False, False)).get("pg_status", {}).items()
    }


def limit_groups(seconds: float, known: dict[str, list[int]]) -> None:
    """Give every process group of this rank that is not yet `known` this time-out, and add it: name -> its ranks.

    Private because torch lists no groups, and those of a mesh take no time-out: they get torch's, 10 min with NCCL and
    30 with gloo. Gloo's messages (`send`, `recv`) keep those.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_name not in known:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
            known[group.group_name] = dist.get_process_group_ranks(group)


def dump_memory(file: str) -> None:
    """Write what the GPU's memory holds, in the form that pytorch.org/memory_viz reads.

    The public `torch.cuda.memory_snapshot` returns the blocks alone. torch's guide to memory names this function.
    """
    torch.cuda.memory._dump_snapshot(file)
