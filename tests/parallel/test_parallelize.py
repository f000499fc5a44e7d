"""The order of the techniques, one line in the log for each, and nothing of the model in memory yet."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parity import CPU, Settings, tiny
from torchllm.facts.parameters import canonical_name
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.mesh import build_mesh
from torchllm.parallel.parallelize import parallelize
from torchllm.runtime.torch_meshes import forget_meshes
from torchllm.tools.dry_run.trace import fake_ranks

TECHNIQUES = {
    "apply_float8": "torchllm.parallel.float8",
    "apply_tensor_parallel": "torchllm.parallel.tensor",
    "apply_recompute": "torchllm.parallel.recompute",
    "apply_compile": "torchllm.parallel.compile",
    "apply_fsdp": "torchllm.parallel.parallelize",
}
"""in their order, and where `parallelize` takes each from: all but FSDP are imported by the runs that use them"""
EVERYTHING: Settings = {
    "parallel.dp_replicate": 2,
    "parallel.dp_shard": 2,
    "parallel.tp": 2,
    "parallel.sequence_parallel": True,
    "recompute.mode": "full",
    "compile.block": True,
    "float8.recipe": "rowwise",
}


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """A group of which only this rank exists: enough for everything but sending."""
    with fake_ranks(5, 8):
        yield
    forget_meshes()


def applied(settings: Settings) -> tuple[list[Decoder], list[str]]:
    config = tiny(settings)
    with torch.device("meta"):
        model = build_model(config.model)
    order: list[str] = []

    def noting(name: str) -> Any:
        real = getattr(import_module(TECHNIQUES[name]), name)
        return lambda *args, **kwargs: (order.append(name), real(*args, **kwargs))[1]

    noted = {name: noting(name) for name in TECHNIQUES}
    noted["apply_float8"] = lambda *args: order.append("apply_float8")  # the real one: test_float8.py
    with ExitStack() as patches:
        for name, module in TECHNIQUES.items():
            patches.enter_context(mock.patch(f"{module}.{name}", noted[name]))
        mesh = build_mesh(config.parallel, CPU)
        stages = parallelize(
            model, mesh, config.parallel, config.recompute, config.compile, config.float8, torch.bfloat16, 32
        )
    assert stages == [model]
    return stages, order


@pytest.mark.usefixtures("eight_ranks")
def test_order_and_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torchllm.parallel"):
        (stage,), order = applied(EVERYTHING)
    assert order == list(TECHNIQUES)
    assert caplog.messages == [
        "float8 rowwise products in the blocks",
        "tensor parallel over 2 ranks, sequence parallel True",
        "recompute full",
        "compile norm False, block True, loss False",
        "FSDP, ZeRO stage 3, over pp 1 x dp_replicate 2 x dp_shard 2 x cp 1 x tp 2",
    ]
    parameters = dict(stage.named_parameters())
    with torch.device("meta"):
        plain = dict(build_model(tiny({}).model).named_parameters())
    assert [canonical_name(name) for name in parameters] == list(plain)
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor), name
        assert parameter.is_meta, name  # no memory before `initialize`
        assert parameter.dtype == torch.float32, name  # bfloat16 is of the computation
        assert parameter.shape == plain[canonical_name(name)].shape, name
        # every axis that holds weights, whatever the degrees: the gradient norm and checkpoints see one kind
        assert parameter.device_mesh.mesh_dim_names == ("dp_replicate", "fsdp", "tp"), name


@pytest.mark.usefixtures("eight_ranks")
def test_only_what_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torchllm.parallel"):
        _, order = applied({"parallel.dp_shard": 8, "parallel.zero_stage": 2})
    assert order == ["apply_fsdp"]
    assert caplog.messages == ["FSDP, ZeRO stage 2, over pp 1 x dp_replicate 1 x dp_shard 8 x cp 1 x tp 1"]
    _, order = applied({"parallel.dp_shard": 8, "compile.loss": True})
    assert order == ["apply_compile", "apply_fsdp"]
