"""Agree on the index of a checkpoint, the rank that writes each piece of each tensor; and write the pieces.

All ranks exchange their parts, and each computes the same index from them, so nothing is sent twice and rank 0 has no
more work than others. The exchange is small: an inventory (keys, dtypes, shapes and a sharding number per tensor) is
the same for a whole pipeline stage, and is sent once per stage; each rank only adds its region per sharding (about ten
shardings per model). A piece that several ranks hold is written by the rank with the least to write.

If no rank's parts have changed, a later save sends only a flag. Every rank writes one file, with `torch.save`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.checkpoint.agreement import Group, any_rank, gather_rows, on_all, rank_of
from torchllm.checkpoint.data_file import DataFileWriter, data_file_name
from torchllm.checkpoint.index import Index, Integers, PieceGrid, Region
from torchllm.checkpoint.manifest import CheckpointError, FileRecord
from torchllm.checkpoint.state import Part, TensorSharding


class InventoryEntry(NamedTuple):
    """A tensor with a part on this rank."""

    key: str
    dtype: str
    """without "torch.": float32"""
    shape: tuple[int, ...]
    """of the whole tensor"""
    itemsize: int
    """bytes per element"""
    sharding: int
    """index of the region in the rank's list; tensors with the same number are cut equally"""


class RankParts(NamedTuple):
    """The tensors of one rank, and its parts of them."""

    inventory: tuple[InventoryEntry, ...]
    regions: tuple[Region, ...]
    """the rank's part of a tensor, by the number of its sharding"""


@dataclass(frozen=True)
class SavePlan:
    """The index, and this rank's tensors to write."""

    local: RankParts
    """this rank's parts when the plan was made"""
    index: Index
    content: bytes
    """content of the index file"""
    written: list[str]
    """keys of the parts that this rank writes, in the order of their numbers"""


def rank_parts(parts: Mapping[str, Part]) -> RankParts:
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


class JobParts(NamedTuple):
    """The parts of all ranks, without repetitions."""

    inventories: Sequence[Sequence[InventoryEntry]]
    """the distinct ones: one per pipeline stage"""
    inventory_of_rank: Sequence[int]
    """the number of each rank's inventory"""
    regions: Sequence[Integers]
    """regions of each rank, as `region_numbers` returns them"""


def agree_on_plan(group: Group, parts: Mapping[str, Part], previous: SavePlan | None) -> SavePlan:
    """Return the plan for a save; the `previous` one if the parts of no rank have changed since.

    Raises CheckpointError on all ranks if their tensors do not fit together.
    """
    local = rank_parts(parts)
    if not any_rank(group, previous is None or local != previous.local):
        assert previous is not None
        return previous
    index = make_index(gather_parts(group, local))
    return SavePlan(local, index, index.serialize(), index.written_by(rank_of(group)))


def gather_parts(group: Group, local: RankParts) -> JobParts:
    numbers = region_numbers(local.regions)
    encoded = json.dumps(local.inventory).encode()
    digest = np.frombuffer(hashlib.sha256(encoded).digest(), np.int64)
    head = torch.tensor([*digest.tolist(), len(numbers)])
    heads = gather_rows(group, head).numpy()
    digests = [row[:4].tobytes() for row in heads]
    lengths = heads[:, 4]

    inventories: list[Sequence[InventoryEntry]] = []
    number_of_digest: dict[bytes, int] = {}
    for rank, digest_of_rank in enumerate(digests):
        if digest_of_rank in number_of_digest:
            continue
        number_of_digest[digest_of_rank] = len(inventories)
        sent: list[tuple[InventoryEntry, ...]] = [local.inventory]
        if group is not None:
            dist.broadcast_object_list(sent, group_src=rank, group=group)
        inventories.append(sent[0])

    padded = torch.zeros(int(lengths.max()), dtype=torch.int64)
    padded[: len(numbers)] = torch.from_numpy(numbers)
    rows = gather_rows(group, padded).numpy()
    regions = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return JobParts(inventories, [number_of_digest[digest] for digest in digests], regions)


def region_numbers(regions: Sequence[Region]) -> Integers:
    """Return offsets and sizes of regions one after the other."""
    numbers: list[int] = []
    for region in regions:
        numbers += [*region.offset, *region.size]
    return np.array(numbers, dtype=np.int64)


