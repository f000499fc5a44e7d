"""Write tensors to a checkpoint folder and read them back, on any layout.

Every rank writes one file, with `torch.save`, and reads the pieces that it needs from any of them, in threads. A piece
is verified by its sum before torch reads it, and unpickled with `weights_only`: no code is run.
"""

import hashlib
import io
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.checkpoint.agreement import Group, any_rank, gather_rows, on_all, on_first, rank_of, size_of
from torchllm.checkpoint.data_file import DataFileWriter, PieceTable, data_file_name, read_piece, read_piece_table
from torchllm.checkpoint.index import INDEX, Index, Region, TensorEntry, TensorPiece, parse_index
from torchllm.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    check_plain_file,
    read_manifest,
)
from torchllm.checkpoint.plan import SavePlan
from torchllm.checkpoint.state import EXTRA, Part
from torchllm.checkpoint.verify import check_sizes

LISTED = 20
"""most differences between a checkpoint and the model that an error lists"""
THREADS = 8
"""threads of a rank that read pieces"""
BYTES_AT_A_TIME = 1 << 30
"""bytes of pieces that the threads of a rank hold at once, unless a single piece is larger"""


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
    """Disable torch's CRC32 in the files: it takes longer than writing them, and every piece has a sha256."""
    previous = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(previous)


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
        check_plain_file(path)
        content = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(str(error)) from error
    if hashlib.sha256(content).hexdigest() != manifest.files[INDEX].sha256:
        raise DamagedCheckpoint(f"{path}: damaged: its sha256 is not the manifest's")
    return content


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
    values to the dtype of `parts` if it differs from the checkpoint, one tensor at a time.

    Raises CheckpointError on all ranks if keys, shapes or dtypes differ: then nothing is changed. Raises
    DamagedCheckpoint on all ranks if a piece that is read is damaged: then some parts are filled.
    """
    _refuse_differences(group, stored, parts, prefix, cast, left)
    on_all(group, lambda: read_parts(stored, parts))


def _refuse_differences(
    group: Group, stored: StoredTensors, parts: Mapping[str, Part], prefix: str, cast: bool, left: Collection[str]
) -> None:
    """Raise CheckpointError on all ranks if their tensors do not match the checkpoint."""
    saved = {key: entry for key, entry in stored.index.tensors.items() if key.startswith(prefix)}
    differences = _unused_keys(group, saved, {*parts, *left}) + _differences(saved, parts, cast)
    if not any_rank(group, bool(differences)):
        return
    of_ranks = [differences[:LISTED]] * size_of(group)
    if group is not None:
        dist.all_gather_object(of_ranks, differences[:LISTED], group=group)
    lines = sorted({line for of_rank in of_ranks for line in of_rank})
    text = "\n  ".join(lines[:LISTED] + ["..."] * (len(lines) > LISTED or len(differences) > LISTED))
    raise CheckpointError(f"{stored.folder} is of another model or optimizer; use its config:\n  {text}")


def _unused_keys(group: Group, saved: Mapping[str, TensorEntry], loaded_here: Collection[str]) -> list[str]:
    """Return a line for each key of the checkpoint that no rank loads but must."""
    keys = [key for key in saved if not key.startswith(("rng.", EXTRA))]
    is_loaded = torch.tensor([key in loaded_here for key in keys], dtype=torch.uint8)
    if group is not None:  # under pipeline parallelism a rank loads only its stages' tensors
        dist.all_reduce(is_loaded, op=dist.ReduceOp.MAX, group=group)
    lines = []
    for key, loaded in zip(keys, is_loaded.tolist(), strict=True):
        if not loaded:
            lines.append(f"{key}: in the checkpoint only")
    return lines


def _differences(saved: Mapping[str, TensorEntry], parts: Mapping[str, Part], cast: bool) -> list[str]:
    """Return a line for each tensor of this rank whose key, shape or dtype differs from the checkpoint."""
    lines = []
    for key, part in parts.items():
        if key not in saved:
            lines.append(f"{key}: missing in the checkpoint")
            continue
        entry, shape, dtype = saved[key], part.sharding.shape, part.local.dtype
        if entry.grid.shape != shape:
            lines.append(f"{key}: {entry.grid.shape} in the checkpoint, {shape} here")
        elif f"torch.{entry.dtype}" != str(dtype) and not (cast and dtype.is_floating_point and "float" in entry.dtype):
            lines.append(f"{key}: torch.{entry.dtype} in the checkpoint, {dtype} here")
    return lines


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


class _Read(NamedTuple):
    """A piece that this rank needs."""

    key: str
    piece: TensorPiece
    part: Part
    """this rank's part that it fills, wholly or partly"""


