"""Every private torch name that the library uses, and every difference between torch 2.11 and 2.15, with its reason.

Private names that only one file needs may stay there: `PRIVATE` in tests/test_architecture.py lists them with reasons.
`tests/runtime/test_torch_compat.py` has a test for each name in this file, which fails when torch moves it.
"""

import inspect
import pickle
from collections.abc import Container
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import varlen_attn
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

# Re-exported, since they have no public path:
# - checkpoint_wrapper: makes a module recompute its forward in the backward pass, as a module, which FSDP needs.
# - FakeTensor, FakeTensorMode: tensors with shapes and devices but no memory, used by the dry run.
# - TorchDispatchMode: a hook that sees every operation, of the backward pass too.
__all__ = [
    "PROFILER_MARKS",
    "VARLEN_ATTENTION",
    "ConnectedStage",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "all_to_all",
    "allocations",
    "begin_all_to_all",
    "break_profile_cycle",
    "checkpoint_wrapper",
    "chosen_attention",
    "dump_memory",
    "end_all_to_all",
    "flatten_mesh",
    "flight_records",
    "foreach_multiply",
    "foreach_norm",
    "forget_meshes",
    "free_gather_buffer",
    "group_progress",
    "group_with_name",
    "join_meshes",
    "limit_groups",
    "local_region",
    "profiled_events",
    "reads_found_inf",
    "skip_pipeline_vote",
    "standard_strides",
    "storage_info",
    "unflatten_mesh",
    "varlen_attention",
]

DUMP_FLIGHT_RECORDER = [getattr(c10d, name) for name in ("_dump_fr_trace", "_dump_nccl_trace") if hasattr(c10d, name)]
"""functions that dump a flight recorder, pickled; there is one for NCCL and one for all other backends.

FOOTGUN: `_dump_fr_trace` omits NCCL's records, and `_dump_nccl_trace` exists only in a torch with NCCL.
"""

PROFILER_MARKS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
"""the operations of `torch.profiler.record_function`, which FSDP calls when it gathers a unit; private; selective
recomputation of a block with a unit inside must ignore them"""

VARLEN_ATTENTION = torch.ops.torch_attn._varlen_attn.default
"""the operation that `torch.nn.attention.varlen.varlen_attn` calls; private; selective recomputation looks for it"""


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, window: int = 0) -> Tensor:
    """Return the causal attention within sequences of unequal length: q (T, H, Q), k and v (T, K, Q) -> (T, H, Q).

    offsets: start of each sequence, and end of the last one, (N + 1,) int32. longest: upper bound of their length.
    window: number of tokens that a token sees, itself included; 0: all before it.
    From torch 2.12 on, grouped query heads need an argument; 2.11 detects them.
    """
    options: dict[str, Any] = {"window_size": (window - 1, 0)}  # causal; -1: no limit
    if "enable_gqa" in _VARLEN_PARAMETERS:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, **options)
    assert isinstance(out, Tensor)  # without unused results
    return out


_VARLEN_PARAMETERS = inspect.signature(varlen_attn).parameters


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return all dimensions of a mesh as one dimension called `name`. Private: torch has no public name for it yet."""
    return mesh._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the ranks of a mesh of one dimension as several dimensions, outermost first.

    Private: as `flatten_mesh`.
    """
    return mesh._unflatten(0, sizes, names)


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """Return one mesh with the dimensions of all `meshes`, outermost first, all sliced from one world mesh.

    Private: torch has no public name for it, and slicing a flattened dimension from the world by name is deprecated.
    """
    return DeviceMesh._concatenate(list(meshes))


def free_gather_buffer(unit: FSDPModule) -> None:
    """Make an FSDP unit free its all-gather buffer as soon as the weights are copied out of it.

    Private: in a forward pass FSDP keeps a unit's buffer until the next unit's weights are gathered. Only asynchronous
    gathers free it earlier, and they have no other switch.
    """
    unit._set_unshard_async_op(True)


