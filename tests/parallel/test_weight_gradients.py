"""Weight gradients put off: every product once and in the right type; and that torch's own split is still no choice."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import torchllm.parallel.pipeline
from tests.parity import Settings, Trained, build, check, compare, my_batches, reference, tiny, train
from tests.workers import WorkerFailed, run
from torchllm.models.attention import ScaledDotProductAttention
from torchllm.models.decoder import build_model
from torchllm.parallel.pipeline import build_forward_backward
from torchllm.parallel.weight_gradients import WeightGradients

SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
PP2: Settings = {"parallel.pp": 2}


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_input_gradients_come_first_and_weights_when_asked(family: str) -> None:
    config = tiny({"model.family": family, "model.layers": 1})
    model, plain = build_model(config.model), build_model(config.model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    plain.load_state_dict(model.state_dict())
    store = WeightGradients(model)
    tokens = torch.randint(96, (2, 8))
    positions = torch.arange(8).expand(2, 8)
    for network in (model, plain):
        network(tokens, positions, None, tokens).backward()
    matrices = {n for n, p in plain.named_parameters() if p.dim() == 2 and "embed" not in n}
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == matrices
    first, second = store.take(), store.take()
    second()  # nothing: the first has them all
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == matrices
    first()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6, msg=name)
        assert mine.grad is not None
        assert not mine.grad.requires_grad, name  # else it remembers its operands
    first()  # each product once, and its operands are gone
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)


def count_calls(settings: Settings) -> int:
    """Attention forwards of one step on this rank."""
    config = tiny(settings)
    mesh, stages = build(config)
    step = build_forward_backward(stages, mesh, config.parallel, config.training, torch.float32)
    forward, calls = ScaledDotProductAttention.forward, []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return forward(*arguments)

    with mock.patch.object(ScaledDotProductAttention, "forward", counted):
        step(my_batches(config, mesh, 1, ragged=False), torch.tensor(1.0))
    return len(calls)


@pytest.mark.parametrize("schedule", ["1F1B", *SPLIT])
def test_recomputation_happens_once(schedule: str) -> None:
    """2 blocks on a rank, 8 micro batches, twice."""
    assert run(count_calls, 2, {**PP2, "parallel.schedule": schedule, "recompute.mode": "full"}) == [2 * 2 * 8] * 2


def sums_in_bfloat16(settings: Settings) -> tuple[str, float]:
    """The gradient's type and its error, relative to its largest element, of a layout that computes in bfloat16."""
    config = tiny(settings)
    mesh, stages = build(config, torch.bfloat16)
    step = build_forward_backward(stages, mesh, config.parallel, config.training, torch.bfloat16)
    layer = next(iter(stages[0].layers.values())).mlp.down_proj
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    add = torchllm.parallel.weight_gradients.add_product

    def spy(weight: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor) -> None:
        if weight is layer.weight:
            seen.append((x.float(), gradient.float()))
        add(weight, x, gradient)

    with mock.patch("torchllm.parallel.weight_gradients.add_product", spy):
        step(my_batches(config, mesh, 1, ragged=False), torch.tensor(1.0))
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    exact = torch.stack([(g.flatten(0, 1).t() @ x.flatten(0, 1)).to(torch.bfloat16).float() for x, g in seen]).sum(0)
    error = (gradient.full_tensor() - exact).abs().max() / exact.abs().max()
    return str(gradient.dtype), error.item()


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_products_are_summed_in_float32(schedule: str) -> None:
    """Each is bfloat16, good to 2^-9; the sum of 8 of them is exact to float32, or it was summed in bfloat16.

    FSDP sums what it finds at the next backward, so this takes a rank that does two products without one between.
    """
    settings = {**PP2, "parallel.schedule": schedule}
    for kind, error in run(sums_in_bfloat16, 2, settings):
        assert kind == "torch.float32"
        assert error < 1e-6


class TorchsOwn:
    """In place of `WeightGradients`: what PipelineStage does without a dw_builder."""

    take = None

    def __init__(self, stage: object) -> None:
        pass


def train_with_torchs_split(settings: Settings) -> Trained | None:
    pipeline = torchllm.parallel.pipeline
    with (
        mock.patch.object(pipeline, "WeightGradients", TorchsOwn),
        mock.patch.object(pipeline, "free_after_backward"),  # which torch does not do either
    ):
        return train(settings)


@pytest.mark.parametrize("schedule", SPLIT)
def test_torchs_own_split_still_loses_gradients(schedule: str) -> None:
    """If this fails, torch has mended it and `WeightGradients` may go."""
    settings = {**PP2, "parallel.dp_shard": 2, "parallel.schedule": schedule, "parallel.keep_last_block": False}
    check(settings)
    with pytest.raises(AssertionError, match=r"gradient differs|nothing there"):
        compare(run(train_with_torchs_split, 4, settings)[0], reference(settings))
    kept = {**settings, "parallel.zero_stage": 1}  # nothing is freed after the forward
    compare(run(train_with_torchs_split, 4, kept)[0], reference(kept))


@pytest.mark.parametrize("schedule", SPLIT)
def test_compiled_blocks_are_still_refused_by_torch(schedule: str) -> None:
    """If this fails, the config need not refuse compile.block with these schedules any more."""
    with pytest.raises(WorkerFailed, match="not supported with stage modules that have used"):
        check({**PP2, "parallel.schedule": schedule, "compile.block": True})
