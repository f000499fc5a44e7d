"""One test per private torch name or difference between versions, which fails when torch moves it."""

import gc
import inspect
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile, record_function

from tests.operations import Operations
from tests.patience import until
from tests.test_architecture import FILES, imports
from tests.workers import run
from torchllm.runtime import torch_compat, torch_meshes, torch_operations, torch_pipeline
from torchllm.runtime.torch_compat import (
    CheckpointWrapper,
    checkpoint_wrapper,
    local_region,
)
from torchllm.runtime.torch_meshes import flatten_mesh, join_meshes
from torchllm.runtime.torch_operations import varlen_attention
from torchllm.runtime.torch_pipeline import ConnectedStage
from torchllm.tools import torch_names
from torchllm.tools.launch import torch_records
from torchllm.tools.launch.torch_records import flight_records
from torchllm.tools.watch import torch_profile
from torchllm.tools.watch.torch_profile import break_profile_cycle, profiled_events


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """A group of which only rank 5 exists: enough for everything but sending."""
    dist.init_process_group("fake", rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def test_every_name_has_a_test_here() -> None:
    tests = Path(__file__).read_text()
    modules = (torch_compat, torch_meshes, torch_operations, torch_pipeline, torch_names, torch_profile, torch_records)
    for module in modules:
        prefix = f"{module.__name__}."
        names = {name.removeprefix(prefix) for file in FILES for name in imports(file) if name.startswith(prefix)}
        for name in names:
            is_record = isinstance(getattr(module, name), type) and issubclass(getattr(module, name), tuple)
            assert is_record or f"def test_{name}" in tests, name
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                assert name in names


@pytest.mark.usefixtures("eight_ranks")
def test_flatten_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    flat = flatten_mesh(mesh["a", "b"], "ab")
    assert (flat.shape, flat.mesh_dim_names) == ((4,), ("ab",))
    assert flat.get_local_rank() == 2  # a 1, b 0
    assert dist.get_process_group_ranks(flat.get_group()) == [1, 3, 5, 7]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_varlen_attention(kv_heads: int) -> None:
    """Its numbers need a GPU; that it takes groups of query heads, and calls the operation, does not."""
    q = torch.empty(10, 4, 8, device="meta", requires_grad=True)
    k = torch.empty(10, kv_heads, 8, device="meta", requires_grad=True)
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    with Operations() as recorded:
        out = varlen_attention(q, k, k, offsets, 10)
    assert recorded.all[0] == torch_operations.VARLEN_ATTENTION
    assert set(recorded.all[1:]) <= {torch.ops.aten.detach.default}
    assert out.shape == q.shape
    assert out.requires_grad


def test_VARLEN_FLASH() -> None:
    """It takes what a ring hands over; numbers by a stand-in in tests/parallel/test_ring.py, real ones in tests/gpu."""
    with torch.device("meta"):
        q, k, offsets = torch.empty(10, 4, 8), torch.empty(6, 2, 8), torch.empty(4, dtype=torch.int32)
    options = {"scale": 0.5, "window_size_left": 4, "window_size_right": 0}
    out, lse, *_ = torch_operations.VARLEN_FLASH(q, k, k, offsets, offsets, 7, 5, 0.0, True, False, **options)
    assert (out.shape, lse.shape) == (q.shape, (4, 10))


def test_VARLEN_GRADIENTS() -> None:
    """As `VARLEN_FLASH`."""
    with torch.device("meta"):
        q, k, lse = torch.empty(10, 4, 8), torch.empty(6, 2, 8), torch.empty(4, 10)
        state, offsets = torch.empty(2, dtype=torch.uint64), torch.empty(4, dtype=torch.int32)
    arguments = q, q, k, k, q, lse, offsets, offsets, 7, 5, 0.0, True, state, state[0]
    gradients = torch_operations.VARLEN_GRADIENTS(*arguments, scale=0.5)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, k.shape]


def test_PROFILER_MARKS() -> None:
    with Operations() as recorded, torch.profiler.record_function("a unit"):
        pass
    assert tuple(recorded.all) == torch_compat.PROFILER_MARKS


def test_VARLEN_ATTENTION() -> None:
    assert str(torch_operations.VARLEN_ATTENTION) == "torch_attn._varlen_attn.default"


