"""Reading torch's `.metadata` without trusting it.

`torch.distributed.checkpoint` keeps the index of its tensors in a pickle, and a pickle can call any function while it
is read. Here only the classes that such an index is made of can be named, and only after the file's hash was found
equal to the manifest's.
"""

import hashlib
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchllm.checkpoint.manifest import CheckpointError, FileRecord

METADATA = ".metadata"

_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_ALLOWED = {
    *(("torch", name) for name in ("Size", *_DTYPES)),
    ("torch.serialization", "_get_layout"),  # looks a name up among the layouts
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),  # the folder's name when it was written
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in an index of tensors")
        return super().find_class(module, name)


def read_metadata(folder: Path, files: Mapping[str, FileRecord]) -> Metadata:
    """The index of a checkpoint's tensors; `files` are the manifest's. Raises CheckpointError; runs no foreign code."""
    path = folder / METADATA
    content = path.read_bytes()
    if METADATA not in files or hashlib.sha256(content).hexdigest() != files[METADATA].sha256:
        raise CheckpointError(f"{path}: damaged: its sha256 is not the manifest's")
    try:
        metadata = _RestrictedUnpickler(io.BytesIO(content)).load()
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        named = {place.relative_path for place in places.values()}
        sound = isinstance(metadata, Metadata) and all(isinstance(t, TensorStorageMetadata) for t in tensors.values())
    except Exception as error:  # a crafted pickle can fail in any way
        raise CheckpointError(f"{path}: not an index of tensors: {error}") from error
    if not sound:
        raise CheckpointError(f"{path}: not an index of tensors")
    if outside := named - files.keys():
        raise CheckpointError(f"{path}: points to files that the manifest does not list: {sorted(outside)}")
    return metadata


class VerifiedReader(FileSystemReader):
    """Reads tensors by an index that `read_metadata` has checked, instead of unpickling the file itself."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata
