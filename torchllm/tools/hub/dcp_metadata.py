"""Write the `.metadata` of torch.distributed.checkpoint (DCP) into a checkpoint, so that torch's own tools load it.

    python -P -m torchllm.tools.hub.dcp_metadata STEP_FOLDER

`.metadata` is a pickle with name, shape, dtype and files of each tensor. This library never reads it.
"""

import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchllm.checkpoint.data_file import data_file_name, read_piece_table
from torchllm.checkpoint.index import INDEX, parse_index
from torchllm.checkpoint.manifest import CheckpointError, DamagedCheckpoint, read_manifest
from torchllm.checkpoint.verify import check_content
from torchllm.tools.torch_names import storage_info

METADATA = ".metadata"


def write_metadata(folder: Path) -> Path:
    """Write a `.metadata` into a step folder, to be read by torch's own tools, and return its path.

    Verifies the index and every table, not the tensors. Raises CheckpointError.
    """
    manifest = read_manifest(folder)
    check_content(folder / INDEX, manifest.files[INDEX])
    index = parse_index((folder / INDEX).read_bytes(), folder / INDEX)
    tables = {}
    for writer in sorted(index.writers()):
        name = data_file_name(writer)
        tables[writer] = read_piece_table(folder / name, manifest.files[name])
    metadata = Metadata(state_dict_metadata={}, storage_data={})
    for key, entry in index.tensors.items():
        shape = entry.grid.shape
        chunks = []
        for number in range(len(entry.grid.writers)):
            piece = entry.grid.piece(number)
            offset, size = torch.Size(piece.region.offset), torch.Size(piece.region.size)
            stored = tables[piece.writer].find(entry.number)
            if stored is None:
                raise DamagedCheckpoint(f"{folder / data_file_name(piece.writer)}: holds no piece of {key}")
            chunks.append(ChunkStorageMetadata(offset, size))
            info = storage_info(data_file_name(piece.writer), stored.offset, stored.length)
            metadata.storage_data[MetadataIndex(key, offset)] = info
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    path = folder / METADATA
    temporary = folder / f"{METADATA}.tmp"
    temporary.write_bytes(pickle.dumps(metadata))
    os.rename(temporary, path)
    return path


def main(arguments: Sequence[str]) -> None:
    """Run the command. Raises SystemExit with a message for wrong input."""
    if len(arguments) != 1:
        sys.exit("usage: python -P -m torchllm.tools.hub.dcp_metadata STEP_FOLDER")
    try:
        print(f"wrote {write_metadata(Path(arguments[0]))}")
    except (CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
