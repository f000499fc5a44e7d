"""Plan a load: one rank reads and verifies each stored piece, and sends the other ranks their parts of it.

A piece is verified whole, so ranks that need parts of it would each read all of it: of 64 files on 1,024 ranks, 16
times. The reader is one of the ranks that need the piece: the one with the least to read so far. All ranks make the
same plan, from the index and the parts of all ranks, so nothing about it is sent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from torchllm.checkpoint.index import Index, Integers, PieceGrid, Region, TensorPiece
from torchllm.checkpoint.plan import (
    JobParts,
    ShardingKey,
    choices_per_piece,
    least_loaded,
    parts_with_elements,
    regions_of_inventory,
    tensors_by_key,
)

ALIGNMENT = 16
"""bytes: elements of every dtype begin at a multiple of it in a message"""
LOAD_UNIT = 20
"""loads are compared in units of 2 ** 20 bytes: small pieces that the same ranks need are read by the first of them"""


class Message(NamedTuple):
    """The bytes that a rank sends to others, the same to each, once a round."""

    sender: int
    receivers: tuple[int, ...]


class PackedBox(NamedTuple):
    """A part of a tensor in a message."""

    key: str
    region: Region
    message: Message
    begin: int
    """its first byte in the message"""


class PieceRead(NamedTuple):
    key: str
    piece: TensorPiece
    own: Region
    """the elements that this rank needs"""
    sent: Sequence[PackedBox]


@dataclass
class ReadRound:
    """Pieces that ranks read before they send each other messages."""

    reads: list[PieceRead] = field(default_factory=list)
    received: list[PackedBox] = field(default_factory=list)
    sizes: dict[Message, int] = field(default_factory=dict)
    """bytes of the messages that this rank sends or receives; between two ranks in the same order on both"""

    def put(self, key: str, region: Region, message: Message, itemsize: int) -> PackedBox:
        begin = self.sizes.get(message, 0)
        length = math.prod(region.size) * itemsize
        self.sizes[message] = begin + -(-length // ALIGNMENT) * ALIGNMENT
        return PackedBox(key, region, message, begin)


class ReadPlan(NamedTuple):
    """The pieces that this rank reads, and the messages that it sends and receives."""

    read_bytes: Integers
    """of tensors, by rank"""
    alone: list[PieceRead]
    """pieces that no other rank needs"""
    rounds: list[ReadRound]
    """the same number on all ranks"""


class _Overlaps(NamedTuple):
    """Boxes of the pieces of a grid that ranks need: equal ones once, by piece."""

    pieces: Integers
    """(pieces): numbers in the grid; those that a rank needs"""
    elements: Integers
    """(pieces)"""
    piece_of_box: Integers
    """(boxes): index into `pieces`; increases"""
    boxes: Integers
    """(boxes, 2 x dimensions): offset and size"""
    copies: Integers
    """(boxes): number of ranks"""
    ranks: Integers
    """of the first box, of the second, and so on"""
    choices: Integers
    """ranks (pieces, most ranks of a piece): every column is a choice of one reader per piece"""


class _Transfer(NamedTuple):
    """A box of a piece that ranks need in addition to its reader."""

    region: Region
    message: Message


class _Read(NamedTuple):
    """A piece that this rank reads, as in `PieceRead`."""

    piece: TensorPiece
    own: Region
    sent: Sequence[_Transfer]


class _Share(NamedTuple):
    """The work of the ranks for a tensor, the same for each that is stored and needed equally."""

    read: Integers
    """elements that each rank reads"""
    in_messages: Integers
    """elements that each rank sends or receives; a message to several ranks counts once"""
    reads: list[_Read]
    """of this rank"""
    received: list[_Transfer]
    """by this rank"""


def plan_reads(index: Index, job: JobParts, rank: int, limit: int) -> ReadPlan:
    """Return the plan of a rank for filling the parts of all ranks, whose tensors are all in the index.

    No rank sends and receives more than `limit` bytes in a round, unless it is of a single tensor.
    O(tensors x ranks + shardings x pieces).
    """
    regions = [regions_of_inventory(job, number) for number in range(len(job.inventories))]
    overlaps: dict[tuple[tuple[ShardingKey, ...], tuple[bytes, ...]], _Overlaps] = {}
    shares: dict[tuple[int, int, int], _Share] = {}  # by the ids of overlaps and grid, and the column
    ranks = len(job.regions)
    plan = ReadPlan(np.zeros(ranks, np.int64), [], [])
    in_messages = np.zeros(ranks, np.int64)
    for key, tensor in sorted(tensors_by_key(job.inventories).items()):
        stored, cuts = index.tensors[key], index.tensors[key].grid.cuts
        if 0 in tensor.entry.shape:
            continue
        cut = (tensor.sharding_keys, tuple(cuts_of_dimension.tobytes() for cuts_of_dimension in cuts))
        if cut not in overlaps:
            overlaps[cut] = _overlaps(cuts, *parts_with_elements(len(cuts), tensor.sharding_keys, regions))
        needed = overlaps[cut]
        column = least_loaded(needed.choices, plan.read_bytes >> LOAD_UNIT)
        if (choice := (id(needed), id(stored.grid), column)) not in shares:
            shares[choice] = _share(stored.grid, needed, column, rank, ranks)
        share = shares[choice]
        itemsize = getattr(torch, stored.dtype).itemsize
        plan.read_bytes[:] += share.read * itemsize
        if share.in_messages.any():
            if not plan.rounds or (in_messages + share.in_messages * itemsize).max() > limit:
                plan.rounds.append(ReadRound())
                in_messages[:] = 0
            in_messages += share.in_messages * itemsize
        for piece, own, sent in share.reads:
            boxes = [plan.rounds[-1].put(key, *transfer, itemsize) for transfer in sent]
            (plan.rounds[-1].reads if boxes else plan.alone).append(PieceRead(key, piece, own, boxes))
        for transfer in share.received:
            plan.rounds[-1].received.append(plan.rounds[-1].put(key, *transfer, itemsize))
    return plan


def _overlaps(cuts: Sequence[Integers], ranks: Integers, boxes: Integers) -> _Overlaps:
    """Return the overlaps of the pieces of a grid with the parts of `ranks` (parts), boxes (parts, 2 x dimensions)."""
    dimensions = len(cuts)
    part, piece = np.arange(len(ranks)), np.zeros(len(ranks), np.int64)  # of each overlap
    offsets, ends = boxes[:, :dimensions], boxes[:, :dimensions] + boxes[:, dimensions:]
    for dimension, starts in enumerate(cuts):
        first = np.searchsorted(starts, offsets[:, dimension], side="right") - 1
        count = (np.searchsorted(starts, ends[:, dimension], side="left") - first)[part]
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        part, piece = np.repeat(part, count), np.repeat(piece, count)
        piece = piece * (len(starts) - 1) + first[part] + number
    cells = np.unravel_index(piece, [len(starts) - 1 for starts in cuts]) if cuts else ()
    columns = [piece]
    for dimension, (starts, cell) in enumerate(zip(cuts, cells, strict=True)):
        columns.append(np.maximum(starts[cell], offsets[part, dimension]))
    for dimension, (starts, cell) in enumerate(zip(cuts, cells, strict=True)):
        columns.append(np.minimum(starts[cell + 1], ends[part, dimension]) - columns[1 + dimension])
    rows, box = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    box = box.reshape(-1)
    pieces, piece_of_box = np.unique(rows[:, 0], return_inverse=True)
    ranks_of_boxes = ranks[part][np.lexsort((ranks[part], box))]
    copies = np.bincount(box, minlength=len(rows))
    copies_of_piece = np.bincount(piece_of_box[box], minlength=len(pieces))
    choices = choices_per_piece(ranks_of_boxes, copies_of_piece)
    elements = np.ones(1, np.int64)
    for starts in cuts:
        elements = np.multiply.outer(elements, np.diff(starts)).reshape(-1)
    return _Overlaps(pieces, elements[pieces], piece_of_box, rows[:, 1:], copies, ranks_of_boxes, choices)


def _share(grid: PieceGrid, needed: _Overlaps, column: int, rank: int, ranks: int) -> _Share:
    """Return the work of the ranks with the readers of a column."""
    dimensions = len(grid.cuts)
    readers = needed.choices[:, column]
    reader_of_box = readers[needed.piece_of_box]
    box_of_rank = np.repeat(np.arange(len(needed.boxes)), needed.copies)
    receives = needed.ranks != reader_of_box[box_of_rank]
    elements = needed.boxes[:, dimensions:].prod(axis=1)
    is_sent = np.zeros(len(needed.boxes), bool)
    is_sent[box_of_rank[receives]] = True
    in_messages = np.bincount(reader_of_box[is_sent], elements[is_sent], ranks)
    in_messages += np.bincount(needed.ranks[receives], elements[box_of_rank[receives]], ranks)

    def transfer(box: int) -> _Transfer:
        offset_and_size = needed.boxes[box].tolist()
        region = Region(tuple(offset_and_size[:dimensions]), tuple(offset_and_size[dimensions:]))
        receivers = needed.ranks[receives & (box_of_rank == box)].tolist()
        return _Transfer(region, Message(int(reader_of_box[box]), tuple(receivers)))

    read = np.bincount(readers, needed.elements, ranks)
    share = _Share(read.astype(np.int64), in_messages.astype(np.int64), [], [])
    for box in box_of_rank[needed.ranks == rank].tolist():  # one per piece
        number = int(needed.piece_of_box[box])
        if readers[number] == rank:
            sent = np.flatnonzero(is_sent & (needed.piece_of_box == number)).tolist()
            piece = grid.piece(int(needed.pieces[number]))
            share.reads.append(_Read(piece, transfer(box).region, [transfer(other) for other in sent]))
        else:
            share.received.append(transfer(box))
    return share