def forget_meshes() -> None:
    """Clear DTensor's caches of meshes, whose process groups are destroyed.

    Private: the caches look up results by a mesh's ranks and names, and return tensors on the mesh of the first call.
    After its groups are destroyed, the next collective fails. The caches also keep the groups' threads alive.
    """
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def local_region(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the part of a parameter that this rank holds, and its offset in the whole, per dimension.

    A plain tensor is held whole. Private: only this helper of DTensor knows uneven shards and FSDP2's strided ones
    (FSDP and tensor parallelism on one dimension).
    """
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.dim()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(shape), tuple(offset)


def storage_info(file: str, offset: int, length: int) -> Any:
    """Return torch's record of the place of a piece of a tensor: a file in the checkpoint's folder, and its bytes.

    Private: torch has no public names for the parts of `.metadata`.
    """
    return _StorageInfo(file, offset, length)


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send x[i] to rank i of `group` and return the received tensors: (n, ...) -> (n, ...) for n ranks.

    Not differentiable. Private: the public `all_to_all_single` writes into a tensor that it is given, which selective
    recomputation cannot keep.
    """
    rows_per_rank = [1] * len(x)
    return end_all_to_all(begin_all_to_all(x, rows_per_rank, rows_per_rank, group))


def begin_all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Start sending sent[i] rows of x to rank i of `group`: (N, ...) -> (M, ...), for `end_all_to_all`.

    sent: their sum is N; received: rows from each rank, their sum is M. Not differentiable. Private: as `all_to_all`.
    """
    return torch.ops._c10d_functional.all_to_all_single(x, received, sent, group.group_name)


def end_all_to_all(x: Tensor) -> Tensor:
    """Wait for the result of `begin_all_to_all`. Not differentiable. Private: as `all_to_all`."""
    return torch.ops._c10d_functional.wait_tensor(x)


def foreach_norm(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the L2 norm of each tensor, summed in `dtype`, in one operation; there must be at least one tensor.

    Private: the public `torch.nn.utils.get_total_norm` calls it too, but sums in the tensors' own type.
    """
    return list(torch._foreach_norm(tensors, 2.0, dtype))


def foreach_multiply(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply every tensor by `factor`, (), in place, in one operation; there must be at least one tensor.

    Private: the public `torch.nn.utils.clip_grads_with_norm_` calls it too, but takes parameters, whose gradients are
    DTensors of several meshes: it multiplies each by itself, and its factor may not be one of them.
    """
    torch._foreach_mul_(tensors, factor)


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer skips its step if its attribute `found_inf` is not 0.

    GradScaler reads the same attribute, which torch's fused optimizers set.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def chosen_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """Return the kernel that `scaled_dot_product_attention` takes: math, flash, efficient, cudnn or overrideable.

    Arguments (B, H, S, Q) as for that function; without a mask, attention is causal. Private: public functions such as
    `torch.backends.cuda.can_use_flash_attention` tell which kernels could run, not which one torch prefers.
    """
    grouped = q.shape[1] != k.shape[1]
    number = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return SDPBackend(number).name.partition("_")[0].lower()


class ConnectedStage(PipelineStage):
    """A stage of a pipeline, which is connected to the stages on other ranks before the first step.

    Private: torch 2.11 also connects a stage to a neighbour on the same rank, as V-shaped schedules have, and gloo
    aborts a process that sends to itself. Later versions do not call this.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        messages = super()._get_init_p2p_neighbors_ops()
        return [message for message in messages if message.group_peer != self.group_rank]


def standard_strides(x: Tensor) -> Tensor:
    """Return a view of a contiguous tensor with the strides of a new tensor of its shape.

    The stride of a dimension of size 1 is arbitrary, and a slice has another one there than a new tensor. Pipeline
    stages in torch 2.11 refuse to send it; later versions do not compare strides.
    """
    return x.flatten().view(x.shape)


def skip_pipeline_vote(schedule: Any) -> None:
    """Let a pipeline schedule start its first step without exchanging whether the shapes of stages are static.

    Private: all stages of this library have static shapes, but torch 2.13 has no setting for it, and fake tensors have
    no answer to read. torch 2.11 has no such exchange, torch 2.15 skips it for fake ranks.
    """

    def all_static(stages: Any, *_: Any) -> None:
        from torch.distributed.pipelining._utils import InferenceMode

        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    if hasattr(schedule, "_warmup_p2p"):
        schedule._warmup_p2p = all_static


class ProfiledEvent(NamedTuple):
    """An operator, kernel or annotation that the profiler recorded; times in nanoseconds since 1970."""

    name: str
    start: int
    end: int
    thread: int
    """id of the thread that started it"""
    annotation: bool
    """a named part of the program (`record_function`), not an operator"""
    backward: bool
    """a node of autograd's graph, which contains its operators"""
    asynchronous: bool
    """runs in the background of the thread that started it, as gloo's collectives do"""
    kernel: bool
    """runs on the GPU"""
    launched: int
    """for a kernel, the time of its launch on the host; else `start`"""


def profiled_events(profiler: profile) -> list[ProfiledEvent]:
    """Return the records of a stopped profiler, unordered.

    Private: the public `profiler.events()` builds a tree of them with their memory, which takes ten times as long as a
    small step.
    """
    raw_events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]  # None before it has run
    # The ids of operators are torch's, the ids of cudaLaunchKernel etc. are CUPTI's: both count from 1. A kernel
    # is linked to its operator, which itself is linked to nothing; torch's own parser makes the same distinction.
    launched = {}
    for event in raw_events:
        if not _on_gpu(event) and event.linked_correlation_id() == 0:
            launched[event.correlation_id()] = event.start_ns()
    events = []
    for event in raw_events:
        start, on_gpu = event.start_ns(), _on_gpu(event)
        if on_gpu and event.is_user_annotation():
            continue  # the host's annotation once more, on the GPU's time line
        events.append(
            ProfiledEvent(
                name=event.name(),
                start=start,
                end=start + event.duration_ns(),
                thread=event.start_thread_id(),
                annotation=event.is_user_annotation(),
                backward=event.scope() == BACKWARD_SCOPE,
                asynchronous=event.is_async(),
                kernel=on_gpu,
                launched=launched.get(event.linked_correlation_id(), start) if on_gpu else start,
            )
        )
    return events


def allocations(profiler: profile) -> list[int]:
    """Return the bytes of torch's allocations of host memory, and of its frees as negative numbers, in order.

    profiler: stopped, with `profile_memory=True`. Private: the public `profiler.events()` sums the memory of each
    operator, which hides a peak inside it.
    """
    raw_events: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]  # None before it has run
    changes = [event for event in raw_events if event.name() == "[memory]" and not _on_gpu(event)]
    return [event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())]


