"""benchmark weights: whether this device makes the initial weights that a CPU makes, to the last bit.

Every layout starts from the same weights because each is a function of the seed, its name and its index
(torchllm/parallel/initialize.py). A device whose arithmetic differs starts from others.
"""

import hashlib
from typing import TYPE_CHECKING

import torch

from torchllm.models.decoder import build_model
from torchllm.parallel.initialize import initialize
from torchllm.runtime.process import Runtime

from .tools import TableRow, Tables

if TYPE_CHECKING:
    from .settings import BenchmarkConfig


def weights(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Hash the initial weights of this device and of the CPU."""
    rows = [weights_row(config, device) for device in (runtime.device, torch.device("cpu"))]
    return {"initial weights": rows}


def weights_row(config: "BenchmarkConfig", device: torch.device) -> TableRow:
    """Return the hash of all initial weights in float32, made on `device`."""
    with torch.device("meta"):
        model = build_model(config.model)
    initialize([model], config.model, device, config.run.seed)
    digest = hashlib.sha256()
    count = 0
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().numpy().tobytes())
        count += parameter.numel()
    return {"device": device.type, "parameters": count, "sha256": digest.hexdigest()}
