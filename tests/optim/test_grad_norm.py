"""The global gradient norm over every axis, against a float64 norm of the whole gradients."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.parity import Settings, step_batch, tiny
from tests.workers import run
from torchllm.data.batch import Batch
from torchllm.models.decoder import build_model
from torchllm.optim.grad_norm import clip, grad_norm, gradients
from torchllm.parallel.initialize import initialize
from torchllm.parallel.mesh import build_mesh
from torchllm.parallel.parallelize import parallelize
from torchllm.parallel.pipeline import OneStage

CPU = torch.device("cpu")
TIED: Settings = {"model.tied_embeddings": True, "model.family": "gpt", "model.kv_heads": 0}
UNEVEN: Settings = {"model.vocab": 97, "model.layers": 2}
LAYOUTS: dict[str, Settings] = {
    "fsdp4": {"parallel.dp_shard": 4},
    "dp4": {"parallel.dp_shard": 4, "parallel.zero_stage": 0},
    "hsdp2x2-tied": {"parallel.dp_replicate": 2, "parallel.dp_shard": 2, **TIED},
    "fsdp2xtp2": {"parallel.dp_shard": 2, "parallel.tp": 2},
    "fsdp2xtp2+sp": {"parallel.dp_shard": 2, "parallel.tp": 2, "parallel.sequence_parallel": True},
    "hsdp2xtp2+sp-tied": {"parallel.dp_replicate": 2, "parallel.tp": 2, "parallel.sequence_parallel": True, **TIED},
    "tp4": {"parallel.tp": 4},
}


def norms(layouts: dict[str, Settings]) -> dict[str, dict[str, float]]:
    """By layout: the norm, that of the whole gradients, after huge gradients, after clipping."""
    out = {}
    for name, settings in layouts.items():
        config = tiny({**UNEVEN, **settings})
        mesh = build_mesh(config.parallel, CPU)
        with torch.device("meta"):
            model = build_model(config.model)
        stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, torch.float32, 32)
        initialize(stages, config.model, CPU, config.run.seed)
        batch = step_batch(config, 1, ragged=True)
        rank_batch = Batch(*(x if x is None else x[mesh.data_rank :: mesh.data_size] for x in batch))
        OneStage(stages, config.parallel)([rank_batch], torch.tensor(1e-2))

        def whole() -> float:
            full = [g.full_tensor() for g in gradients(stages) if isinstance(g, DTensor)]  # noqa: B023
            return math.sqrt(sum(float(g.double().square().sum()) for g in full))

        result = {"norm": grad_norm(stages, CPU).item(), "expected": whole()}
        clip(stages, grad_norm(stages, CPU), 0.0)
        result["left"] = whole()
        clip(stages, grad_norm(stages, CPU), 2.0 * result["expected"])
        result["below"] = whole()
        clip(stages, grad_norm(stages, CPU), 0.25 * result["expected"])
        result["clipped"] = whole()
        result["parameters"] = float(len(list(gradients(stages))))
        for gradient in gradients(stages):
            gradient.mul_(1e30)
        result["huge"] = grad_norm(stages, CPU).item()
        out[name] = result
    return out


def test_norm_and_clipping_in_every_layout() -> None:
    by_rank = run(norms, 4, LAYOUTS)
    assert all(results == by_rank[0] for results in by_rank)  # bitwise the same on all ranks
    for name, results in by_rank[0].items():
        assert results["norm"] > 0
        # both float64 over the same numbers
        assert results["norm"] == pytest.approx(results["expected"], rel=1e-12), name
        assert results["left"] == results["below"] == results["expected"], name  # untouched to the bit
        # clipped in float32 to the norm / (norm + 1e-6)
        assert results["clipped"] == pytest.approx(0.25 * results["expected"], rel=1e-5), name
        assert results["huge"] == pytest.approx(0.25e30 * results["expected"], rel=1e-5), (
            name
        )  # its squares overflow float32
        config = tiny({**UNEVEN, **LAYOUTS[name]})
        assert results["parameters"] == len(list(build_model(config.model).parameters()))
    same = [by_rank[0][name]["norm"] for name in ("fsdp4", "dp4", "fsdp2xtp2", "fsdp2xtp2+sp", "tp4")]
    assert same == pytest.approx([same[0]] * 5, rel=1e-5)  # one model, one batch: rounding of the gradients


def three(*sizes: int) -> nn.Module:
    module = nn.Module()
    for index, size in enumerate(sizes):
        module.register_parameter(str(index), nn.Parameter(torch.zeros(size)))
    return module


def test_without_ranks_and_over_several_stages() -> None:
    stages = [three(1, 1), three(1)]
    for value, parameter in zip((2.0, 3.0, 6.0), (p for s in stages for p in s.parameters()), strict=True):
        parameter.grad = torch.tensor([value])
    assert grad_norm(stages, CPU).item() == 7.0
    clip(stages, grad_norm(stages, CPU), 3.5)
    assert [g.item() for g in gradients(stages)] == pytest.approx([1.0, 1.5, 3.0], rel=1e-6)


def test_tied_parameters_count_once_and_missing_gradients_not_at_all() -> None:
    module: Any = three(1, 4)
    module.again = getattr(module, "0")
    getattr(module, "0").grad = torch.tensor([3.0])
    assert grad_norm([module], CPU).item() == 3.0
    assert grad_norm([three(2)], CPU).item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad: float) -> None:
    module = three(2, 2)
    for parameter in module.parameters():
        parameter.grad = torch.ones(2)
    next(gradients([module]))[1] = bad
    assert not torch.isfinite(grad_norm([module], CPU))


def test_a_zero_gradient_stays_zero() -> None:
    module = three(3)
    next(module.parameters()).grad = torch.zeros(3)
    clip([module], grad_norm([module], CPU), 1.0)
    assert torch.equal(next(gradients([module])), torch.zeros(3))


def test_large_gradients_are_summed_in_float64() -> None:
    """Ten million equal numbers: a float32 sum on a CPU is off by 1e-4, a float64 one by 2e-11."""
    module = three(10_000_000)
    next(module.parameters()).grad = torch.full((10_000_000,), 0.1)
    assert grad_norm([module], CPU).item() == pytest.approx(math.sqrt(1e7) * float(torch.tensor(0.1)), rel=1e-9)