def break_profile_cycle(profiler: profile) -> None:
    """Break the reference cycle of a stopped profile, so that it is freed with its last reference; it cannot restart.

    Private: torch does not document `action_map`, which holds methods of the profile and so makes it a reference cycle.
    A run collects cycles rarely, and a profile holds 1.4 KiB per event.
    """
    profiler.action_map.clear()


BACKWARD_SCOPE = 1
"""RecordScope::BACKWARD_FUNCTION in torch's C++"""


def _on_gpu(event: Any) -> bool:
    return event.device_type().name != "CPU"


class FlightRecord(NamedTuple):
    """A collective or message that this rank has started, from torch's flight recorder."""

    number: int
    """number of the record on this rank"""
    group: str
    """torch's name of the process group"""
    name: str
    """backend and operation: gloo:all_reduce"""
    sequence: int
    """number of the collective in its group, the same on all of its ranks; 0 for a message"""
    created: int
    """when it began, in nanoseconds since 1970"""
    done: bool
    where: str
    """file:line of the caller, the innermost outside torch; empty if not requested"""


def flight_records(since: int = 0, places: bool = False) -> list[FlightRecord]:
    """Return the records of this rank after `since`, in nanoseconds since 1970, oldest first.

    The recorder keeps the last TORCH_FR_BUFFER_SIZE records. `places`: also find the caller of each, slower.
    Private: torch documents the flight recorder and the tool that reads its files, but not this call, nor the keys.
    """
    records = []
    for dump in DUMP_FLIGHT_RECORDER:
        for entry in pickle.loads(dump(True, places, False)).get("entries", []):
            if entry["time_created_ns"] > since:
                record = FlightRecord(
                    number=entry["record_id"],
                    group=entry["process_group"][0],
                    name=entry["profiling_name"],
                    sequence=0 if entry["is_p2p"] else entry["collective_seq_id"],
                    created=entry["time_created_ns"],
                    done=entry["retired"],
                    where=_innermost_outside_torch(entry.get("frames", [])),
                )
                records.append(record)
    return records


def _innermost_outside_torch(frames: list[dict[str, Any]]) -> str:
    """Return file:line of the innermost frame outside torch; empty if there is none. frames: innermost first."""
    for frame in frames:
        if "/torch/" not in frame["filename"]:
            return f"{frame['filename']}:{frame['line']}"
    return ""


class GroupProgress(NamedTuple):
    """Progress of a process group, in collectives of this rank."""

    enqueued: int
    """number of the last started collective"""
    completed: int
    """number of the last finished collective"""


def group_progress() -> dict[str, GroupProgress]:
    """Return the progress of each process group of this rank; takes microseconds. Private: as `flight_records`.

    FOOTGUN: if two collectives end together, the earlier one may be recorded last, and so seem to be the last finished.
    Gloo neither counts nor records messages (`send`, `recv`).
    """
    progress = {}
    for recorder, dump in enumerate(DUMP_FLIGHT_RECORDER):
        for group, status in pickle.loads(dump(False, False, False)).get("pg_status", {}).items():
            counts = GroupProgress(status["last_enqueued_collective"], status["last_completed_collective"])
            progress[f"{recorder}/{group}"] = counts
    return progress


def group_with_name(name: str) -> dist.ProcessGroup:
    """Return the process group with this name. Private: torch has no public way from the name to the group."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]  # torch's GroupName is a str


class LimitedGroup(NamedTuple):
    """A process group of this rank."""

    ranks: list[int]
    description: str
    """group_desc of `dist.new_group`"""


def limit_groups(seconds: float, limited: Container[str]) -> dict[str, LimitedGroup]:
    """Set the timeout of every process group whose name is not in `limited`; return these groups by name.

    Private: torch lists no groups, and before 2.14 has no public name for the setting. The groups of a mesh accept no
    timeout; they get torch's default, 10 min with NCCL and 30 min with gloo. Gloo's messages (`send`, `recv`) keep
    the default, as does the first operation of a group that connects its ranks lazily (`TORCH_GLOO_LAZY_INIT`): a rank
    whose peer never comes waits for the connection.
    """
    set_timeout = dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout
    groups: dict[str, LimitedGroup] = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_name not in limited:
            set_timeout(timedelta(seconds=seconds), group)
            groups[group.group_name] = LimitedGroup(dist.get_process_group_ranks(group), group.group_desc)
    return groups


def dump_memory(file: str) -> None:
    """Write a snapshot of the GPU's memory to `file`, in the format of pytorch.org/memory_viz.

    Private: the public `torch.cuda.memory_snapshot` returns the blocks without the history. torch's guide to GPU memory
    names this function.
    """
    torch.cuda.memory._dump_snapshot(file)
