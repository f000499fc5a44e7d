"""The tensors of a checkpoint: their keys, and how they get to disk and back.

`torch.distributed.checkpoint` (DCP) writes each rank's shards, nothing but tensors, under keys that do not depend on
the layout:

    model.<canonical name>                    parameters and persistent buffers; a tied one once
    optimizer.<canonical name>.<entry>        exp_avg, exp_avg_sq, step, momentum_buffer
    rng.<cpu or cuda>.<rank>                  states of torch's random generators
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from torchllm.checkpoint.agreement import Group, on_all, on_first, rank_of
from torchllm.checkpoint.dcp_metadata import METADATA, VerifiedReader, read_metadata
from torchllm.checkpoint.manifest import CheckpointError, FileRecord, Manifest, hash_file
from torchllm.spec.parameters import canonical_name

LISTED = 20
"""differences between a checkpoint and the model that an error lists at most"""


def model_tensors(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of this rank's stages by key; they share the stages' memory."""
    return {f"model.{name}": tensor.detach() for name, tensor in _by_name(stages).items()}


def optimizer_tensors(stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimizer over these stages' parameters by key; it shares the optimizer's memory.

    Raises TypeError if an entry of it is not a tensor.
    """
    names = {id(tensor): name for name, tensor in _by_name(stages).items()}
    copies = {id(tied.copy) for tied in _tied_copies(stages)}
    tensors: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        if id(parameter) in copies:
            continue
        for entry, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{names[id(parameter)]}.{entry}"] = value
            elif value is not None:  # SGD keeps a None where it has no momentum
                raise TypeError(f"optimizer state {entry!r} of {names[id(parameter)]} is not a tensor: {value!r}")
    return tensors


def _by_name(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the tensors to save by canonical name, a tied one once."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in _entries(stages):
        tensors.setdefault(name, tensor)
    return tensors


def _entries(stages: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield canonical name and tensor of every parameter and persistent buffer, each tensor once.

    They come from `state_dict`, not from `named_parameters`, in which FSDP's weights may still be gathered.
    """
    yielded: set[int] = set()
    for stage in stages:
        for name, tensor in stage.state_dict(keep_vars=True).items():
            if id(tensor) not in yielded:
                yielded.add(id(tensor))
                yield canonical_name(name), tensor


class _TiedCopy(NamedTuple):
    """Two tensors of one name: a tied embedding on a rank that holds both ends of a pipeline."""

    saved: Tensor
    copy: Tensor


def _tied_copies(stages: Sequence[nn.Module]) -> list[_TiedCopy]:
    """Return the tensors of this rank that are copies of a saved tensor, each with that."""
    saved = _by_name(stages)
    copies = []
    for name, tensor in _entries(stages):
        if tensor is not saved[name]:
            copies.append(_TiedCopy(saved[name], tensor))
    return copies


@torch.no_grad()
def fill_tied_copies(stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Copy the loaded value and optimizer state of each tied parameter to its other copy on this rank."""
    for tied in _tied_copies(stages):
        tied.copy.copy_(tied.saved)
        for entry, value in optimizer.state[tied.saved].items():
            if isinstance(value, Tensor):
                optimizer.state[tied.copy][entry].copy_(value)


def random_state(group: Group) -> dict[str, Tensor]:
    """Return the states of this rank's torch generators by key."""
    state = {f"rng.cpu.{rank_of(group)}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"rng.cuda.{rank_of(group)}"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Set torch's generators to states that `random_state` returned."""
    for key, value in state.items():
        if key.startswith("rng.cpu."):
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value)


def size_in_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of the whole (not sharded) tensors; under pipeline parallelism, of this rank's stages only."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class Snapshot:
    """A copy of tensors on the host, for a save in the background.

    Its memory is allocated once, for allocating is slow; it is pinned if there is a GPU.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """Allocate memory for copies of `tensors`."""
        stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())  # what it caches, it pins
        self._copies: dict[str, Tensor] = stager.stage(tensors)

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the present values of the same tensors and return the copies, which are valid until the next call."""
        for key, tensor in tensors.items():
            _local_tensor(self._copies[key]).copy_(_local_tensor(tensor), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._copies


def _local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_tensors(group: Group, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write every rank's part of the tensors into an empty folder and force it to disk. Raises CheckpointError."""
    with _plain_errors(group, f"cannot write {folder}"), _no_checksums():
        save(
            tensors,
            storage_writer=FileSystemWriter(folder),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Leave torch's CRC32 out of the files: it takes longer than writing them, and the manifest has their sha256."""
    previous = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(previous)


def written_files(rank: int, folder: Path) -> dict[str, FileRecord]:
    """Return size and hash of the files that `save_tensors` wrote on `rank`; rank 0 also has the index.

    DCP names the files of a rank `__<rank>_<number>.distcp`.
    """
    paths = list(folder.glob(f"__{rank}_*"))
    if rank == 0:
        paths.append(folder / METADATA)
    return {path.name: hash_file(path) for path in paths}


def load_tensors(
    group: Group,
    folder: Path,
    manifest: Manifest,
    tensors: dict[str, Tensor],
    *,
    prefix: str = "",
    optional: Iterable[str] = (),
) -> None:
    """Fill `tensors`, on all ranks together exactly those of the checkpoint whose key begins with `prefix`, in place.

    Keys that are `optional` are dropped from `tensors` if the checkpoint lacks them. Raises CheckpointError on all
    ranks if keys, shapes or dtypes differ otherwise, which DCP would ignore, or cast.
    """
    metadata = on_first(group, lambda: read_metadata(folder, manifest.files))
    saved: dict[str, TensorStorageMetadata] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
            saved[key] = entry
    for key in optional:
        if key not in saved:
            del tensors[key]
    differences = _unused_keys(group, saved, tensors) + _differences(saved, tensors)
    listed: set[str] = set()
    for of_rank in on_all(group, lambda: differences[:LISTED]):
        listed.update(of_rank)
    if listed:
        lines = sorted(listed)[:LISTED]
        if len(differences) > len(lines):
            lines.append("...")
        text = "\n  ".join(lines)
        raise CheckpointError(f"{folder} is of another model or optimizer; use its config:\n  {text}")
    with _plain_errors(group, f"cannot load {folder}"):
        load(
            tensors,
            storage_reader=VerifiedReader(folder, metadata),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )


def _unused_keys(group: Group, saved: Mapping[str, TensorStorageMetadata], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each key of the checkpoint that no rank loads, random generators apart."""
    keys = [key for key in saved if not key.startswith("rng.")]
    is_loaded = torch.tensor([key in tensors for key in keys], dtype=torch.uint8)
    if group is not None:  # under pipeline parallelism a rank loads only its stages' tensors
        dist.all_reduce(is_loaded, op=dist.ReduceOp.MAX, group=group)
    lines = []
    for key, loaded in zip(keys, is_loaded.tolist(), strict=True):
        if not loaded:
            lines.append(f"{key}: in the checkpoint only")
    return lines


def _differences(saved: Mapping[str, TensorStorageMetadata], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each tensor of this rank whose key, shape or dtype is not the checkpoint's."""
    lines = []
    for key, tensor in tensors.items():
        if key not in saved:
            lines.append(f"{key}: missing in the checkpoint")
            continue
        shape, dtype = tuple(saved[key].size), saved[key].properties.dtype
        if shape != tuple(tensor.shape):
            lines.append(f"{key}: {shape} in the checkpoint, {tuple(tensor.shape)} here")
        elif dtype != tensor.dtype:
            lines.append(f"{key}: {dtype} in the checkpoint, {tensor.dtype} here")
    return lines


@contextmanager
def _plain_errors(group: Group, failure: str) -> Iterator[None]:
    """Turn an error of DCP, which holds every rank's traceback and is raised on all ranks, into a CheckpointError."""
    try:
        with warnings.catch_warnings() if group is None else nullcontext():
            if group is None:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items()))
        raise CheckpointError(f"{failure}: {reasons}") from error
