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

# Re-exported, for they have no public path:
# - checkpoint_wrapper: makes a module recompute its forward in the backward pass, as a module, which FSDP needs.
# - FakeTensor, FakeTensorMode: tensors with shapes and devices but no memory, for the dry run.
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

FOOTGUN: `_dump_fr_trace` leaves out what NCCL has recorded, and `_dump_nccl_trace` exists only in a torch with NCCL.
"""

PROFILER_MARKS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
"""the operations of `torch.profiler.record_function`, with which FSDP shows when it gathers a unit; private, for
selective recomputation of a block with a unit inside must ignore them"""

VARLEN_ATTENTION = torch.ops.torch_attn._varlen_attn.default
"""the operation that `torch.nn.attention.varlen.varlen_attn` calls; private, for selective recomputation asks for it"""


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, window: int = 0) -> Tensor:
    """Return the causal attention within sequences of unequal length: q (T, H, Q), k and v (T, K, Q) -> (T, H, Q).

    offsets: index at which each sequence begins, and the last one ends, (N + 1,) int32. longest: no sequence is longer.
    window: a token sees so many tokens, itself the last of them; 0: all before it.
    Groups of query heads must be announced from torch 2.12 on; 2.11 takes them as they are.
    """
    options: dict[str, Any] = {"window_size": (window - 1, 0)}  # causal; -1: no limit
    if "enable_gqa" in _VARLEN_PARAMETERS:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, **options)
    assert isinstance(out, Tensor)  # and not also what nothing here asks for
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
    """Return one mesh whose dimensions are those of `meshes`, outermost first, all sliced from one world mesh.

    Private: torch has no public name for it, and slicing a flattened dimension from the world by name is deprecated.
    """
    return DeviceMesh._concatenate(list(meshes))


def free_gather_buffer(unit: FSDPModule) -> None:
    """Make an FSDP unit free the buffer that its weights are gathered in once they are copied to their places.

    Private: FSDP keeps a unit's buffer, in a forward pass, until the next unit's weights are there. What frees it is an
    asynchronous gather, for which there is no other word.
    """
    unit._set_unshard_async_op(True)


def forget_meshes() -> None:
    """Clear DTensor's caches of meshes, whose process groups are destroyed.

    Private: the caches find a result by a mesh of the same ranks and names, and return tensors on the mesh of the first
    call. With that one's groups destroyed, the next collective fails. They also keep the groups' threads alive.
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
    """Return torch's record of where a piece of a tensor lies: a file of the checkpoint's folder, and bytes in it.

    Private: torch has no public name for what its `.metadata` consists of.
    """
    return _StorageInfo(file, offset, length)


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send x[i] to rank i of `group` and return what the ranks sent here: (n, ...) -> (n, ...) for n ranks.

    Not differentiable. Private: the public `all_to_all_single` writes into a tensor that it is given, which selective
    recomputation cannot keep.
    """
    rows_per_rank = [1] * len(x)
    return end_all_to_all(begin_all_to_all(x, rows_per_rank, rows_per_rank, group))


def begin_all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Begin to send sent[i] rows of x to rank i of `group`: (N, ...) -> (M, ...), to be given to `end_all_to_all`.

    sent: their sum is N; received: rows from each rank, their sum is M. Not differentiable. Private: as `all_to_all`.
    """
    return torch.ops._c10d_functional.all_to_all_single(x, received, sent, group.group_name)


def end_all_to_all(x: Tensor) -> Tensor:
    """Wait for what `begin_all_to_all` returned. Not differentiable. Private: as `all_to_all`."""
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
    """Return whether an optimizer's step changes nothing where its attribute `found_inf` is not 0.

    GradScaler asks the same attribute, which torch's fused optimizers set.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def chosen_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """Return the kernel that `scaled_dot_product_attention` takes: math, flash, efficient, cudnn or overrideable.

    Heads, (B, H, S, Q), as it takes them; without a mask they are causal. Private: the public
    `torch.backends.cuda.can_use_flash_attention` and its like say what could run, not which of them torch prefers.
    """
    grouped = q.shape[1] != k.shape[1]
    number = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return SDPBackend(number).name.partition("_")[0].lower()


class ConnectedStage(PipelineStage):
    """A stage of a pipeline, which is connected to the stages on other ranks before the first step.

    Private: torch 2.11 connects a stage also to its neighbour on the same rank, of which schedules in the shape of a V
    have some, and gloo ends the process that sends to itself. Later versions do not call this.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        messages = super()._get_init_p2p_neighbors_ops()
        return [message for message in messages if message.group_peer != self.group_rank]


