"""Read the tensors of a checkpoint, on any layout.

Each piece is read on one rank, in threads, which sends the others their parts (`read_plan.py`). Its sum is verified
before torch unpickles it with `weights_only`: no code is run. `plan.py` writes them.
"""

import io
import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.checkpoint.agreement import Group, gather_rows, on_all, on_first, rank_of, size_of
from torchllm.checkpoint.data_file import data_file_name
from torchllm.checkpoint.index import INDEX, Index, Region, parse_index
from torchllm.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    Manifest,
    read_manifest,
)
from torchllm.checkpoint.piece_table import PieceTable, read_piece, read_piece_table
from torchllm.checkpoint.plan import JobParts, gather_parts, rank_parts, tensors_by_key
from torchllm.checkpoint.state import EXTRA, OPTIMIZER, WEIGHTS, Part
from torchllm.checkpoint.verify import check_files, check_sizes, read_content

if TYPE_CHECKING:
    from torchllm.checkpoint.read_plan import Message, PackedBox, PieceRead

log = logging.getLogger(__name__)

LISTED = 20
"""most differences between a checkpoint and the model that an error lists"""
THREADS = min(8, os.cpu_count() or 1)
"""threads of a rank that read pieces; more than there are cores wait for each other, as each hashes and unpickles"""
BYTES_AT_A_TIME = 1 << 30
"""bytes of pieces that the threads of a rank hold at once, unless a single piece is larger"""


@dataclass(frozen=True)
class StoredTensors:
    """A checkpoint whose manifest and index are verified; no tensor is read yet."""

    folder: Path
    manifest: Manifest
    index: Index
    tables: dict[int, PieceTable] | None = None
    """tables of the data files, by writer; None: each is read from the end of its file"""


def open_checkpoint(group: Group, folder: Path) -> StoredTensors:
    """Verify manifest, index and the size of every file of a checkpoint, each rank a share of them.

    Raises DamagedCheckpoint on all ranks.
    """
    manifest = on_first(group, lambda: read_manifest(folder))
    check_in_parallel(group, folder, manifest, check_sizes)
    path = folder / INDEX
    content = on_first(group, lambda: read_index(path, manifest))
    index = on_all(group, lambda: parse_index(content, path))
    missing = sorted({data_file_name(writer) for writer in index.writers()} - manifest.files.keys())
    if missing:
        raise DamagedCheckpoint(f"{path}: points to files that the manifest does not list: {missing[:LISTED]}")
    return StoredTensors(folder, manifest, index)


def read_index(path: Path, manifest: Manifest) -> bytes:
    """Return the content of the index file. Raises DamagedCheckpoint if it does not match the manifest."""
    if INDEX not in manifest.files:
        raise DamagedCheckpoint(f"{path.parent}: its manifest lists no {INDEX}")
    try:
        return read_content(path, manifest.files[INDEX])
    except OSError as error:
        raise DamagedCheckpoint(str(error)) from error


def check_in_parallel(
    group: Group, folder: Path, manifest: Manifest, check: Callable[[Path, Manifest, int, int], list[str]]
) -> None:
    """Let each rank check its share of the files of a checkpoint. Raises DamagedCheckpoint on all ranks."""

    def check_share() -> None:
        problems = check(folder, manifest, rank_of(group), size_of(group))
        if problems:
            raise DamagedCheckpoint("; ".join(problems))

    on_all(group, check_share)


