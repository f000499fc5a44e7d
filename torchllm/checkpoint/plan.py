"""Agree on the index of a checkpoint: which rank writes which piece of which tensor.

Each rank plans alone, and every rank makes the same index from what all have said, so nothing is sent twice and rank 0
does no more than others. What a rank says is small: its `Inventory` (keys, dtypes, shapes and a sharding number per
tensor) is that of its whole pipeline stage, and is sent once per stage; of its own it sends a region per sharding, of
which a model has ten or so. A piece that several ranks hold is written by the one that has the least to write.

Nothing is sent at a later save if no rank's parts have changed, but a flag.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from torchllm.checkpoint.agreement import Group, any_rank, gather_rows, rank_of
from torchllm.checkpoint.index import Index, Integers, PieceGrid, Region
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.checkpoint.state import Part, TensorSharding


class InventoryEntry(NamedTuple):
    """A tensor of which a rank holds a part."""

    key: str
    dtype: str
    """without "torch.": float32"""
    shape: tuple[int, ...]
    """of the whole tensor"""
    itemsize: int
    """bytes per element"""
    sharding: int
    """tensors of one number are cut alike: number of the region in the rank's list"""


class RankParts(NamedTuple):
    """What one rank holds."""

    inventory: tuple[InventoryEntry, ...]
    regions: tuple[Region, ...]
    """the rank's part of a tensor, by the number of its sharding"""


@dataclass(frozen=True)
class SavePlan:
    """Who writes what, and the index that says so."""

    local: RankParts
    """of this rank, when the plan was made"""
    index: Index
    content: bytes
    """of the index file"""
    written: list[str]
    """keys of which this rank writes its part, in the order of their numbers"""


def rank_parts(parts: Mapping[str, Part]) -> RankParts:
    """Return what this rank says about its parts."""
    numbers: dict[TensorSharding, int] = {}
    inventory: list[InventoryEntry] = []
    regions: list[Region] = []
    for key, part in parts.items():
        if part.sharding not in numbers:
            numbers[part.sharding] = len(regions)
            regions.append(part.region)
        dtype = str(part.local.dtype).removeprefix("torch.")
        shape = part.sharding.shape
        inventory.append(InventoryEntry(key, dtype, shape, part.local.element_size(), numbers[part.sharding]))
    return RankParts(tuple(inventory), tuple(regions))


def agree_on_plan(group: Group, parts: Mapping[str, Part], previous: SavePlan | None) -> SavePlan:
    """Return the plan for a save; the `previous` one if the parts of no rank have changed since.

    Raises CheckpointError on all ranks if their tensors do not fit together.
    """
    local = rank_parts(parts)
    if not any_rank(group, previous is None or local != previous.local):
        assert previous is not None
        return previous
    index = make_index(*_gather(group, local))
    return SavePlan(local, index, index.serialize(), index.written_by(rank_of(group)))


def _gather(group: Group, local: RankParts) -> tuple[list[tuple[InventoryEntry, ...]], list[int], list[Integers]]:
    """Return the distinct inventories, the number of each rank's inventory, and each rank's regions as numbers."""
    encoded = json.dumps(local.inventory).encode()
    digest = np.frombuffer(hashlib.sha256(encoded).digest(), np.int64)
    numbers = region_numbers(local.regions)
    head = torch.tensor([*digest.tolist(), len(numbers)])
    heads = gather_rows(group, head).numpy()
    digests = [row[:4].tobytes() for row in heads]
    counts = heads[:, 4]

    distinct = list(dict.fromkeys(digests))
    inventories = []
    for digest_of_inventory in distinct:
        source = digests.index(digest_of_inventory)
        sent: list[tuple[InventoryEntry, ...]] = [local.inventory]
        if group is not None:
            dist.broadcast_object_list(sent, group_src=source, group=group)
        inventories.append(sent[0])
    number_of = {value: number for number, value in enumerate(distinct)}

    padded = torch.zeros(int(counts.max()), dtype=torch.int64)
    padded[: len(numbers)] = torch.from_numpy(numbers)
    rows = gather_rows(group, padded).numpy()
    regions = [row[:count] for row, count in zip(rows, counts, strict=True)]
    return inventories, [number_of[value] for value in digests], regions


def region_numbers(regions: Sequence[Region]) -> Integers:
    """Return offsets and sizes of regions one after the other."""
    numbers: list[int] = []
    for region in regions:
        numbers += [*region.offset, *region.size]
    return np.array(numbers, dtype=np.int64)


class _Holders(NamedTuple):
    """The pieces of tensors of one grid, and who could write each."""

    cuts: tuple[Integers, ...]
    ranks: Integers
    """(pieces, copies): every column is a choice of one rank per piece"""
    elements: Integers
    """(pieces)"""


