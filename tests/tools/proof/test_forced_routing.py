"""Routers that take the choices of another process."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.models.test_layers import filled, inputs
from tests.tools.proof.forks import Change, write_fork
from tests.tools.proof.test_prove import MIXTURE, OPTIONS, PRETRAIN, proven
from torchllm.config import Config, Model, Run
from torchllm.config.errors import UserError
from torchllm.models.experts import MixtureOfExperts
from torchllm.tools.proof import prove
from torchllm.tools.proof.forced_routing import (
    ChoiceRecord,
    Choices,
    RouterUse,
    force_choices,
    gap,
    least_distance,
    told_apart,
)

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


def test_a_gap_between_groups_counts_and_one_of_experts_outside_does_not() -> None:
    model = replace(MODEL, router_bias=True, router_groups=3, router_top_groups=2, top_k=3)
    router = filled(MixtureOfExperts(model)).routed.router
    router.score = lambda logits: logits
    x = torch.eye(24)[:1].unsqueeze(0)
    with torch.no_grad():
        router.weight[:, 0] = torch.tensor([9.0, 1.0, 5.0, 4.2, 7.0, 2.0])  # groups 10, 9.2, 9; 9, 5, 4.2 are chosen
        deviation = router.weight.detach()[:, 0].std()
        assert gap(router, x) == pytest.approx(float(0.2 / deviation))
        router.weight[4, 0] = 0.0  # its group is 2: 4.2 and 1 are left
        deviation = router.weight.detach()[:, 0].std()
        assert gap(router, x) == pytest.approx(float(3.2 / deviation))


def test_the_gap_is_that_of_the_last_expert_chosen_and_the_first_that_is_not() -> None:
    router = filled(MixtureOfExperts(replace(MODEL, router_bias=True))).routed.router
    router.score = lambda logits: logits
    x = torch.eye(24)[:2].unsqueeze(0)  # the scores of a token are a column of the weights
    with torch.no_grad():
        router.weight[:, 0] = torch.tensor([0.0, 5.0, 2.0, 1.5, -3.0, 1.0])
        router.weight[:, 1] = torch.tensor([9.0, 9.1, 0.0, 1.0, 2.0, 3.0])  # 9 and 9.1 are both chosen
    deviation = router.weight.detach()[:, :2].std()
    assert gap(router, x) == pytest.approx(float(0.5 / deviation))
    assert router.bias is not None
    router.bias[3] += 0.4  # 2 and 1.9
    with_bias = router.weight.detach()[:, :2] + router.bias.unsqueeze(1)
    assert gap(router, x) == pytest.approx(float(0.1 / with_bias.std()), rel=1e-4)
    router.top_k = 6
    assert gap(router, x) == math.inf


def test_the_smallest_gap_of_all_passes_and_routers_is_recorded() -> None:
    layers = nn.ModuleList([filled(MixtureOfExperts(MODEL)), filled(MixtureOfExperts(replace(MODEL, top_k=4)))])
    record = ChoiceRecord([layers])
    assert record.smallest_gap == math.inf
    gaps = []
    for sequences in (1, 3, 2):
        for layer in layers:
            tokens = inputs(sequences, 40, 24)
            layer(tokens)
            gaps.append(gap(layer.routed.router, tokens))
    assert record.smallest_gap == min(gaps) < min(gaps[0], gaps[1], gaps[-1])


UNDECIDED = """
def change(stages):
    if torch.initial_seed() in SEEDS:
        for stage in stages:
            for name, module in stage.named_modules():
                if name.endswith(".router"):
                    module.register_forward_pre_hook(lambda router, inputs: (0.0 * inputs[0],))
"""
"""a fork with whose seeds all experts are equally good for all tokens"""


@pytest.mark.exhaustive
def test_in_float32_the_next_seed_is_taken_where_a_choice_hangs_on_last_digits(tmp_path: Path) -> None:
    fork = write_fork(tmp_path / "fork.py", Change(UNDECIDED.replace("SEEDS", "(0, 1)")))
    result = proven(fork, "dp_shard=2", tmp_path, MIXTURE)
    assert result.is_right, result.agreement.findings
    assert result.config.run.seed == 2


def test_experts_whose_choice_hangs_on_last_digits_with_every_seed_are_not_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "SEEDS", 2)
    fork = write_fork(tmp_path / "fork.py", Change(UNDECIDED.replace("SEEDS", "range(30)")))
    with pytest.raises(UserError, match=r"^--dtype: in float32 a token .* with each of 2 seeds: take bfloat16"):
        proven(fork, "tp=2", tmp_path, MIXTURE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dp_shard=2 ep=2", "tp=2"])
def test_experts_are_proven_in_bfloat16(name: str, tmp_path: Path) -> None:
    result = proven(PRETRAIN, name, tmp_path, MIXTURE, OPTIONS._replace(dtype="bfloat16"))
    assert result.is_right, result.agreement.findings
    assert 1e-3 < result.agreement.error < 1e-1


def test_a_seed_is_taken_whose_tokens_can_be_told_apart_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(40, 24, generator=generator)
    copies = torch.cat([tokens, tokens + 1e-3 * torch.randn(40, 24, generator=generator)])
    same = torch.arange(40).repeat(2)[:, None] % 6
    use = RouterUse("router", trains=True)
    choices = {
        0: {use: Choices(copies, torch.arange(80)[:, None] % 6)},  # a token and its copy have different experts
        1: {use: Choices(copies, same)},
        2: {},
    }
    assert least_distance(choices[0]) == pytest.approx(1e-3, rel=0.5)
    assert 0.3 < least_distance(choices[1]) < least_distance(choices[2]) == math.inf

    def taken(*seeds: int) -> int:
        configs = [Config(run=Run(seed=seed)) for seed in seeds]
        return told_apart(configs, lambda config: choices[config.run.seed]).run.seed

    assert (taken(0, 1, 2), taken(1, 0), taken(0), taken(2, 1)) == (1, 1, 0, 2)


def test_a_token_that_is_no_number_is_none_of_those_recorded() -> None:
    layer, tokens = filled(MixtureOfExperts(MODEL)), inputs(2, 40, 24)
    record = ChoiceRecord([layer])
    for x in (tokens, tokens * math.nan, tokens):
        layer(x)
    assert math.isnan(record.smallest_gap)
    other, right = filled(MixtureOfExperts(MODEL)), ChoiceRecord([layer])
    layer(tokens)
    force_choices([other], right.choices())
    with pytest.raises(UserError, match="gets a token that one process in float32 does not have"):
        other.routed.router(tokens * math.nan)