def sums_on_equal_meshes() -> list[float]:
    """Of a tensor on a mesh, and on one like it, built after the first one's groups are destroyed."""
    sums = []
    for _ in range(2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        sharded = distribute_tensor(torch.ones(8), mesh["b"], [Shard(0)])
        sums.append(sharded.sum().full_tensor().item())
        for group in mesh.get_all_groups():
            dist.destroy_process_group(group)
        torch_meshes.forget_meshes()
    return sums


def test_forget_meshes() -> None:
    assert run(sums_on_equal_meshes, 4) == [[8.0, 8.0]] * 4


@pytest.mark.usefixtures("eight_ranks")
def test_group_with_name() -> None:
    group = dist.new_group([1, 5])
    assert torch_names.group_with_name(group.group_name) is group


def test_foreach_norm() -> None:
    """Ten million equal numbers: torch's public norm of several tensors is off by 1e-4 on a CPU."""
    tensors = [torch.full((10_000_000,), 0.1), torch.tensor([[3.0, 4.0]]), torch.zeros(0)]
    large, small, empty = torch_compat.foreach_norm(tensors, torch.float64)
    assert (large.dtype, large.shape) == (torch.float64, ())
    assert large.item() == pytest.approx(1e7**0.5 * float(torch.tensor(0.1)), rel=1e-9)
    assert (small.item(), empty.item()) == (5.0, 0.0)


@torch.library.custom_op("torchllm_tests::gradient_of_sine", mutates_args=())
def gradient_of_sine(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    with torch_operations.gradients_inside_operation():
        return torch.autograd.grad(F.pad(x, (1, 0)).sin().sum(), x)[0].clone()


@pytest.mark.parametrize("mode", [nullcontext, Operations])
def test_gradients_inside_operation(mode: Callable[[], Any]) -> None:
    x = torch.arange(3.0, requires_grad=True)
    with mode():
        torch.testing.assert_close(gradient_of_sine(x), x.cos())


def test_foreach_multiply() -> None:
    tensors = [torch.ones(2), torch.full((1, 1), 3.0)]
    torch_compat.foreach_multiply(tensors, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [[1.5]]]


def test_chosen_attention() -> None:
    """A CPU has a fused kernel for plain heads, and none for those that are summed over in the backward of a bias."""
    q = torch.zeros(1, 2, 16, 8)
    assert torch_operations.chosen_attention(q, q, q, None) == "flash"
    bias = torch.zeros(16, 16, requires_grad=True)
    assert torch_operations.chosen_attention(q, q, q, bias) == "math"


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("eight_ranks")
def test_join_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    joined = join_meshes(mesh["a"], flatten_mesh(mesh["b", "c"], "bc"))
    assert (joined.shape, joined.mesh_dim_names) == ((2, 4), ("a", "bc"))
    assert list(joined.get_coordinate() or ()) == [1, 1]
    groups = [sorted(dist.get_process_group_ranks(group)) for group in joined.get_all_groups()]
    assert groups == [[1, 5], [4, 5, 6, 7]]


def test_CheckpointWrapper() -> None:
    assert type(checkpoint_wrapper(nn.Linear(2, 2))) is CheckpointWrapper


def test_checkpoint_wrapper_recomputes_and_prefixes_names() -> None:
    calls: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(x)

    wrapped = checkpoint_wrapper(Counted(3, 3), preserve_rng_state=False)
    assert inspect.signature(checkpoint_wrapper).parameters.keys() >= {"module", "checkpoint_impl"}
    wrapped(torch.ones(2, 3)).square().sum().backward()
    assert len(calls) == 2  # forward, and again in the backward
    inner = [name for name, _ in nn.ModuleDict({"m": wrapped}).named_modules()]
    assert "m._checkpoint_wrapped_module" in inner


def check_local_regions() -> None:
    """Of an uneven matrix (13, 6), sharded in every way that the library shards."""
    whole = torch.arange(13 * 6, dtype=torch.float32).view(13, 6)
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    tensors: list[torch.Tensor] = [whole, distribute_tensor(whole, line, [Shard(0)])]
    tensors.append(distribute_tensor(whole[:3], line, [Shard(0)]))  # the last rank has none
    for placement in (Shard(0), Shard(1), Replicate()):
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(whole, world["tp"], [placement]))
        fully_shard(module, mesh=world["dp"])
        tensors.append(module.weight)
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        shape, offset = local_region(tensor)
        assert local.shape == shape
        if local.numel():
            rows, columns = (slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            assert torch.equal(local.detach(), whole[rows, columns])


def test_local_region_is_where_the_values_come_from() -> None:
    run(check_local_regions, 4)


def test_FakeTensorMode_has_shapes_and_no_memory() -> None:
    with torch_compat.FakeTensorMode(allow_non_fake_inputs=True) as fake:
        product = torch.empty(1 << 30, 1 << 10) @ torch.ones(1 << 10, 8, device="meta").to("cpu")
    assert isinstance(product, torch_compat.FakeTensor)
    assert (product.shape, product.device.type) == ((1 << 30, 8), "cpu")
    assert product.fake_mode is fake
    assert product.untyped_storage().nbytes() == (1 << 30) * 8 * 4


def test_TorchDispatchMode_sees_operations_of_the_backward_pass_too() -> None:
    with Operations() as recorded:
        torch.ones(3, requires_grad=True).exp().sum().backward()
    names = [operation.__name__ for operation in recorded.all]
    assert "exp.default" in names
    assert "mul.Tensor" in names  # exp's backward


@pytest.mark.parametrize("fake", [False, True])
def test_standard_strides(fake: bool) -> None:
    with torch_compat.FakeTensorMode() if fake else nullcontext():
        part = torch.empty(1, 32, 64)[:, :16]
        assert part.is_contiguous()
        assert part.stride() == (2048, 64, 1)
        same = torch_pipeline.standard_strides(part)
        assert same.stride() == torch.empty(1, 16, 64).stride() == (1024, 64, 1)
        assert same.untyped_storage() is part.untyped_storage()


def losses_of_a_v() -> list[float]:
    """Train a pipeline of four stages on two ranks, each of which has two neighbors or the two ends."""
    stages_of_rank = ((0, 3), (1, 2))
    like = torch.empty(1, 3).requires_grad_()
    stages = []
    for index in stages_of_rank[dist.get_rank()]:
        layer = nn.Linear(3, 3)
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
        stages.append(ConnectedStage(layer, index, 4, torch.device("cpu"), input_args=like, output_args=like))
    schedule = ScheduleZBVZeroBubble(stages, n_microbatches=4, loss_fn=lambda out, target: out.sum())
    inputs, losses = [], []
    if dist.get_rank() == 0:
        inputs = [torch.arange(12.0).view(4, 3)]
    schedule.step(*inputs, target=torch.zeros(4, 3), losses=losses)
    return [loss.item() for loss in losses]


def test_ConnectedStage_does_not_connect_to_its_own_rank() -> None:
    """On gloo the process would end; without a V there is nothing to skip."""
    assert run(losses_of_a_v, 2) == [[3.0, 12.0, 21.0, 30.0], []]


def test_skip_pipeline_vote_lets_one_rank_of_a_fake_pipeline_run() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with torch_compat.FakeTensorMode(allow_non_fake_inputs=True):
            like = torch.empty(1, 3).requires_grad_()
            stage = PipelineStage(nn.Linear(3, 3), 0, 2, torch.device("cpu"), input_args=like, output_args=like)
            schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, target: out.sum())
            torch_names.skip_pipeline_vote(schedule)
            schedule.step(torch.empty(2, 3))
            assert stage.submod.weight.grad.shape == (3, 3)
    finally:
        dist.destroy_process_group()


def exchanged() -> list[list[float]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.tensor([[10.0 * rank + receiver, -1.0] for receiver in range(ranks)])
    out = torch_operations.all_to_all(x, dist.group.WORLD)
    assert type(out) is torch.Tensor  # not one still in flight, which a compiled block would take for a constant
    return out.tolist()


def test_all_to_all() -> None:
    for receiver, out in enumerate(run(exchanged, 3)):
        assert out == [[10.0 * sender + receiver, -1.0] for sender in range(3)]


class ExchangedRows(NamedTuple):
    sent: list[float]
    received: list[float]


def exchanged_rows() -> ExchangedRows:
    """Send `rank` rows to rank 0 and one to each other rank, with work between the beginning and the end."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent = [rank] + [1] * (ranks - 1)
    received = list(range(ranks)) if rank == 0 else [1] * ranks
    x = torch.arange(float(sum(sent))) + 10.0 * rank
    begun = torch_operations.begin_all_to_all(x, sent, received, dist.group.WORLD)
    return ExchangedRows(x.tolist(), torch_operations.end_all_to_all(begun).tolist())


def test_begin_all_to_all() -> None:
    sent = [result.sent for result in run(exchanged_rows, 3)]
    assert sent == [[0.0, 1.0], [10.0, 11.0, 12.0], [20.0, 21.0, 22.0, 23.0]]


def test_end_all_to_all() -> None:
    received = [result.received for result in run(exchanged_rows, 3)]
    assert received == [[10.0, 20.0, 21.0], [0.0, 11.0, 22.0], [1.0, 12.0, 23.0]]


@pytest.mark.usefixtures("eight_ranks")
def test_unflatten_mesh() -> None:
    world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    mesh = torch_meshes.unflatten_mesh(flatten_mesh(world["b", "c"], "bc"), (1, 4), ("d", "e"))
    assert (mesh.shape, mesh.mesh_dim_names) == ((1, 4), ("d", "e"))
    assert dist.get_process_group_ranks(mesh.get_group("e")) == [4, 5, 6, 7]
    assert join_meshes(world["a"], mesh["e"]).shape == (2, 4)  # they have one root


def test_profiled_events() -> None:
    x = torch.ones(50, 50, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.time_ns()
        with record_function("ours"):
            (x @ x).sum().backward()
        end = time.time_ns()
    events = {event.name: event for event in profiled_events(profiler)}
    assert events.keys() >= {"ours", "aten::mm", "autograd::engine::evaluate_function: MmBackward0", "MmBackward0"}
    ours, product = events["ours"], events["aten::mm"]
    assert (ours.annotation, product.annotation) == (True, False)
    assert (events["MmBackward0"].backward, product.backward) == (True, False)
    assert ours.thread == product.thread
    assert ours.start <= product.start < product.end <= ours.end
    assert start - 1e6 <= ours.start < ours.end <= end + 1e6  # the clocks agree to 1 ms
    assert not any(event.asynchronous or event.kernel for event in events.values())


def raw_event(name: str, start: int, device: DeviceType, id: int, linked: int) -> SimpleNamespace:
    """What is used of an event of kineto, whose fields are functions."""
    fields = {
        "name": name,
        "start_ns": start,
        "duration_ns": 1,
        "device_type": device,
        "correlation_id": id,
        "linked_correlation_id": linked,
        "start_thread_id": 0,
        "is_user_annotation": False,
        "is_async": False,
        "scope": 0,
    }
    return SimpleNamespace(**{key: lambda value=value: value for key, value in fields.items()})


def test_a_kernel_is_linked_to_its_operator_and_not_to_a_launch_with_the_same_number() -> None:
    raw = [
        raw_event("aten::mm", start=10, device=DeviceType.CPU, id=7, linked=0),
        raw_event("cudaLaunchKernel", start=12, device=DeviceType.CPU, id=99, linked=7),
        raw_event("aten::add", start=500, device=DeviceType.CPU, id=8, linked=0),
        raw_event("cudaLaunchKernel", start=510, device=DeviceType.CPU, id=7, linked=8),  # CUPTI's 7, not torch's
        raw_event("gemm", start=100, device=DeviceType.CUDA, id=99, linked=7),
    ]
    profiler: Any = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: raw)))
    [kernel] = [event for event in profiled_events(profiler) if event.kernel]
    assert (kernel.start, kernel.launched) == (100, 10)


@pytest.mark.parametrize("broken", [False, True])
def test_break_profile_cycle(broken: bool) -> None:
    """Without it torch keeps a profile until the next garbage collection; once it does not, the function can go."""
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            torch.ones(2).sum()
        if broken:
            break_profile_cycle(profiler)
        assert profiled_events(profiler)
        alive = weakref.ref(profiler)
        del profiler
        assert (alive() is None) == broken
    finally:
        gc.enable()
    gc.collect()
    assert alive() is None


def test_flight_records() -> None:
    for rank, (first, second) in enumerate(run(_recorded, 2)):
        assert first.name == "gloo:all_reduce"
        assert first.group == "0"
        assert second.number == first.number + 1
        assert second.sequence == first.sequence + 1
        assert first.where.endswith(f"test_torch_compat.py:{_recorded.__code__.co_firstlineno + 4}"), rank
        assert second.created > first.created


def _recorded() -> list[Any]:
    dist.barrier()
    x = torch.ones(3)
    start = time.time_ns()
    dist.all_reduce(x)
    dist.all_reduce(x)
    return flight_records(start, places=True)


def progress() -> list[int]:
    """Unfinished operations of a new group: at the start, while rank 1 has not entered one, and at the end."""
    group, x = dist.new_group([0, 1]), torch.ones(1)
    dist.all_reduce(x, group=group)
    counts = [unfinished(0)]
    work = None
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
    counts.append(unfinished(1 - dist.get_rank()))
    dist.barrier()
    if work is None:
        work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    counts.append(unfinished(0))
    return counts


def unfinished(expected: int) -> int:
    """Operations of the youngest group that are not done, once they are as expected: a wait ends before they are."""

    def count() -> int:
        progress = torch_records.group_progress()
        youngest = progress[max(progress, key=lambda name: int(name.rpartition("/")[2]))]
        return youngest.enqueued - youngest.completed

    until(lambda: count() == expected)
    return count()


def test_group_progress() -> None:
    assert run(progress, 2) == [[0, 1, 0], [0, 0, 0]]


def limits() -> tuple[list[torch_records.LimitedGroup], str]:
    world, pair = dist.group.WORLD, dist.new_group([0, 1], group_desc="a pair")
    assert world is not None
    dist.barrier(group=pair)  # connects: a group's first operation waits for its peers longer than this time-out
    groups = torch_records.limit_groups(0.2, {world.group_name})  # in the world's group rank 1 waits longer
    error = ""
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(1), group=pair)
        except RuntimeError as failure:
            error = str(failure)
    dist.barrier()
    return list(groups.values()), error


def test_limit_groups() -> None:
    (groups_0, error_0), (groups_1, error_1) = run(limits, 2)
    assert groups_0 == groups_1 == [([0, 1], "a pair")]
    assert "Timed out waiting 200ms" in error_0
    assert error_1 == ""


def test_reads_found_inf() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    assert not torch_compat.reads_found_inf(torch.optim.AdamW([weight]))
    assert torch_compat.reads_found_inf(torch.optim.AdamW([weight], fused=True))


def test_dump_memory() -> None:
    """Without a GPU only the name and its argument can be checked."""
    assert list(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)[:1] == ["filename"]


def test_free_gather_buffer() -> None:
    """That the buffer is freed is held by tests/tools/planner/test_memory.py."""
    assert list(inspect.signature(FSDPModule._set_unshard_async_op).parameters) == ["self", "async_op"]


def recorded_collectives() -> list[str]:
    """Return what a profile has of two asynchronous all-reduces, the second unrecorded."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        with torch_compat.unrecorded():
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        torch.ones(1).exp()
    return [event.name for event in profiled_events(profiler) if "all_reduce" in event.name or "exp" in event.name]


def workers_of_gloo(backend: str) -> int:
    """Return the number of threads that a group of a mesh starts for its operations."""

    def count() -> int:
        return sum(task.read_text().strip() == "pt_gloo_runloop" for task in Path("/proc/self/task").glob("*/comm"))

    before = count()
    group = dist.new_group(backend=backend or None)
    dist.barrier(group)
    return count() - before


def test_one_thread_of_gloo() -> None:
    """It is the backend of the pool, as of a run, and so of the groups of its meshes."""
    for backend, workers in {"": 1, "gloo": 2}.items():
        assert run(workers_of_gloo, 2, backend) == [workers] * 2


def test_unrecorded() -> None:
    for names in run(recorded_collectives, 2):
        assert [name for name in names if name.startswith("gloo")] == ["gloo:all_reduce"]
        assert "aten::exp" in names
