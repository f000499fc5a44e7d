"""Writes checkpoints as version 0.1 did: by torch.distributed.checkpoint, with the sha256 of whole files."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint.manifest import Manifest
from torchllm.checkpoint.state import model_tensors, optimizer_tensors


def write_format_1(root: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Write the checkpoint of one process and return its step folder."""
    tensors: dict[str, Tensor] = model_tensors([model]) | optimizer_tensors([model], optimizer)
    tensors["rng.cpu.0"] = torch.get_rng_state()
    temporary = manifests.make_temporary(root, step, needed=0)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    save(tensors, storage_writer=FileSystemWriter(temporary), planner=planner, no_dist=True)
    files = {path.name: manifests.hash_file(path) for path in temporary.iterdir()}
    folder = manifests.step_folder(root, step)
    manifests.publish(temporary, folder, Manifest(step, {}, {}, 1, {}, files, format=1))
    return folder