def read_parts(stored: StoredTensors, parts: Mapping[str, Part]) -> None:
    """Read the pieces that fill the parts, in threads that each have one file open."""
    reads = _needed_reads(stored.index, parts)
    batches_per_file = max(1, THREADS // max(1, len(reads)))
    batches = []
    for writer in sorted(reads):
        size = math.ceil(len(reads[writer]) / batches_per_file)
        for first in range(0, len(reads[writer]), size):
            batches.append(reads[writer][first : first + size])
    limit = _ByteLimit(BYTES_AT_A_TIME)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-read") as pool:
        for _ in pool.map(lambda batch: _read_batch(stored, batch, limit), batches):
            pass  # raises the error of a batch, and cancels batches that have not started


def _needed_reads(index: Index, parts: Mapping[str, Part]) -> dict[int, list[_Read]]:
    """Return the pieces that overlap the parts, by the rank that wrote them, in the order of its file."""
    reads: dict[int, list[_Read]] = {}
    pieces: dict[tuple[int, Region], list[TensorPiece]] = {}  # many tensors have the same grid and region
    for key in sorted(parts):
        part, grid = parts[key], index.tensors[key].grid
        cut = (id(grid), part.region)
        if cut not in pieces:
            pieces[cut] = list(grid.pieces_in(part.region))
        for piece in pieces[cut]:
            reads.setdefault(piece.writer, []).append(_Read(key, piece, part))
    return reads


def _read_batch(stored: StoredTensors, reads: Sequence[_Read], limit: _ByteLimit) -> None:
    """Read pieces of one file, verify each, and copy the overlaps into the parts. Raises DamagedCheckpoint."""
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
                    _copy_overlap(piece, read)
                    del piece  # before the next one is read
    except OSError as error:
        raise DamagedCheckpoint(str(error)) from error


def _unpack(content: bytes, read: _Read, dtype: str, path: Path) -> Tensor:
    """Return the tensor in these bytes of torch.save. Raises DamagedCheckpoint if it does not match the index."""
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a crafted file can fail in any way
        raise DamagedCheckpoint(f"{path}: cannot read its piece of {read.key}: {error}") from error
    size = read.piece.region.size
    if not isinstance(tensor, Tensor) or str(tensor.dtype) != f"torch.{dtype}" or tensor.shape != size:
        raise DamagedCheckpoint(f"{path}: its piece of {read.key} is not a tensor of {dtype} {size}")
    return tensor


def _copy_overlap(stored_piece: Tensor, read: _Read) -> None:
    """Copy the elements that the piece and this rank's part have in common."""
    from_piece, into_part = [], []
    piece, part = read.piece.region, read.part.region
    for dimension in range(len(piece.size)):
        begin = max(piece.offset[dimension], part.offset[dimension])
        end = min(piece.offset[dimension] + piece.size[dimension], part.offset[dimension] + part.size[dimension])
        from_piece.append(slice(begin - piece.offset[dimension], end - piece.offset[dimension]))
        into_part.append(slice(begin - part.offset[dimension], end - part.offset[dimension]))
    with torch.no_grad():
        read.part.local[tuple(into_part)].copy_(stored_piece[tuple(from_piece)])
