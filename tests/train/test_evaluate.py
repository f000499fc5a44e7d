"""Validation loss: the token-weighted mean over all ranks and batches, and nothing left behind."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.parity import Settings, step_batch, tiny
from tests.workers import run
from torchllm.config import Config
from torchllm.data.batch import Batch
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.context import shard_sequence
from torchllm.parallel.initialize import initialize
from torchllm.parallel.mesh import build_mesh
from torchllm.parallel.parallelize import parallelize
from torchllm.parallel.pipeline import OneStage, build_forward_backward
from torchllm.train.evaluate import evaluate

CPU = torch.device("cpu")
SMALL: Settings = {"model.layers": 2, "data.document_mask": True}
LAYOUTS: dict[str, Settings] = {
    "fsdp2": {"parallel.dp_shard": 2},
    "zero1": {"parallel.dp_shard": 2, "parallel.zero_stage": 1},
    "tp2+sp": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "pp2": {"parallel.pp": 2},
    "pp2, zero bubble": {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", "model.layers": 4},
    "cp2": {"parallel.cp": 2},
}


def parts(batch: Batch, rank: int, size: int) -> list[Batch]:
    """A rank's sequences, one a batch."""
    return [Batch(*(x if x is None else x[i : i + 1] for x in batch)) for i in range(rank, len(batch.tokens), size)]


def plain(config: Config) -> Decoder:
    with torch.device("meta"):
        model = build_model(config.model)
    initialize([model], config.model, CPU, config.run.seed)
    return model


def expected_loss(config: Config) -> float:
    """float64, token by token."""
    batch = step_batch(config, 1, ragged=True)
    with torch.no_grad():
        logits = plain(config)(batch.tokens, batch.positions, batch.document_ids).double()
    losses = [
        float(-row.log_softmax(0)[label])
        for row, label in zip(logits.flatten(0, 1), batch.labels.flatten().tolist(), strict=True)
        if label != -100
    ]
    return math.fsum(losses) / len(losses)


def test_one_process_takes_the_mean_over_tokens_not_over_batches() -> None:
    config = tiny(SMALL)
    batches = parts(step_batch(config, 1, ragged=True), 0, 1)
    assert (batches[0].labels == -100).all()  # a batch without any target
    model = plain(config)
    assert evaluate(OneStage([model], config.parallel), batches, CPU) == pytest.approx(expected_loss(config), rel=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def evaluate_sharded(layouts: dict[str, Settings]) -> dict[str, tuple[float, bool, bool]]:
    """By layout: the loss, whether parameters are sharded again, and whether a step afterwards gets its gradients."""
    out: dict[str, Any] = {}
    for name, settings in layouts.items():
        config = tiny({**SMALL, "model.layers": 4, **settings})
        mesh = build_mesh(config.parallel, CPU)
        with torch.device("meta"):
            model = build_model(config.model)
        stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, torch.float32, 32)
        initialize(stages, config.model, CPU, config.run.seed)
        batches = parts(step_batch(config, 1, ragged=True), mesh.data_rank, mesh.data_size)
        local = [shard_sequence(batch, mesh) for batch in batches]
        step = build_forward_backward(stages, mesh, config.parallel, config.training, torch.float32)

        def trained() -> list[torch.Tensor]:
            for parameter in stages[0].parameters():  # noqa: B023
                parameter.grad = None
            step(local, torch.tensor(1e-2))  # noqa: B023
            return [p.grad.to_local().clone() for p in stages[0].parameters() if isinstance(p.grad, DTensor)]  # noqa: B023

        expected = trained()
        loss = evaluate(step, batches, CPU, mesh)
        sharded = all(isinstance(parameter, DTensor) for parameter in stages[0].parameters())
        out[name] = loss, sharded, all(map(torch.equal, expected, trained())) and len(expected) > 0
    dist.barrier()
    return out


def test_every_layout_evaluates_the_same_model_and_trains_on() -> None:
    by_rank = run(evaluate_sharded, 2, LAYOUTS)
    expected = expected_loss(tiny({**SMALL, "model.layers": 4}))
    for results in by_rank:
        for name, (loss, sharded, same) in results.items():
            assert loss == pytest.approx(expected, rel=1e-6), name
            assert sharded, name  # what FSDP gathers in a forward without a backward is no parameter
            assert same, name