class ShardingKey(NamedTuple):
    """A tensor's sharding in an inventory."""

    inventory: int
    """number of the inventory that names the tensor"""
    sharding: int
    """number of its sharding there"""


class JobTensor(NamedTuple):
    """A tensor of the job."""

    entry: InventoryEntry
    """as the first inventory with the tensor describes it"""
    sharding_keys: tuple[ShardingKey, ...]
    """more than one for a tied tensor of two pipeline stages"""


class InventoryRegions(NamedTuple):
    """The regions of the ranks that have the same inventory."""

    ranks: Integers
    numbers: Integers
    """(ranks, n): a row per rank, as `region_numbers` returns it"""
    columns: Sequence[slice]
    """start of each sharding's region in a row"""


class _Holders(NamedTuple):
    """The pieces of tensors of one grid, and the ranks that could write each."""

    cuts: tuple[Integers, ...]
    ranks: Integers
    """ranks (pieces, copies): every column is a choice of one rank per piece"""
    elements: Integers
    """(pieces)"""


def make_index(job: JobParts) -> Index:
    """Return the index of a checkpoint from the parts of all ranks; the same on all ranks.

    O(ranks x shardings + tensors x copies). Raises CheckpointError if ranks differ in a tensor's shape or dtype, or if
    their parts do not make a whole tensor.
    """
    tensors_of_job = tensors_by_key(job.inventories)
    regions = [regions_of_inventory(job, number) for number in range(len(job.inventories))]
    holders: dict[tuple[ShardingKey, ...], _Holders] = {}
    bytes_of_rank = np.zeros(len(job.regions), dtype=np.int64)
    grids: list[PieceGrid] = []
    grid_numbers: dict[tuple[tuple[ShardingKey, ...], int], int] = {}
    tensors: dict[str, tuple[str, int]] = {}
    for key in sorted(tensors_of_job):
        entry, sharding_keys = tensors_of_job[key]
        if sharding_keys not in holders:
            holders[sharding_keys] = _find_holders(entry, sharding_keys, regions)
        held = holders[sharding_keys]
        column = least_loaded(held.ranks, bytes_of_rank)
        writers = held.ranks[:, column]
        bytes_of_rank[writers] += held.elements * entry.itemsize
        # Most tensors are cut like others, and written by the same ranks: they share a grid in the index.
        cut = (sharding_keys, column)
        if cut not in grid_numbers:
            grid_numbers[cut] = len(grids)
            grids.append(PieceGrid(held.cuts, writers))
        tensors[key] = (entry.dtype, grid_numbers[cut])
    return Index(tensors, grids)


def least_loaded(choices: Integers, load: Integers) -> int:
    """Return the column of choices (pieces, copies) whose ranks have the least load together; the first of several."""
    return int(load[choices].sum(axis=0).argmin())


def tensors_by_key(inventories: Sequence[Sequence[InventoryEntry]]) -> dict[str, JobTensor]:
    """Return every tensor of any inventory. Raises CheckpointError if two differ in its shape or dtype."""
    by_key: dict[str, JobTensor] = {}
    for number, inventory in enumerate(inventories):
        for entry in inventory:
            sharding_key = ShardingKey(number, entry.sharding)
            if entry.key not in by_key:
                by_key[entry.key] = JobTensor(entry, (sharding_key,))
                continue
            first, sharding_keys = by_key[entry.key]
            if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{entry.key}: {first.dtype} {first.shape} on some ranks, {entry.dtype} {entry.shape} on others"
                )
            by_key[entry.key] = JobTensor(first, (*sharding_keys, sharding_key))
    return by_key


def regions_of_inventory(job: JobParts, number: int) -> InventoryRegions:
    """Return the regions of the ranks that have inventory `number`."""
    ranks = np.flatnonzero(np.asarray(job.inventory_of_rank) == number)
    numbers = np.stack([job.regions[rank] for rank in ranks.tolist()])
    dimensions: dict[int, int] = {entry.sharding: len(entry.shape) for entry in job.inventories[number]}
    columns = []
    end = 0
    for sharding in range(len(dimensions)):
        begin, end = end, end + 2 * dimensions[sharding]
        columns.append(slice(begin, end))
    return InventoryRegions(ranks, numbers, columns)


