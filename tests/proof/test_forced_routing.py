"""Routers that take the choices of another process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import workers
from tests.models.test_layers import filled, inputs
from tests.proof.test_prove import MIXTURE, OPTIONS, PRETRAIN, technique
from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.models.experts import MixtureOfExperts
from torchllm.proof.forced_routing import ChoiceRecord, force_choices
from torchllm.proof.prove import Prover

MODEL = Model(layers=1, hidden=24, heads=4, ffn=40, vocab=32, experts=6, top_k=2, expert_ffn=16)


def test_a_token_has_the_recorded_experts_and_weights_of_the_router_itself() -> None:
    layer, other = filled(MixtureOfExperts(MODEL)), filled(MixtureOfExperts(MODEL))
    record = ChoiceRecord([layer])
    tokens = inputs(2, 40, 24)
    layer(tokens)
    choices = record.choices()
    with torch.no_grad():
        other.routed.router.weight.neg_()  # would choose the worst
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    moved = (tokens + 0.01 * torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1))).flatten(0, 1)
    part = moved[order[:30]].unsqueeze(0)
    expected = layer.routed.router(tokens).experts[order[:30]]
    assert not torch.equal(other.routed.router(part).experts, expected)
    force_choices([other], choices)
    routing = other.routed.router(part)
    assert torch.equal(routing.experts, expected)
    scores = torch.softmax(part[0] @ other.routed.router.weight.T, -1).gather(-1, expected)
    torch.testing.assert_close(routing.weights, scores / scores.sum(-1, keepdim=True))


def test_an_evaluation_after_the_bias_has_moved_has_choices_of_its_own() -> None:
    layer = filled(MixtureOfExperts(replace(MODEL, router_bias=True)))
    router = layer.routed.router
    record = ChoiceRecord([layer])
    tokens = inputs(1, 40, 24)
    trained = router(tokens).experts
    assert router.bias is not None
    router.bias += torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0])  # more than any score
    with torch.no_grad():
        evaluated = router(tokens).experts
    force_choices([layer], record.choices())
    assert torch.equal(router(tokens).experts, trained)
    with torch.no_grad():
        assert torch.equal(router(tokens).experts, evaluated)
    assert not torch.equal(trained, evaluated)


def test_a_token_that_is_not_recorded_is_an_error() -> None:
    layer = filled(MixtureOfExperts(MODEL))
    record = ChoiceRecord([layer])
    layer(inputs(2, 40, 24))
    force_choices([layer], record.choices())
    with pytest.raises(UserError, match=r"routed\.router: gets a token that one process in float32 does not have"):
        layer(-inputs(1, 3, 24))


def test_experts_are_proven_in_bfloat16(tmp_path: Path) -> None:
    prover = Prover(PRETRAIN, MIXTURE, OPTIONS._replace(dtype="bfloat16"), tmp_path, workers.POOL)
    for name in ("tp=2", "dp_shard=2 ep=2"):
        layout = prover.layout_with(technique(name))
        assert layout is not None
        result = prover.prove(layout)
        assert result.is_right, result.agreement.findings
        assert 1e-3 < result.agreement.error < 1e-1
