"""Steps as CUDA graphs on a GPU: replays train as steps do. It has not run on a GPU yet."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchllm.config import Config
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.torch_compat import TorchDispatchMode
from torchllm.tools.adapt.trial import build_trial, synthetic_batches
from torchllm.tools.config.load import load_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: CUDA graphs need one")
STEPS = 6
"""of which three are replays"""
LAYOUTS = {
    "float32": ["--training.dtype=float32", "--compile.block=false", "--compile.loss=false"],
    "bfloat16": ["--training.dtype=bfloat16", "--compile.block=false", "--compile.loss=false"],
    "compiled": ["--training.dtype=bfloat16", "--compile.block=true", "--compile.loss=true"],
    "chunks": ["--training.dtype=bfloat16", "--training.loss_chunk=64", "--training.z_loss=0.001"],
    "recomputed": ["--training.dtype=bfloat16", "--compile.block=true", "--recompute.mode=full"],
}


class NoOperation(TorchDispatchMode):
    """Fails where torch computes anything but copies."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        assert "copy" in str(function), function
        return function(*arguments, **(keywords or {}))


def losses(config: Config) -> list[list[float]]:
    """Return loss and gradient norm of each step, and the loss of an evaluation after it."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    mesh = build_mesh(config.parallel, device)
    trial = build_trial(config, SimpleNamespace(device=device), mesh)  # type: ignore[arg-type]  # it needs no more
    batches = synthetic_batches(config, mesh, device)
    found = []
    for step in range(1, STEPS + 1):
        ahead = [batch._replace(tokens=(batch.tokens + step) % config.model.vocab) for batch in batches]
        result = trial.step(step, ahead)
        held_out = trial.step.forward_backward.loss_sum(ahead[0])
        found.append([float(result.loss), float(result.grad_norm), float(held_out)])
    if config.compile.graphs:
        scale = torch.ones((), device=device)
        trial.step.forward_backward(batches, scale)
        with NoOperation():
            trial.step.forward_backward(batches, scale)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays_train_as_steps_do(layout: str) -> None:
    """The kernels are the same; sums by atomic additions, as of the embedding's gradient, have no fixed order."""
    common = ["train_configs/debug.toml", "--run.dry_run=true", "--parallel.dp_shard=1", *LAYOUTS[layout]]
    plain, graphed = (losses(load_config([*common, f"--compile.graphs={graphs}"])) for graphs in ("false", "true"))
    for ours, theirs in zip(graphed, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