def standard_strides(x: Tensor) -> Tensor:
    """Return a contiguous tensor with the strides that torch gives to a new one of its shape, which share memory.

    The stride of a dimension of size 1 says nothing, and a part cut out of a tensor has another one there than a new
    tensor. Stages of pipelines in torch 2.11 refuse to send it; later versions do not compare strides.
    """
    return x.flatten().view(x.shape)


def skip_pipeline_vote(schedule: Any) -> None:
    """Let a pipeline schedule begin its first step without asking the other stages whether their shapes are static.

    Private: all stages of this library have static shapes, torch 2.13 cannot be told so, and with fake tensors there is
    no answer to read. torch 2.11 does not ask, torch 2.15 does not ask ranks that are fake.
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
    """for a kernel, when the host launched it; else `start`"""


def profiled_events(profiler: profile) -> list[ProfiledEvent]:
    """Return what a stopped profiler has recorded, in no order.

    Private: the public `profiler.events()` builds a tree of them with their memory, which takes ten times as long as a
    small step.
    """
    raw_events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]  # None before it has run
    # The ids of operators are torch's, those of cudaLaunchKernel and the like are CUPTI's: both count from 1. A kernel
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
    """Return the bytes of each piece of host memory that torch took, and of each that it gave back, negative, in order.

    profiler: stopped, with `profile_memory=True`. Private: the public `profiler.events()` adds up what happens within
    one operator, so that a peak inside it does not show.
    """
    raw_events: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]  # None before it has run
    changes = [event for event in raw_events if event.name() == "[memory]" and not _on_gpu(event)]
    return [event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())]


def break_profile_cycle(profiler: profile) -> None:
    """Let a stopped profile be freed, with all its events, as soon as nobody refers to it; it cannot be started again.

    Private: torch does not document `action_map`, which holds methods of the profile and so makes it a reference cycle.
    A run collects cycles rarely, and a profile holds 1.4 KiB per event.
    """
    profiler.action_map.clear()


BACKWARD_SCOPE = 1
"""RecordScope::BACKWARD_FUNCTION in torch's C++"""


def _on_gpu(event: Any) -> bool:
    return event.device_type().name != "CPU"


class FlightRecord(NamedTuple):
    """A collective or message that this rank has begun, from torch's flight recorder."""

    number: int
    """counts all records of this rank"""
    group: str
    """torch's name of the process group"""
    name: str
    """backend and operation: gloo:all_reduce"""
    sequence: int
    """counts the collectives of the group, the same on all of its ranks; 0 for a message"""
    created: int
    """when it began, in nanoseconds since 1970"""
    done: bool
    where: str
    """file:line that called it, the innermost outside torch; empty if that was not asked for"""


def flight_records(since: int = 0, places: bool = False) -> list[FlightRecord]:
    """Return what this rank has begun after `since`, in nanoseconds since 1970, oldest first.

    The recorder keeps the last TORCH_FR_BUFFER_SIZE records. `places`: also find the line that called each, slower.
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
    """Return file:line of the first frame (they begin with the innermost) that is not torch's; empty if all are."""
    for frame in frames:
        if "/torch/" not in frame["filename"]:
            return f"{frame['filename']}:{frame['line']}"
    return ""


class GroupProgress(NamedTuple):
    """How far a process group has come, in collectives of this rank."""

    enqueued: int
    """number of the last collective that has begun"""
    completed: int
    """number of the last collective that is done"""


def group_progress() -> dict[str, GroupProgress]:
    """Return the progress of each process group of this rank; takes microseconds. Private: as `flight_records`.

    FOOTGUN: if two collectives end together, the earlier one may be noted last, and so seem the last that is done. Gloo
    neither counts nor records messages (`send`, `recv`).
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
    """what `dist.new_group` was given as its group_desc"""


def limit_groups(seconds: float, limited: Container[str]) -> dict[str, LimitedGroup]:
    """Set the time-out of every process group whose name is not in `limited`; return those groups by name.

    Private: torch lists no groups, and before 2.14 has no public name for the setting. The groups of a mesh accept no
    time-out; they get torch's default, 10 min with NCCL and 30 min with gloo. Gloo's messages (`send`, `recv`) keep
    that, as does the first operation of a group that connects its ranks only then (`TORCH_GLOO_LAZY_INIT`): a rank
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
    """Write what the GPU's memory holds to `file`, in the format that pytorch.org/memory_viz reads.

    Private: the public `torch.cuda.memory_snapshot` returns the blocks without the history. torch's guide to GPU memory
    names this function.
    """
    torch.cuda.memory._dump_snapshot(file)
