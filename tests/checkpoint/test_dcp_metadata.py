import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from tests.checkpoint.old_format import write_format_1
from torchllm import config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.dcp_metadata import METADATA, read_metadata, write_metadata
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.checkpoint.verify import verify_checkpoint
from torchllm.checkpoint.weights import load_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's tools, in one process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as version 0.1 wrote it."""
    model = nn.Linear(3, 2).to(torch.bfloat16)
    return write_format_1(tmp_path / "checkpoints", 1, model, torch.optim.SGD(model.parameters()))


def plant(folder: Path, content: bytes) -> None:
    """Replace the index and make the manifest agree with it, as whoever crafts a checkpoint can."""
    manifest = manifests.read_manifest(folder)
    (folder / METADATA).write_bytes(content)
    files = {**manifest.files, METADATA: manifests.hash_file(folder / METADATA)}
    hidden = folder.rename(folder.with_name("being-changed"))
    manifests.publish(hidden, folder, replace(manifest, files=files))
    verify_checkpoint(folder)  # so that what refuses it below is the reader of the index


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
        load_weights(folder, [nn.Linear(3, 2)])
    assert not bait.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
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
        load_weights(folder, [nn.Linear(3, 2)])


class PicklerOfPython311(pickle.Pickler):
    """Pickles a member of an Enum as Python 3.11.0 to 3.11.3 do: as a call of getattr."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _MEM_FORMAT_ENCODING):
            return getattr, (_MEM_FORMAT_ENCODING, value.name)
        return NotImplemented


def test_a_member_of_an_enum_is_found_by_its_name(folder: Path) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    content = io.BytesIO()
    PicklerOfPython311(content).dump(metadata)
    assert b"getattr" in content.getvalue()
    plant(folder, content.getvalue())
    load_weights(folder, [nn.Linear(3, 2).to(torch.bfloat16)])


@pytest.mark.parametrize(
    "arguments",
    [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), ("text", "format"), ()],
    ids=["class", "special name", "text", "none"],
)
def test_no_other_attribute_can_be_reached(folder: Path, arguments: tuple[Any, ...]) -> None:
    plant(folder, pickle.dumps(Crafted(getattr, *arguments)))
    with pytest.raises(CheckpointError, match="not an index of tensors"):
        load_weights(folder, [nn.Linear(3, 2)])


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps(None), pickle.dumps({"state_dict_metadata": {}})])
def test_what_is_no_index_is_refused(folder: Path, content: bytes) -> None:
    plant(folder, content)
    with pytest.raises(CheckpointError, match="not an index of tensors"):
        load_weights(folder, [nn.Linear(3, 2)])


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
        load_weights(folder, [nn.Linear(3, 2)])


def test_entries_that_are_not_tensors_are_refused(folder: Path) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.state_dict_metadata["model.extra"] = BytesStorageMetadata()
    plant(folder, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not an index of tensors"):
        load_weights(folder, [nn.Linear(3, 2)])


@pytest.mark.parametrize("damage", ["two pieces", "a hole", "a negative offset", "another name", "no place"])
def test_pieces_that_make_no_whole_tensor_are_refused(folder: Path, damage: str) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    entry = metadata.state_dict_metadata["model.weight"]
    (index,) = (index for index in metadata.storage_data if index.fqn == "model.weight")
    if damage == "two pieces":
        entry.chunks = entry.chunks * 2
    elif damage == "a hole":
        entry.chunks[0].offsets, entry.chunks[0].sizes = torch.Size([1, 0]), torch.Size([1, 3])
        metadata.storage_data[replace(index, offset=torch.Size([1, 0]))] = metadata.storage_data[index]
    elif damage == "a negative offset":
        metadata.storage_data[index].offset = -64
    elif damage == "another name":
        metadata.storage_data[index].relative_path = METADATA
    else:
        del metadata.storage_data[index]
    plant(folder, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not an index of tensors"):
        load_weights(folder, [nn.Linear(3, 2).to(torch.bfloat16)])


def test_every_dtype_of_version_0_1_loads(tmp_path: Path) -> None:
    """Torch's own writer, for each type that weights or generators can have."""
    folder = write_format_1(tmp_path, 1, every_dtype(1), torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    model = every_dtype(0)
    load_weights(folder, [model])
    assert all(bool((tensor == 1).all()) for tensor in model.state_dict().values())


def every_dtype(value: int) -> nn.Module:
    model = nn.Module()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        model.register_buffer(str(dtype).replace(".", "_"), torch.full((3,), value, dtype=dtype))
    model.weight = nn.Parameter(torch.full((1,), float(value)))
    return model


def test_a_run_of_version_0_1_resumes(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    write_format_1(tmp_path / "checkpoints", 1, model, optimizer)
    expected = torch.rand(5)
    resumed = nn.Linear(3, 2)
    resumed_optimizer = torch.optim.AdamW(resumed.parameters())
    resumed(torch.ones(3)).sum().backward()
    resumed_optimizer.step()
    manifest = Checkpointer(config.Checkpoint(), tmp_path, [resumed], resumed_optimizer).resume()
    assert manifest is not None
    assert torch.equal(torch.rand(5), expected)
    assert torch.equal(resumed.weight, model.weight)
    for parameter, state in optimizer.state.items():
        same = next(p for p in resumed.parameters() if p.shape == parameter.shape)
        for entry, value in state.items():
            assert torch.equal(resumed_optimizer.state[same][entry], value), entry


def test_damage_in_version_0_1_is_found(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: damaged"):
        load_weights(folder, [nn.Linear(3, 2).to(torch.bfloat16)])


def test_torchs_own_tools_load_what_the_command_describes(tmp_path: Path) -> None:
    model = every_dtype(1)
    Checkpointer(config.Checkpoint(), tmp_path, [model], torch.optim.SGD(model.parameters())).save(1, {})
    folder = manifests.step_folder(tmp_path / "checkpoints", 1)
    assert write_metadata(folder) == folder / METADATA
    verify_checkpoint(folder)  # still what was written
    loaded = {key: torch.zeros_like(tensor) for key, tensor in model.state_dict(prefix="model.").items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert all(bool((tensor == 1).all()) for tensor in loaded.values())
    dcp_to_torch_save(folder, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt")
    assert saved.keys() == loaded.keys() | {"rng.cpu"}
