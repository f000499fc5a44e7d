import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from torchllm import config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint.checkpointer import Checkpointer, load_weights
from torchllm.checkpoint.dcp_metadata import METADATA, read_metadata
from torchllm.checkpoint.manifest import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    Checkpointer(config.Checkpoint(), tmp_path, [model], torch.optim.SGD(model.parameters())).save(1, {})
    return manifests.step_folder(tmp_path / "checkpoints", 1)


def plant(folder: Path, content: bytes) -> None:
    """Replace the index and make the manifest agree with it, as whoever crafts a checkpoint can."""
    manifest = manifests.read_manifest(folder)
    (folder / METADATA).write_bytes(content)
    files = {**manifest.files, METADATA: manifests.hash_file(folder / METADATA)}
    hidden = folder.rename(folder.with_name("being-changed"))
    manifests.publish(hidden, folder, replace(manifest, files=files))
    manifests.verify_checkpoint(folder)  # so that what refuses it below is the reader of the index


def pickle_of_name(module: str, name: str) -> bytes:
    """A pickle that only looks a name up in a module."""
    program = b"\x80\x04"  # protocol 4
    for text in (module, name):
        program += b"\x8c" + bytes([len(text)]) + text.encode()  # push a short string
    return program + b"\x93."  # STACK_GLOBAL, end


class Crafted:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def test_crafted_metadata_does_not_run(folder: Path, tmp_path: Path) -> None:
    bait = tmp_path / "ran"
    content = pickle.dumps(Crafted(os.mkdir, str(bait)))
    pickle.loads(content)
    assert bait.exists(), "the bait must work, or the test proves nothing"
    bait.rmdir()
    plant(folder, content)
    with pytest.raises(CheckpointError, match=r"it names posix\.mkdir"):
        load_weights(folder, nn.Linear(3, 2))
    assert not bait.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("os", "system"),
        ("torch", "load"),
        ("torch", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
        ("torch.serialization", "load"),
        ("pathlib", "Path.unlink"),
    ],
)
def test_no_other_name_can_be_reached(folder: Path, module: str, name: str) -> None:
    plant(folder, pickle_of_name(module, name))
    with pytest.raises(CheckpointError, match="has no place in an index"):
        load_weights(folder, nn.Linear(3, 2))


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps(None), pickle.dumps({"state_dict_metadata": {}})])
def test_what_is_no_index_is_refused(folder: Path, content: bytes) -> None:
    plant(folder, content)
    with pytest.raises(CheckpointError, match="not an index of tensors"):
        load_weights(folder, nn.Linear(3, 2))


def test_hash_is_checked_before_a_byte_is_unpickled(folder: Path) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(None))
    with pytest.raises(CheckpointError, match="sha256"):
        read_metadata(folder, manifests.read_manifest(folder).files)


@pytest.mark.parametrize("path", ["../../other.distcp", "/etc/hostname", "missing.distcp"])
def test_index_cannot_point_outside_the_manifest(folder: Path, path: str) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = path
    plant(folder, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="the manifest does not list"):
        load_weights(folder, nn.Linear(3, 2))


def test_entries_that_are_not_tensors_are_refused(folder: Path) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.state_dict_metadata["model.extra"] = BytesStorageMetadata()
    plant(folder, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not an index of tensors"):
        load_weights(folder, nn.Linear(3, 2))


def test_every_dtype_passes(tmp_path: Path) -> None:
    """Torch's own writer, for each type that weights or generators can have."""
    model = nn.Module()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        model.register_buffer(str(dtype).replace(".", "_"), torch.ones(3, dtype=dtype))
    model.weight = nn.Parameter(torch.ones(1))
    Checkpointer(config.Checkpoint(), tmp_path, [model], torch.optim.SGD(model.parameters())).save(1, {})
    load_weights(manifests.step_folder(tmp_path / "checkpoints", 1), model)
