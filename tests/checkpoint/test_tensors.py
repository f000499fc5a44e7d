"""Layouts, and failures of ranks, on live gloo ranks."""

import os
import resource
import signal
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests import workers
from tests.parity import whole
from torchllm import config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint import tensors as tensor_io
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.checkpoint.piece_table import read_piece_table
from torchllm.checkpoint.state import model_tensors, optimizer_tensors
from torchllm.checkpoint.tensors import verify_in_parallel

LAYOUTS = {"fsdp2": (1, 2), "fsdp4": (1, 4), "hsdp2x2": (2, 2)}
"""replicate, shard"""


class Tiny(nn.Module):
    """Sizes that no number of ranks divides, so that shards are uneven and some empty; the head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(3 * 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return self.head(self.norm(hidden.flatten(-2)).unflatten(-1, (3, 6)))


def build(layout: str | None, folder: str, seed: int, **settings: Any) -> tuple[nn.Module, Any, Checkpointer]:
    """A model that starts from the seed alike on all ranks, its optimizer with state, its checkpoints."""
    torch.manual_seed(seed)
    model = Tiny()
    model.counts.fill_(seed)
    if layout is not None:
        replicate, shard = LAYOUTS[layout]
        mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh if replicate > 1 else mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    group = dist.group.WORLD if layout is not None else None
    checkpoints = Checkpointer(config.Checkpoint(**settings), Path(folder), [model], optimizer, host_group=group)
    return model, optimizer, checkpoints


def digests(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """sha256 of every whole tensor, by key."""
    tensors = model_tensors([model]) | optimizer_tensors([model], optimizer)
    return {key: sha256(whole(tensor).tobytes()).hexdigest() for key, tensor in tensors.items()}


def save_on(layout: str | None, folder: str, seed: int = 1, **settings: Any) -> dict[str, str]:
    model, optimizer, checkpoints = build(layout, folder, seed, **settings)
    checkpoints.save(seed, {"sequences": 8 * seed})
    checkpoints.close()
    return digests(model, optimizer)


def load_on(layout: str | None, folder: str) -> tuple[int, Any, dict[str, str]]:
    model, optimizer, checkpoints = build(layout, folder, seed=5)
    manifest = checkpoints.resume()
    assert manifest is not None
    checkpoints.close()
    return manifest.step, manifest.data, digests(model, optimizer)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[str]:
    losses = []
    for step in steps:
        tokens = torch.randint(13, (2, 3), generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))
        loss = model(tokens).square().mean() * torch.rand(())  # the generator's state matters, too
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def resume_bitwise(folder: str) -> None:
    model, optimizer, checkpoints = build("fsdp4", folder, seed=1, asynchronous=True)
    assert checkpoints.resume() is None
    torch.manual_seed(dist.get_rank())
    train(model, optimizer, range(1, 3))
    with torch.no_grad():
        model.set_reshard_after_forward(False)
        model(torch.zeros(1, 3, dtype=torch.int64))  # leaves the weights gathered: saving must not mind
    checkpoints.save(2, {})
    losses = train(model, optimizer, range(3, 6))  # collectives on the default group while the save is under way
    expected = digests(model, optimizer)
    checkpoints.close()
    model, optimizer, checkpoints = build("fsdp4", folder, seed=1)
    manifest = checkpoints.resume()
    assert manifest is not None
    assert train(model, optimizer, range(manifest.step + 1, 6)) == losses
    assert digests(model, optimizer) == expected


def test_same_layout_resumes_bitwise(tmp_path: Path) -> None:
    workers.run(resume_bitwise, 4, str(tmp_path))


def messages_of(layout: str, folder: str, action: Callable[[Checkpointer], Any], seed: int, settings: Any) -> str:
    _, _, checkpoints = build(layout, folder, seed, **settings)
    try:
        action(checkpoints)
        checkpoints.close()
    except CheckpointError as error:
        return str(error)
    return "no error"


def save_without_room_on_rank_1(checkpoints: Checkpointer) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        checkpoints.save(2, {})
        checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_of_one_rank_reaches_all(tmp_path: Path) -> None:
    saved = workers.run(save_on, 2, "fsdp2", str(tmp_path))
    settings = {"asynchronous": True}
    for message in workers.run(messages_of, 2, "fsdp2", str(tmp_path), save_without_room_on_rank_1, 2, settings):
        assert "step-00000002" in message
        assert "rank 1: " in message
        assert "rank 0: " not in message
        assert "File too large" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    for loaded in workers.run(load_on, 2, "fsdp2", str(tmp_path)):
        assert loaded == (1, {"sequences": 8}, saved[0])


def count_checked(layout: str, folder: str) -> tuple[int, int, int]:
    """Return how many elements this rank looks at before a save, and how many numbers and texts it sends then."""
    _, _, checkpoints = build(layout, folder, 1)
    with mock.patch.object(checkpoints, "_refuse_nonfinite") as refuse:
        checkpoints.save(1, {})
    checkpoints.close()
    with (
        mock.patch.object(torch, "aminmax", wraps=torch.aminmax) as looks,
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as numbers,
        mock.patch.object(dist, "broadcast_object_list", wraps=dist.broadcast_object_list) as texts,
    ):
        Checkpointer._refuse_nonfinite(checkpoints, *refuse.call_args.args)
    return sum(call.args[0].numel() for call in looks.call_args_list), numbers.call_count, texts.call_count


def test_each_saved_value_is_looked_at_by_one_rank_and_one_number_agreed_on(tmp_path: Path) -> None:
    counts = workers.run(count_checked, 4, "hsdp2x2", str(tmp_path))
    model = Tiny()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    steps_of_adamw = len(list(model.parameters()))
    assert sum(elements for elements, _, _ in counts) == 3 * parameters + steps_of_adamw
    assert [tuple(sent) for _, *sent in counts] == [(1, 0)] * 4


def load_in_small_rounds(layout: str, folder: str) -> tuple[Any, list[tuple[str, int]]]:
    """Load with messages of a tensor a round; also the pieces that this rank has read, as file and first byte."""
    with (
        mock.patch.object(tensor_io, "read_piece", wraps=tensor_io.read_piece) as reads,
        mock.patch.object(tensor_io, "BYTES_AT_A_TIME", 1),
    ):
        try:
            loaded: Any = load_on(layout, folder)
        except CheckpointError as error:
            loaded = str(error)
    return loaded, [(path.name, piece.offset) for _, piece, path in (call.args for call in reads.call_args_list)]


def test_copies_read_each_piece_once_and_damage_that_one_finds_reaches_all(tmp_path: Path) -> None:
    saved = workers.run(save_on, 4, "fsdp4", str(tmp_path))
    folder = manifests.step_folder(tmp_path / "checkpoints", 1)
    files = manifests.read_manifest(folder).files
    pieces = []
    for path in sorted(folder.glob("*.distcp")):
        pieces += [(path.name, piece.offset) for piece in read_piece_table(path, files[path.name])]
    ranks = workers.run(load_in_small_rounds, 4, "hsdp2x2", str(tmp_path))
    assert [loaded for loaded, _ in ranks] == [(1, {"sequences": 8}, saved[0])] * 4
    assert sorted(piece for _, read in ranks for piece in read) == sorted(pieces)

    name, offset = pieces[-2]
    content = bytearray((folder / name).read_bytes())
    content[offset + 100] ^= 1
    (folder / name).write_bytes(content)
    readers = [rank for rank, (_, read) in enumerate(ranks) if (name, offset) in read]
    for message, _ in workers.run(load_in_small_rounds, 4, "hsdp2x2", str(tmp_path)):
        assert f"rank {readers[0]}: {folder / name}: damaged: the sum of bytes {offset} to " in message


def test_missing_checkpoint_reaches_all(tmp_path: Path) -> None:
    settings = {"resume": str(tmp_path / "step-00000001")}
    for message in workers.run(messages_of, 2, "fsdp2", str(tmp_path), Checkpointer.resume, 1, settings):
        assert "there is no such checkpoint folder" in message


def kill_in_a_shard(folder: str) -> None:
    """Save step 2, but let rank 1 die when it has written a tensor."""

    def kill(data: Any, stream: Any) -> None:
        saved(data, stream)
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    saved = torch.save
    _, _, checkpoints = build("fsdp2", folder, seed=2)
    if dist.get_rank() == 1:
        torch.save = kill
    checkpoints.save(2, {"sequences": 16})


def test_killed_save_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    """Of one process tests/faults/test_saves.py has every operation, those of a deletion too."""
    saved = workers.run(save_on, 2, "fsdp2", str(tmp_path))[0]
    with pytest.raises(workers.WorkerFailed):
        workers.run(kill_in_a_shard, 2, str(tmp_path))
    (folder,) = manifests.step_folders(tmp_path / "checkpoints")
    verify_in_parallel(None, folder)
    for loaded in workers.run(load_on, 2, "fsdp2", str(tmp_path)):
        assert loaded == (1, {"sequences": 8}, saved)
    assert list((tmp_path / "checkpoints").iterdir()) == [folder]  # nothing hidden is left