def _find_holders(
    entry: InventoryEntry, sharding_keys: Sequence[ShardingKey], regions: Sequence[InventoryRegions]
) -> _Holders:
    """Return the pieces of a tensor and their ranks. Raises CheckpointError if they do not make the whole tensor.

    regions: by the number of the inventory.
    """
    shape = entry.shape
    if 0 in shape:
        no_pieces = np.zeros((0, 1), dtype=np.int64)
        return _Holders(tuple(np.unique([0, length]) for length in shape), no_pieces, no_pieces[:, 0])
    dimensions = len(shape)
    ranks, boxes = parts_with_elements(dimensions, sharding_keys, regions)
    pieces, piece_of_rank = np.unique(boxes, axis=0, return_inverse=True)  # sorted by offset: row-major
    piece_of_rank = piece_of_rank.reshape(-1)
    sizes = pieces[:, dimensions:]
    cuts = _cuts_of_grid(shape, pieces[:, :dimensions], sizes)
    if cuts is None:
        raise CheckpointError(f"{entry.key}: the parts of the ranks do not make a whole tensor of {shape}")

    order = np.lexsort((ranks, piece_of_rank))
    return _Holders(cuts, choices_per_piece(ranks[order], np.bincount(piece_of_rank)), sizes.prod(axis=1))


def parts_with_elements(
    dimensions: int, sharding_keys: Sequence[ShardingKey], regions: Sequence[InventoryRegions]
) -> tuple[Integers, Integers]:
    """Return the ranks (parts) that have elements of a tensor, and their boxes (parts, 2 x dimensions).

    A box is offset and size of a part. regions: by the number of the inventory.
    """
    ranks_of_keys, boxes_of_keys = [], []
    for sharding_key in sharding_keys:
        held = regions[sharding_key.inventory]
        ranks_of_keys.append(held.ranks)
        boxes_of_keys.append(held.numbers[:, held.columns[sharding_key.sharding]])
    ranks = np.concatenate(ranks_of_keys)
    boxes = np.concatenate(boxes_of_keys)
    filled = (boxes[:, dimensions:] > 0).all(axis=1)
    return ranks[filled], boxes[filled]


def choices_per_piece(ranks: Integers, copies: Integers) -> Integers:
    """Return ranks (pieces, most copies): every column is a choice of one rank per piece.

    ranks: of the first piece, of the second, and so on. copies: their number per piece.
    """
    first = np.cumsum(copies) - copies
    return ranks[first[:, None] + np.arange(copies.max()) % copies[:, None]]


def _cuts_of_grid(shape: tuple[int, ...], offsets: Integers, sizes: Integers) -> tuple[Integers, ...] | None:
    """Return the starts of different boxes (pieces, dimensions) per dimension, and the shape's end.

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


def save_tensors(group: Group, folder: Path, plan: SavePlan, parts: Mapping[str, Part]) -> dict[str, FileRecord]:
    """Write every rank's share of the parts into an empty folder, and the index; force them to disk.

    Returns the records of all files on rank 0, of none on others. Raises CheckpointError on all ranks.
    """

    def write() -> FileRecord:
        with DataFileWriter(folder / data_file_name(rank_of(group))) as file, _no_checksums():
            for key in plan.written:
                torch.save(_to_store(parts[key].local), cast(IO[bytes], file))  # torch.save calls only write and flush
                file.end_piece(plan.index.tensors[key].number)
            return file.finish()

    record = on_all(group, write)
    digest = torch.frombuffer(bytearray.fromhex(record.sha256), dtype=torch.int64)
    rows = gather_rows(group, torch.cat([torch.tensor([record.size]), digest]))
    if rank_of(group) != 0:
        return {}
    files = {}
    for rank, row in enumerate(rows):
        files[data_file_name(rank)] = FileRecord(int(row[0]), row[1:].numpy().tobytes().hex())
    return files


def _to_store(local: Tensor) -> Tensor:
    """Return a tensor on the host whose storage has only its elements, since torch.save writes the whole storage."""
    stored = local.detach().cpu().contiguous()
    if stored.untyped_storage().nbytes() != stored.nbytes:
        stored = stored.clone()
    return stored


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Disable torch's CRC32 in the files: it takes longer than writing them, and every piece has a sum."""
    previous = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(previous)
