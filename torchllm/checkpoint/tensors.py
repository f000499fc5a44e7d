"""The tensors of a checkpoint: what they are called, and how they get to disk and back.

`torch.distributed.checkpoint` (DCP) writes each rank's shards under layout-free keys, and nothing but tensors:

    model.<canonical name>                    parameters and persistent buffers; a tied one once
    optimizer.<canonical name>.<entry>        exp_avg, exp_avg_sq, step, momentum_buffer
    rng.<cpu or cuda>.<rank>                  states of torch's random generators
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

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


def model_tensors(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this rank's stages, sharing their memory."""
    return {f"model.{name}": tensor.detach() for name, tensor in _named(stages).items()}


def optimizer_tensors(stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State of an optimizer over these stages' parameters, sharing its memory. TypeError if some is no tensor."""
    names = {id(tensor): name for name, tensor in _named(stages).items()}
    copies = {id(copy) for _, copy in _copies(stages)}
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


def _named(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """By canonical name, a tied one once. Not from `named_parameters`: FSDP's weights may still be gathered there."""
    named: dict[str, Tensor] = {}
    for name, tensor in _entries(stages):
        named.setdefault(name, tensor)
    return named


def _entries(stages: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Canonical name and tensor of all entries, each tensor once."""
    seen: set[int] = set()
    for stage in stages:
        for name, tensor in stage.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield canonical_name(name), tensor


def _copies(stages: Sequence[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Tensors of one name, the saved one first: a tied embedding where a rank holds both ends of a pipeline."""
    named = _named(stages)
    return [(named[name], tensor) for name, tensor in _entries(stages) if tensor is not named[name]]


@torch.no_grad()
def fill_tied_copies(stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """After loading: give every copy of a parameter on this rank the value and the optimizer state that were loaded."""
    for original, duplicate in _copies(stages):
        duplicate.copy_(original)
        for entry, value in optimizer.state[original].items():
            if isinstance(value, Tensor):
                optimizer.state[duplicate][entry].copy_(value)


def random_state(group: Group) -> dict[str, Tensor]:
    """Of this rank's torch generators."""
    state = {f"rng.cpu.{rank_of(group)}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"rng.cuda.{rank_of(group)}"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """The reverse of `random_state`."""
    for key, value in state.items():
        (torch.set_rng_state if key.startswith("rng.cpu.") else torch.cuda.set_rng_state)(value)


def size_in_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of whole tensors: of the checkpoint, or under pipeline parallelism of this rank's stages."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class Snapshot:
    """A copy of tensors on the host, always in the same memory (pinned where there is a GPU): fresh memory is slow."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())  # what it caches, it pins
        self._copies: dict[str, Tensor] = stager.stage(tensors)

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the same tensors, with today's values, complete when this returns and good until the next call."""
        for key, tensor in tensors.items():
            _local_tensor(self._copies[key]).copy_(_local_tensor(tensor), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._copies


def _local_tensor(tensor: Tensor) -> Tensor:
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
    """Leave torch's CRC32 out of the files: it costs more than writing them, and their sha256 is taken anyway."""
    kept = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(kept)


def written_files(rank: int, folder: Path) -> dict[str, FileRecord]:
    """Return size and hash of the files that `save_tensors` wrote on `rank`; rank 0 also has the index.

    DCP names the files of a rank `__<rank>_<number>.distcp`.
    """
    paths = [*folder.glob(f"__{rank}_*"), *([folder / METADATA] if rank == 0 else [])]
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
    """Fill `tensors` in place. Keys, shapes and types must be exactly the checkpoint's: DCP alone ignores and casts."""
    metadata = on_first(group, lambda: read_metadata(folder, manifest.files))
    saved = {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    for key in [key for key in optional if key not in saved]:
        del tensors[key]
    keys = [key for key in saved if not key.startswith("rng.")]
    wanted = torch.tensor([key in tensors for key in keys], dtype=torch.uint8)
    if group is not None:  # under pipeline parallelism a rank wants only its stages' tensors
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=group)
    found = [
        f"{key}: in the checkpoint only" for key, is_wanted in zip(keys, wanted.tolist(), strict=True) if not is_wanted
    ]
    for key, tensor in tensors.items():
        if key not in saved:
            found.append(f"{key}: missing in the checkpoint")
        elif (shape := tuple(saved[key].size)) != tuple(tensor.shape):
            found.append(f"{key}: {shape} in the checkpoint, {tuple(tensor.shape)} here")
        elif (dtype := saved[key].properties.dtype) != tensor.dtype:
            found.append(f"{key}: {dtype} in the checkpoint, {tensor.dtype} here")
    shown = sorted({problem for problems in on_all(group, lambda: found[:20]) for problem in problems})[:20]
    if shown:
        listed = "\n  ".join(shown + ["..."] * (len(found) > len(shown)))
        raise CheckpointError(f"{folder} is of another model or optimizer; use its config:\n  {listed}")
    with _plain_errors(group, f"cannot load {folder}"):
        load(
            tensors,
            storage_reader=VerifiedReader(folder, metadata),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )


@contextmanager
def _plain_errors(group: Group, what: str) -> Iterator[None]:
    """DCP's errors, which hold every rank's traceback and reach all ranks already, as one CheckpointError."""
    try:
        with warnings.catch_warnings() if group is None else nullcontext():
            if group is None:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))
        raise CheckpointError(f"{what}: {reasons}") from error