def make_index(
    inventories: Sequence[Sequence[InventoryEntry]], inventory_of_rank: Sequence[int], regions: Sequence[Integers]
) -> Index:
    """Return the index of a checkpoint from what every rank has said; the same on all ranks.

    regions: per rank, as `region_numbers` returns them. O(ranks x shardings + tensors x copies). Raises CheckpointError
    if ranks differ in a tensor's shape or dtype, or if their parts do not make a whole tensor.
    """
    by_key = _entries_by_key(inventories)
    bytes_of_rank = np.zeros(len(regions), dtype=np.int64)
    holders: dict[tuple[tuple[int, int], ...], _Holders] = {}
    numbers: dict[tuple[int, int], int] = {}  # of the grids, by their holders and the chosen column
    grids: list[PieceGrid] = []
    tensors: dict[str, tuple[str, int]] = {}
    columns = [_regions_by_sharding(inventory) for inventory in inventories]
    rows = []
    for number in range(len(inventories)):
        ranks = np.flatnonzero(np.asarray(inventory_of_rank) == number)
        rows.append((ranks, np.stack([regions[rank] for rank in ranks.tolist()])))
    for key in sorted(by_key):
        entry, places = by_key[key]
        if places not in holders:
            holders[places] = _find_holders(key, entry.shape, places, rows, columns)
        held = holders[places]
        choice = 0
        if held.ranks.shape[1] > 1:  # several ranks hold each piece
            choice = int(bytes_of_rank[held.ranks].sum(axis=0).argmin())
        writers = held.ranks[:, choice]
        bytes_of_rank[writers] += held.elements * entry.itemsize
        grid_key = (id(held), choice)
        if grid_key not in numbers:
            numbers[grid_key] = len(grids)
            grids.append(PieceGrid(held.cuts, writers))
        tensors[key] = (entry.dtype, numbers[grid_key])
    return Index(tensors, grids)


class _Tensor(NamedTuple):
    """A tensor, and which shardings of which inventories have it."""

    entry: InventoryEntry
    places: tuple[tuple[int, int], ...]
    """number of the inventory, number of its sharding; more than one for a tied tensor of two pipeline stages"""


def _entries_by_key(inventories: Sequence[Sequence[InventoryEntry]]) -> dict[str, _Tensor]:
    """Return every tensor of any inventory. Raises CheckpointError if two differ in its shape or dtype."""
    by_key: dict[str, _Tensor] = {}
    for number, inventory in enumerate(inventories):
        for entry in inventory:
            held = (number, entry.sharding)
            if entry.key not in by_key:
                by_key[entry.key] = _Tensor(entry, (held,))
                continue
            first, places = by_key[entry.key]
            if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{entry.key}: {first.dtype} {first.shape} on some ranks, {entry.dtype} {entry.shape} on others"
                )
            by_key[entry.key] = _Tensor(first, (*places, held))
    return by_key


def _regions_by_sharding(inventory: Sequence[InventoryEntry]) -> list[slice]:
    """Return where in a rank's region numbers those of each sharding are."""
    dimensions: dict[int, int] = {}
    for entry in inventory:
        dimensions[entry.sharding] = len(entry.shape)
    slices = []
    end = 0
    for sharding in range(len(dimensions)):
        begin, end = end, end + 2 * dimensions[sharding]
        slices.append(slice(begin, end))
    return slices


def _find_holders(
    key: str,
    shape: tuple[int, ...],
    places: Sequence[tuple[int, int]],
    rows: Sequence[tuple[Integers, Integers]],
    columns: Sequence[Sequence[slice]],
) -> _Holders:
    """Return the pieces of a tensor and who holds each. Raises CheckpointError if they do not make the whole tensor."""
    if 0 in shape:
        no_pieces = np.zeros((0, 1), dtype=np.int64)
        return _Holders(tuple(np.unique([0, length]) for length in shape), no_pieces, no_pieces[:, 0])
    dimensions = len(shape)
    ranks = np.concatenate([rows[inventory][0] for inventory, _ in places])
    boxes = np.concatenate([rows[inventory][1][:, columns[inventory][sharding]] for inventory, sharding in places])
    filled = (boxes[:, dimensions:] > 0).all(axis=1)
    ranks, boxes = ranks[filled], boxes[filled]
    pieces, piece_of_rank = np.unique(boxes, axis=0, return_inverse=True)  # sorted by offset: row-major
    piece_of_rank = piece_of_rank.reshape(-1)
    sizes = pieces[:, dimensions:]
    cuts = _cuts_of_grid(shape, pieces[:, :dimensions], sizes)
    if cuts is None:
        raise CheckpointError(f"{key}: the parts of the ranks do not make a whole tensor of {shape}")

    order = np.lexsort((ranks, piece_of_rank))
    copies = np.bincount(piece_of_rank, minlength=len(pieces))
    first = np.cumsum(copies) - copies
    choices = np.arange(copies.max())
    candidates = ranks[order][first[:, None] + choices % copies[:, None]]
    return _Holders(cuts, candidates, sizes.prod(axis=1))


def _cuts_of_grid(shape: tuple[int, ...], offsets: Integers, sizes: Integers) -> tuple[Integers, ...] | None:
    """Return where different boxes (pieces, dimensions) begin per dimension, and the shape's end.

    None if they are not all cells of one grid that fills the shape.
    """
    cuts = []
    cells = 1
    for dimension, length in enumerate(shape):
        begins, cell = np.unique(offsets[:, dimension], return_inverse=True)
        ends = np.append(begins[1:], length)
        box_ends = offsets[:, dimension] + sizes[:, dimension]
        if begins[:1].tolist() != [0] or (box_ends != ends[cell]).any():
            return None
        cuts.append(np.append(begins, length))
        cells *= len(begins)
    return tuple(cuts) if len(offsets) == cells else None