def load_tensors(
    group: Group,
    stored: StoredTensors,
    parts: Mapping[str, Part],
    *,
    prefix: str = "",
    cast: bool = False,
    left: Collection[str] = (),
) -> None:
    """Fill `parts`: over all ranks, exactly the tensors of the checkpoint whose key begins with `prefix`.

    Tensors of random generators and of a fork may be missing in `parts`, and keys in `left`. cast: round floating-point
    values to the dtype of `parts` if it differs from the checkpoint, one tensor at a time; weights and the
    optimizer's state that change between float32 and bfloat16 always are.

    Raises CheckpointError on all ranks if keys, shapes or dtypes differ: then nothing is changed. Raises
    DamagedCheckpoint on all ranks if a piece that is read is damaged: then some parts are filled.
    """
    from torchllm.checkpoint.read_plan import plan_reads

    job = gather_parts(group, rank_parts(parts))
    _refuse_differences(group, stored, job, prefix, cast, left)
    plan = plan_reads(stored.index, job, rank_of(group), BYTES_AT_A_TIME)
    on_all(group, lambda: _read(stored, parts, plan.alone, {}))
    for round_ in plan.rounds:
        messages = {message: torch.empty(size, dtype=torch.uint8) for message, size in round_.sizes.items()}
        on_all(group, partial(_read, stored, parts, round_.reads, messages))
        _exchange(group, messages)
        for box in round_.received:
            _part_of(parts[box.key], box.region).copy_(_in_message(messages, box, stored.index))


def _refuse_differences(
    group: Group, stored: StoredTensors, job: JobParts, prefix: str, cast: bool, left: Collection[str]
) -> None:
    """Raise CheckpointError on all ranks if the tensors of the job do not match the checkpoint."""
    saved = {key: entry for key, entry in stored.index.tensors.items() if key.startswith(prefix)}
    tensors = tensors_by_key(job.inventories)
    lines: list[str] = []
    converted: list[str] = []
    unused = [key for key in saved if key not in tensors and not key.startswith(("rng.", EXTRA))]
    if unused:  # on all ranks
        is_left = gather_rows(group, torch.tensor([key in left for key in unused])).any(dim=0)
        lines += [f"{unused[i]}: in the checkpoint only" for i in (~is_left).nonzero().flatten().tolist()]
    for key, (entry, _) in tensors.items():
        if key not in saved:
            lines.append(f"{key}: missing in the checkpoint")
            continue
        stored_dtype, dtype = getattr(torch, saved[key].dtype, None), getattr(torch, entry.dtype)
        may_change = {stored_dtype, dtype} == {torch.float32, torch.bfloat16}  # by weights_dtype and state_dtype
        can_cast = isinstance(stored_dtype, torch.dtype) and stored_dtype.is_floating_point and dtype.is_floating_point
        if saved[key].grid.shape != entry.shape:
            lines.append(f"{key}: {saved[key].grid.shape} in the checkpoint, {entry.shape} here")
        elif may_change and key.startswith((WEIGHTS, OPTIMIZER)):
            converted.append(f"torch.{saved[key].dtype} to {dtype}")
        elif stored_dtype != dtype and not (cast and can_cast):
            lines.append(f"{key}: torch.{saved[key].dtype} in the checkpoint, {dtype} here")
    if lines:
        text = "\n  ".join(sorted(lines)[:LISTED] + ["..."] * (len(lines) > LISTED))
        raise CheckpointError(
            f"{stored.folder} is of another model or optimizer; use its config, or begin a new run.folder from its "
            f"weights alone by checkpoint.initial:\n  {text}"
        )
    if converted and rank_of(group) == 0:
        log.warning(
            "%s: %d tensors are converted to this run's dtypes: %s", stored.folder, len(converted), converted[0]
        )


