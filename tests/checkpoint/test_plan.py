"""Who writes what; `test_tensors.py` has real layouts on live ranks."""

from collections import Counter
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import workers
from tests.growth.checkpoint_index import index_of, synthetic_ranks
from torchllm.checkpoint import plan as plans
from torchllm.checkpoint.index import Index, Region
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.checkpoint.plan import InventoryEntry, JobParts, SavePlan, agree_on_plan, make_index, region_numbers
from torchllm.checkpoint.state import parts_of, random_state

pytestmark = pytest.mark.quick


def index_from(shapes: Sequence[tuple[int, ...]], regions: Sequence[Sequence[Region]]) -> Index:
    """The index of tensors "0", "1", ... of these shapes; `regions` are those of each rank."""
    inventory = [InventoryEntry(str(number), "float32", shape, 4, number) for number, shape in enumerate(shapes)]
    numbers = [region_numbers(of_rank) for of_rank in regions]
    return make_index(JobParts([inventory], [0] * len(regions), numbers))


def cuts_and_writers(index: Index, key: str) -> tuple[list[list[int]], list[int]]:
    grid = index.tensors[key].grid
    return [cuts.tolist() for cuts in grid.cuts], grid.writers.tolist()


def test_rows_and_columns_make_a_grid() -> None:
    """Two ranks have the first 3 of 5 rows, two the others; each has one of two halves of the columns."""
    regions = []
    for rank in range(4):
        row, column = divmod(rank, 2)
        regions.append([Region((3 * row, 4 * column), (3 - row, 4))])
    index = index_from([(5, 8)], regions)
    assert cuts_and_writers(index, "0") == ([[0, 3, 5], [0, 4, 8]], [0, 1, 2, 3])


def test_ranks_without_elements_write_none_and_a_scalar_is_written_once() -> None:
    row_of_rank = [Region((0,), (1,)), Region((1,), (1,)), Region((2,), (0,)), Region((2,), (0,))]
    index = index_from([(2,)], [[row] for row in row_of_rank])
    assert cuts_and_writers(index, "0") == ([[0, 1, 2]], [0, 1])
    index = index_from([(0, 4)], [[Region((0, 0), (0, 4))]] * 2)
    assert cuts_and_writers(index, "0") == ([[0], [0, 4]], [])
    index = index_from([()], [[Region((), ())]] * 3)
    assert cuts_and_writers(index, "0") == ([], [0])


def test_parts_that_make_no_whole_tensor_are_an_error() -> None:
    wrong = [
        [Region((0,), (2,)), Region((2,), (1,))],  # the last row is missing
        [Region((1,), (1,)), Region((2,), (2,))],  # the first
        [Region((0,), (2,)), Region((3,), (1,))],  # one between
        [Region((0,), (3,)), Region((2,), (2,))],  # one is there twice
        [Region((0,), (4,)), Region((2,), (2,))],
        [Region((0,), (0,)), Region((0,), (0,))],
    ]
    for regions in wrong:
        with pytest.raises(CheckpointError, match=r"0: the parts of the ranks do not make a whole tensor of \(4,\)"):
            index_from([(4,)], [[region] for region in regions])
    corners = [(0, 0), (0, 1), (1, 0)]  # of four cells
    with pytest.raises(CheckpointError, match="whole tensor"):
        index_from([(2, 2)], [[Region(corner, (1, 1))] for corner in corners])


