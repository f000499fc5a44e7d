"""The dispatch mode: memory from making to end, each storage once; what is sent, by axis."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchllm.config import Parallel
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.torch_compat import FakeTensorMode
from torchllm.tools.dry_run.memory import spans
from torchllm.tools.dry_run.trace import CPU, fake_ranks
from torchllm.tools.dry_run.tracker import Tracker
from torchllm.tools.mesh_axes import MeshAxis, axis_of_group

KIB = 1024


def peak_of(tracker: Tracker) -> int:
    return max(sum(span.peak.values()) for span in spans(tracker))


def test_memory_is_counted_from_its_making_to_its_end_and_views_not_at_all() -> None:
    for fake in [True, False]:
        mode = FakeTensorMode() if fake else None
        with mode or torch.no_grad():
            tracker = Tracker(mode, {})
            with tracker:
                tracker.mark("begin")
                first = torch.ones(256)  # 1 KiB
                view = first.view(16, 16).t()[2:]
                second = first + 1  # 2 KiB in all
                first.add_(1)
                del first
                third = torch.ones(1024)  # 4 KiB more: `view` keeps the first
                tracker.mark("tail")
                del view
                fourth = torch.ones(256)  # in the place of the first
        begin, tail = spans(tracker)
        assert sum(begin.peak.values()) == sum(begin.end.values()) == 6 * KIB, fake
        assert sum(tail.start.values()) == 6 * KIB, fake
        assert sum(tail.peak.values()) == 6 * KIB, fake
        assert [t.numel() for t in (second, third, fourth)] == [256, 1024, 256], fake


def test_another_fake_mode_is_not_counted() -> None:
    """DTensor works out shapes of global tensors with one, many times what the rank has."""
    with FakeTensorMode() as fake:
        tracker = Tracker(fake, {})
        with tracker:
            tracker.mark("begin")
            with FakeTensorMode():
                torch.ones(1 << 30) + 1
            kept = torch.ones(256)
    assert peak_of(tracker) == KIB == kept.nbytes


def test_storage_that_is_emptied_and_filled_in_place() -> None:
    with FakeTensorMode() as fake:
        tracker = Tracker(fake, {})
        with tracker:
            tracker.mark("begin")
            weight = torch.empty(1024)
            weight.copy_(torch.zeros(1024))
            tracker.mark("gathered")
            weight.untyped_storage().resize_(0)
            tracker.mark("freed")
            weight.untyped_storage().resize_(4 * KIB)
            weight.copy_(torch.zeros(1024))
            tracker.mark("gathered again")
    sizes = {span.name: span.start["gathered"] for span in spans(tracker)}
    assert sizes == {"begin": 0, "gathered": 4 * KIB, "freed": 0, "gathered again": 4 * KIB}


def test_a_result_that_is_waited_for_is_held_as_long_as_what_was_waited_for() -> None:
    """Selective recomputation saves what a collective returns, and the wait's result is soon freed."""
    with fake_ranks(0, 4), FakeTensorMode() as fake:
        world = dist.group.WORLD.group_name
        tracker = Tracker(fake, {world: MeshAxis("world", (0,), 4)})
        with tracker:
            tracker.mark("begin")
            x = torch.ones(256)
            saved = torch.ops._c10d_functional.all_reduce(x, "sum", world)
            out = torch.ops._c10d_functional.wait_tensor(saved)
            tracker.mark("waited")
            del x, out
            tracker.mark("saved")
            more = saved + 1
            del saved
            tracker.mark("freed")
    sizes = {span.name: sum(span.start.values()) for span in spans(tracker)}
    assert sizes["waited"] == 2 * KIB  # of what is sent and of one result
    assert (sizes["saved"], sizes["freed"]) == (KIB, KIB) == (KIB, more.nbytes)