class _ByteLimit:
    """Limits the bytes that threads hold together; a thread that needs more waits until it is alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Return a context that holds `count` bytes for the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._held == 0 or self._held + count <= self._limit)
            self._held += count
        try:
            yield
        finally:
            with self._changed:
                self._held -= count
                self._changed.notify_all()


def _read(
    stored: StoredTensors, parts: Mapping[str, Part], reads: Sequence["PieceRead"], messages: Mapping["Message", Tensor]
) -> None:
    """Read pieces, in threads that each have one file open; fill the parts and the messages that they overlap."""
    reads_of_file: dict[int, list[PieceRead]] = {}
    for read in reads:
        reads_of_file.setdefault(read.piece.writer, []).append(read)
    batches_per_file = max(1, THREADS // max(1, len(reads_of_file)))
    batches = []
    for writer in sorted(reads_of_file):
        size = math.ceil(len(reads_of_file[writer]) / batches_per_file)
        for first in range(0, len(reads_of_file[writer]), size):
            batches.append(reads_of_file[writer][first : first + size])
    limit = _ByteLimit(BYTES_AT_A_TIME)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-read") as pool:
        for _ in pool.map(lambda batch: _read_batch(stored, parts, batch, messages, limit), batches):
            pass  # raises the error of a batch, and cancels batches that have not started


def _read_batch(
    stored: StoredTensors,
    parts: Mapping[str, Part],
    reads: Sequence["PieceRead"],
    messages: Mapping["Message", Tensor],
    limit: _ByteLimit,
) -> None:
    """Read pieces of one file, verify each, and copy the overlaps. Raises DamagedCheckpoint."""
    writer = reads[0].piece.writer
    name = data_file_name(writer)
    path = stored.folder / name
    try:
        table = read_piece_table(path, stored.manifest.files[name]) if stored.tables is None else stored.tables[writer]
        with path.open("rb", buffering=0) as file:
            for read in reads:
                entry = stored.index.tensors[read.key]
                stored_piece = table.find(entry.number)
                if stored_piece is None:
                    raise DamagedCheckpoint(f"{path}: holds no piece of {read.key}, against the index")
                with limit.hold(stored_piece.length):
                    # No variable for the bytes: they are freed before the copy, the third one in memory.
                    piece = _unpack(read_piece(file.fileno(), stored_piece, path), read, entry.dtype, path)
                    _part_of(parts[read.key], read.own).copy_(_cut(piece, read.piece.region, read.own))
                    for box in read.sent:
                        _in_message(messages, box, stored.index).copy_(_cut(piece, read.piece.region, box.region))
                    del piece  # before the next one is read
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error


def _unpack(content: bytes, read: "PieceRead", dtype: str, path: Path) -> Tensor:
    """Return the tensor in these bytes of torch.save. Raises DamagedCheckpoint if it does not match the index."""
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a crafted file can fail in any way
        raise DamagedCheckpoint(f"{path}: cannot read its piece of {read.key}: {error}") from error
    size = read.piece.region.size
    if not isinstance(tensor, Tensor) or str(tensor.dtype) != f"torch.{dtype}" or tensor.shape != size:
        raise DamagedCheckpoint(f"{path}: its piece of {read.key} is not a tensor of {dtype} {size}")
    return tensor


def _exchange(group: Group, messages: Mapping["Message", Tensor]) -> None:
    """Fill the messages that this rank receives, and send the others; return when all are done."""
    works = []
    for message, content in messages.items():
        if message.sender != rank_of(group):
            works.append(dist.irecv(content, group=group, group_src=message.sender))
            continue
        for receiver in message.receivers:
            works.append(dist.isend(content, group=group, group_dst=receiver))
    for work in works:
        assert work is not None
        work.wait()


def _cut(tensor: Tensor, whole: Region, region: Region) -> Tensor:
    """Return the elements of `region` from a tensor with the elements of `whole`: a view."""
    cuts = []
    for begin, offset, size in zip(whole.offset, *region, strict=True):
        cuts.append(slice(offset - begin, offset - begin + size))
    return tensor[tuple(cuts)]


def _part_of(part: Part, region: Region) -> Tensor:
    """Return the elements of `region` from a part: a view."""
    return _cut(part.local.detach(), part.region, region)


def _in_message(messages: Mapping["Message", Tensor], box: "PackedBox", index: Index) -> Tensor:
    """Return the elements of a box in its message: a view."""
    dtype = getattr(torch, index.tensors[box.key].dtype)
    end = box.begin + math.prod(box.region.size) * dtype.itemsize
    return messages[box.message][box.begin : end].view(dtype).view(box.region.size)


def verify_in_parallel(group: Group, folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after reading all its files, each rank its share of them.

    Raises DamagedCheckpoint on all ranks if a file is damaged.
    """
    manifest = on_first(group, lambda: read_manifest(folder))
    check_in_parallel(group, folder, manifest, check_files)
    return manifest
