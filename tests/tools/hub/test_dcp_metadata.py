from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchllm import config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.verify import verify_checkpoint
from torchllm.tools.hub.dcp_metadata import METADATA, main, write_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's tools, in one process


def every_dtype(value: int) -> nn.Module:
    model = nn.Module()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        model.register_buffer(str(dtype).replace(".", "_"), torch.full((3,), value, dtype=dtype))
    model.weight = nn.Parameter(torch.full((1,), float(value)))
    return model


def test_an_error_of_the_command_is_a_line(tmp_path: Path) -> None:
    for arguments, message in (([], "usage: "), ([str(tmp_path / "none")], "error: .*/none: there is no such")):
        with pytest.raises(SystemExit, match=message):
            main(arguments)


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