def test_what_outlives_a_forward_is_for_the_backward() -> None:
    weight = torch.ones(256, requires_grad=True)
    tracker = Tracker(None, {})
    with tracker:
        tracker.claim([weight], "parameters")
        tracker.mark("begin")
        tracker.begin_forward()
        loss = (weight.exp() * 2).sigmoid().sum()  # keeps the exponential's and the sigmoid's results
        tracker.end_forward()
        tracker.mark("backward")
        loss.backward()
        tracker.claim([weight.grad], "gradients")
        tracker.mark("tail")
    begin, backward, tail = spans(tracker)
    assert begin.start["parameters"] == KIB
    assert backward.start["activations"] == 2 * KIB + loss.nbytes
    assert begin.peak["temporary"] == KIB
    assert (tail.start["activations"], tail.start["gradients"]) == (loss.nbytes, KIB)


def test_what_a_rank_sends_in_a_ring_by_axis() -> None:
    """Eight ranks, dp_shard 2 x tp 4: plain, functional and DTensor's collectives of 1 KiB whole tensors."""
    with fake_ranks(0, 8):
        mesh = build_mesh(Parallel(dp_shard=2, tp=4), CPU)
        tp, shard = mesh.tp.get_group(), mesh.fsdp.get_group()
        whole, part = torch.ones(256), torch.ones(64)
        with Tracker(None, axis_of_group(mesh)) as tracker:
            dist.all_reduce(whole, group=tp)
            dist.all_gather_into_tensor(whole, part, group=tp)
            dist.all_gather([torch.empty(64) for _ in range(4)], part, group=tp)
            dist.reduce_scatter_tensor(torch.ones(128), whole, group=shard)
            dist.all_to_all_single(torch.empty(256), whole, group=tp)
            dist.broadcast(whole, 0, group=shard)
            dist.send(whole, 1, group=tp)
            dist.recv(whole, 1, group=tp)
            dist.all_reduce(whole)
            DTensor.from_local(part, mesh.tp, [Shard(0)]).redistribute(placements=[Replicate()]).to_local() + 1
            DTensor.from_local(whole, mesh.tp, [Partial()]).redistribute(placements=[Shard(0)]).to_local() + 1
            dist.all_reduce(whole, group=mesh.pp.get_group())  # of one rank: nothing
    found: Counter[tuple[str, str]] = Counter()
    for one in tracker.sent:
        found[one.axis, one.kind] += one.bytes
    assert found == {
        ("tp", "all_reduce"): 2 * 3 / 4 * KIB,
        ("tp", "all_gather"): 3 * 3 / 4 * KIB,
        ("tp", "reduce_scatter"): 3 / 4 * KIB,
        ("tp", "all_to_all"): 3 / 4 * KIB,
        ("tp", "send"): KIB,
        ("fsdp", "reduce_scatter"): 1 / 2 * KIB,
        ("fsdp", "broadcast"): 1 / 2 * KIB,
        ("world", "all_reduce"): 2 * 7 / 8 * KIB,
    }


def test_a_group_that_the_mesh_does_not_name_is_an_error() -> None:
    """A new parallelism whose group is missing from `axis_of_group` must not seem to send nothing."""
    with fake_ranks(0, 8):
        mesh = build_mesh(Parallel(dp_shard=2, tp=4), CPU)
        unnamed = dist.new_group([0, 3, 5])
        alone = dist.new_group([0])
        x = torch.ones(256)
        message = r"all_reduce .* ranks \[0, 3, 5\]. Add the group to `axis_of_group` \(torchllm/tools/mesh_axes.py\)"
        with Tracker(None, axis_of_group(mesh)) as tracker:
            dist.all_reduce(x, group=alone)  # a group of one rank sends nothing
            with pytest.raises(RuntimeError, match=message):
                dist.all_reduce(x, group=unnamed)
            with pytest.raises(RuntimeError, match=message):
                torch.ops._c10d_functional.all_reduce(x, "sum", unnamed.group_name)
    assert tracker.sent == []


def test_logits_are_told_from_the_rest_while_the_head_runs() -> None:
    tracker = Tracker(None, {})
    with tracker:
        tracker.mark("begin")
        tracker.columns = 96
        logits, hidden = torch.ones(8, 96), torch.ones(8, 64)
        tracker.columns = 0
        ffn: Tensor = torch.ones(8, 96)
    assert spans(tracker)[0].end["logits"] == logits.nbytes == ffn.nbytes != hidden.nbytes