def test_two_stages_share_a_tied_tensor_and_nothing_else() -> None:
    """Ranks 0 and 1 hold the first stage, 2 and 3 the last; "tied" is in both."""
    first = [InventoryEntry("tied", "float32", (4,), 4, 0), InventoryEntry("first", "float32", (4,), 4, 0)]
    last = [InventoryEntry("last", "float32", (6,), 4, 0), InventoryEntry("tied", "float32", (4,), 4, 1)]
    regions = []
    for half in (0, 1):
        regions.append(region_numbers([Region((2 * half,), (2,))]))
    for half in (0, 1):
        regions.append(region_numbers([Region((3 * half,), (3,)), Region((2 * half,), (2,))]))
    index = make_index(JobParts([first, last], [0, 0, 1, 1], regions))
    assert cuts_and_writers(index, "first") == ([[0, 2, 4]], [0, 1])
    assert cuts_and_writers(index, "last") == ([[0, 3, 6]], [2, 3])
    cuts, writers = cuts_and_writers(index, "tied")
    assert cuts == [[0, 2, 4]]
    assert writers in ([0, 1], [2, 3])
    with pytest.raises(CheckpointError, match=r"tied: float32 \(4,\) on some ranks, int64 \(4,\) on others"):
        make_index(JobParts([first, [last[0], last[1]._replace(dtype="int64")]], [0, 0, 1, 1], regions))


def test_copies_share_the_writing() -> None:
    """No rank writes more than a part of the whole and one largest piece over it."""
    sizes = [("a", (64, 16)), ("b", (32,)), ("c", ())]
    shapes = {f"{name}.{block}": shape for block in range(40) for name, shape in sizes}
    for shard, replicate in ((8, 4), (1, 32), (32, 1)):
        index = index_of(synthetic_ranks(shapes, shard, replicate))
        written: Counter[int] = Counter()
        for entry in index.tensors.values():
            elements = int(np.prod(entry.grid.shape)) / len(entry.grid.writers)
            for writer in entry.grid.writers.tolist():
                written[writer] += int(elements)
        assert sum(written.values()) == 40 * (64 * 16 + 32 + 1)
        assert max(written.values()) <= sum(written.values()) / (shard * replicate) + 64 * 16 / shard


def tensors() -> dict[str, Tensor]:
    return {"model.weight": torch.zeros(4, 2), "model.bias": torch.zeros(2)}


def test_the_plan_is_kept_until_the_parts_change() -> None:
    state = random_state(0, 1)
    plan = agree_on_plan(None, parts_of(tensors()) | state, None)
    assert plan.written == ["model.bias", "model.weight", "rng.cpu"]
    assert agree_on_plan(None, parts_of(tensors()) | random_state(0, 1), plan) is plan

    with_gpu = state | {"rng.cuda": state["rng.cpu"]}
    changed = agree_on_plan(None, parts_of(tensors()) | with_gpu, plan)
    assert changed.written == ["model.bias", "model.weight", "rng.cpu", "rng.cuda"]

    wider = tensors() | {"model.bias": torch.zeros(3)}
    changed = agree_on_plan(None, parts_of(wider) | state, plan)
    assert changed.index.tensors["model.bias"].grid.shape == (3,)

    other_dtype = tensors() | {"model.bias": torch.zeros(2, dtype=torch.int32)}
    changed = agree_on_plan(None, parts_of(other_dtype) | state, plan)
    assert changed.index.tensors["model.bias"].dtype == "int32"


def plan_twice() -> tuple[int, list[str], int]:
    """How many gathers a first, a second and a changed plan take; what this rank writes of the last, whose rank 1 has
    one tensor more."""
    rank, group = dist.get_rank(), dist.group.WORLD
    plan: SavePlan | None = None
    with mock.patch.object(plans, "gather_rows", wraps=plans.gather_rows) as gathers:
        for _ in range(3):
            plan = agree_on_plan(group, parts_of(tensors()) | random_state(rank, 2), plan)
        unchanged = gathers.call_count
        changed = tensors() | ({"model.extra": torch.zeros(2)} if rank == 1 else {})
        plan = agree_on_plan(group, parts_of(changed) | random_state(rank, 2), plan)
    return unchanged, plan.written, len(plan.index.tensors)


def test_one_ranks_change_is_every_ranks_new_plan() -> None:
    first, second = workers.run(plan_twice, 2)
    assert first[0] == second[0] == 2
    assert first[2] == second[2] == 4
    assert sorted({*first[1], *second[1]}) == ["model.bias", "model.extra", "model.weight", "rng.cpu"]
    assert set(first[1]) & set(second[1]) == {"rng.cpu"}
