"""Deferred weight gradients: each is computed once and in the right type; torch's own split still loses gradients."""

from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import torchllm.parallel.pipeline
from tests.parity import Settings, Trained, Trainer, check, compare, reference, tiny, train
from tests.workers import WorkerFailed, run
from torchllm.models.attention import ScaledDotProductAttention
from torchllm.models.decoder import build_model
from torchllm.parallel.weight_gradients import DeferredProduct, WeightGradients

SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
PP2: Settings = {"parallel.pp": 2}


class Deferred(NamedTuple):
    """A model after a backward whose weight gradients wait in a store, and one after a plain backward."""

    model: nn.Module
    plain: nn.Module
    store: WeightGradients


def one_backward(settings: Settings) -> Deferred:
    config = tiny({"model.layers": 1, **settings})
    model, plain = build_model(config.model), build_model(config.model)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    plain.load_state_dict(model.state_dict())
    store = WeightGradients(model)
    tokens = torch.randint(96, (2, 8))
    for network in (model, plain):
        network(tokens, torch.arange(8).expand(2, 8), None, tokens).backward()
    return Deferred(model, plain, store)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_input_gradients_come_first_and_weights_when_asked(family: str) -> None:
    model, plain, store = one_backward({"model.family": family})
    matrices = {n for n, p in plain.named_parameters() if p.dim() == 2 and "embed" not in n}
    assert without_gradient(model) == matrices
    first, second = store.take(), store.take()
    second()  # computes nothing: the first took every product
    assert without_gradient(model) == matrices
    first()
    check_gradients(model, plain)
    first()  # computes nothing more: each product is computed once
    check_gradients(model, plain)


def test_gradients_of_routers_and_routed_experts_are_not_deferred() -> None:
    """Those of attention, of the shared expert and of the head are: the trace says so, matrix by matrix."""
    model, plain, store = one_backward({"model.experts": 4, "model.top_k": 2, "model.shared_experts": 1})
    attention = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
    shared = {f"layers.0.mlp.shared.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert without_gradient(model) == attention | shared | {"lm_head.weight"}
    store.take()()
    check_gradients(model, plain)


def without_gradient(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.grad is None}


def check_gradients(model: nn.Module, expected: nn.Module) -> None:
    for (name, parameter), other_parameter in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other_parameter.grad, rtol=1e-6, atol=1e-6, msg=name)
        assert parameter.grad is not None
        assert not parameter.grad.requires_grad, name  # its graph would keep the operands alive


def count_calls(settings: Settings) -> int:
    trainer = Trainer(tiny(settings))
    forward = ScaledDotProductAttention.forward
    with mock.patch.object(ScaledDotProductAttention, "forward", autospec=True, side_effect=forward) as calls:
        trainer.forward_backward(trainer.batches(1), torch.tensor(1.0))
    return calls.call_count


def test_recomputation_happens_once() -> None:
    """2 blocks per rank, 8 micro batches, each computed twice."""
    settings = {**PP2, "parallel.schedule": "ZBVZeroBubble", "recompute.mode": "full"}
    assert run(count_calls, 2, settings) == [2 * 8 * 2, 2 * 8 * 2]


def sums_in_bfloat16(settings: Settings) -> tuple[str, float]:
    """Return the type of a gradient of a layout that computes in bfloat16, and its relative error."""
    trainer = Trainer(tiny(settings), torch.bfloat16)
    layer = next(iter(trainer.stages[0].layers.values())).mlp.down_proj
    products: list[torch.Tensor] = []
    compute_product = torchllm.parallel.weight_gradients.compute_product

    def record(product: DeferredProduct) -> torch.Tensor:
        result = compute_product(product)  # bfloat16, rounded as this CPU does it
        if product.weight is layer.weight:
            products.append(result.float())
        return result

    with mock.patch("torchllm.parallel.weight_gradients.compute_product", record):
        trainer.forward_backward(trainer.batches(1), torch.tensor(1.0))
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    exact = torch.stack(products).sum(0)
    error = (gradient.full_tensor() - exact).abs().max() / exact.abs().max()
    return str(gradient.dtype), error.item()


def test_products_are_summed_in_float32() -> None:
    """Each product is bfloat16; the sum of 8 of them is exact to float32, unless it was summed in bfloat16.

    Between backwards nobody but this library adds them up, so the test needs a rank that computes two in a row.
    """
    settings = {**PP2, "parallel.schedule": "ZBVZeroBubble"}
    for kind, error in run(sums_in_bfloat16, 2, settings):
        assert kind == "torch.float32"
        assert error < 1e-6


class TorchsOwn:
    """Replaces `WeightGradients`: PipelineStage without a dw_builder splits the backward itself."""

    take = None

    def __init__(self, stage: object) -> None:
        pass


def train_with_torchs_split(settings: Settings) -> Trained | None:
    pipeline = torchllm.parallel.pipeline
    with (
        mock.patch.object(pipeline, "WeightGradients", TorchsOwn),
        mock.patch.object(pipeline, "free_after_backward"),  # torch does not do that either
    ):
        return train(settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SPLIT)
def test_torchs_own_split_still_loses_gradients(schedule: str) -> None:
    """If this fails, torch has fixed it and `WeightGradients` can be removed."""
    settings = {**PP2, "parallel.dp_shard": 2, "parallel.schedule": schedule, "parallel.zero_stage": 3}
    settings["parallel.keep_last_block"] = False
    check(settings)
    with pytest.raises(AssertionError, match=r"gradient differs|nothing there"):
        compare(run(train_with_torchs_split, 4, settings)[0], reference(settings))
    settings["parallel.zero_stage"] = 1  # nothing is freed after the forward
    compare(run(train_with_torchs_split, 4, settings)[0], reference(settings))


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SPLIT)
def test_compiled_blocks_are_still_refused_by_torch(schedule: str) -> None:
    """If this fails, the config need not refuse compile.block with these schedules any more."""
    with pytest.raises(WorkerFailed, match="not supported with stage modules that have used"):
        check({**PP2, "parallel.schedule": schedule, "compile.block": True})
