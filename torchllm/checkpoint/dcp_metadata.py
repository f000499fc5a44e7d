"""Read the `.metadata` file of torch.distributed.checkpoint (DCP) without trusting it.

DCP keeps the index of its tensors (name, shape, dtype, and which file holds which part) in `.metadata`, which is a
pickle, and a pickle can call any function while it is read. Here the file is read only after its hash was found equal
to the manifest's, and only the classes that such an index consists of can be named in it.
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

_METADATA_CLASSES = (
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = {
    ("torch", "Size"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    ("torch.serialization", "_get_layout"),  # finds a layout by its name
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),  # of the folder when it was written
    ("pathlib._local", "PosixPath"),  # the same, written by Python 3.13
}
"""module and name of everything that an index of tensors may refer to"""


class _RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that finds only the names in `_ALLOWED`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in an index of tensors")
        return super().find_class(module, name)


def read_metadata(folder: Path, files: Mapping[str, FileRecord]) -> Metadata:
    """Return DCP's index of the tensors in a checkpoint folder; `files` are those of its manifest.

    Raises CheckpointError if the file is damaged, is no such index, or points to files outside the manifest. No code
    from the file is run.
    """
    path = folder / METADATA
    content = path.read_bytes()
    if METADATA not in files or hashlib.sha256(content).hexdigest() != files[METADATA].sha256:
        raise CheckpointError(f"{path}: damaged: its sha256 is not the manifest's")
    try:
        metadata = _RestrictedUnpickler(io.BytesIO(content)).load()
        is_index = isinstance(metadata, Metadata)
        for entry in metadata.state_dict_metadata.values():
            is_index = is_index and isinstance(entry, TensorStorageMetadata)
        named_files = {part.relative_path for part in metadata.storage_data.values()}
    except Exception as error:  # a crafted pickle can fail in any way
        raise CheckpointError(f"{path}: not an index of tensors: {error}") from error
    if not is_index:
        raise CheckpointError(f"{path}: not an index of tensors")
    if outside := named_files - files.keys():
        raise CheckpointError(f"{path}: points to files that the manifest does not list: {sorted(outside)}")
    return metadata


class VerifiedReader(FileSystemReader):
    """A DCP reader that uses an index checked by `read_metadata` instead of unpickling the file itself."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checked index, whatever DCP asks for."""
        return self._metadata
