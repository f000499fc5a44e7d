"""Mixture of experts: routing and layers against their formulas, one token at a time, in float64."""

import copy
import importlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_layers import filled, inputs
from torchllm.config import Model
from torchllm.models.experts import Experts, MixtureOfExperts, Router, top_experts
from torchllm.models.layers import silu_gated
from torchllm.models.router_penalties import penalty_names

pytestmark = pytest.mark.quick
MODEL = Model(layers=3, hidden=24, heads=4, ffn=40, vocab=32, experts=6, top_k=2, expert_ffn=16)
VARIANTS = {
    "Mixtral": MODEL,
    "OLMoE": replace(MODEL, router_renormalize=False, top_k=4),
    "GLM-4.5": replace(MODEL, router_score="sigmoid", router_scale=2.5, shared_experts=2),
    "Qwen3-Next": replace(MODEL, shared_experts=1, shared_gate=True),
    "one of six": replace(MODEL, top_k=1, router_renormalize=False),
    "all of six": replace(MODEL, top_k=6),
    "with a bias": replace(MODEL, router_score="sigmoid", router_bias=True),
    "softmax with a bias": replace(MODEL, router_bias=True),
    "DeepSeek-V3": replace(MODEL, router_score="sigmoid", router_bias=True, router_groups=3, router_top_groups=2),
}


MODULES = {"Mixtral": "mixtral", "Qwen3Moe": "qwen3_moe", "Olmoe": "olmoe", "Glm4Moe": "glm4_moe"}


def one_token(layer: MixtureOfExperts, model: Model, token: Tensor) -> Tensor:
    """Return what a layer, in float64, makes of one token: (D) -> (D)."""
    logits = layer.routed.router.weight @ token
    scores = torch.sigmoid(logits) if model.router_score == "sigmoid" else logits.softmax(-1)
    bias = layer.routed.router.bias
    preferences = scores if bias is None else scores + bias
    groups = preferences.detach().view(model.router_groups, -1)
    best_two = [sum(sorted(group, reverse=True)[:2]) for group in groups.tolist()]
    first = sorted(range(len(groups)), key=lambda group: -best_two[group])[: model.router_top_groups]
    allowed = [expert for expert in range(model.experts) if expert // groups.shape[1] in first]
    chosen = torch.tensor(sorted(allowed, key=lambda expert: -preferences[expert].item())[: model.top_k])
    weights = scores[chosen] / scores[chosen].sum() if model.router_renormalize else scores[chosen]
    result = torch.zeros_like(token)
    experts = layer.routed.experts
    for weight, index in zip(weights, chosen.tolist(), strict=True):
        gate = experts.gate_proj[index] @ token
        up = experts.up_proj[index] @ token
        result = result + model.router_scale * weight * (experts.down_proj[index] @ (F.silu(gate) * up))
    if layer.shared is None:
        return result
    gate, up, down = layer.shared.gate_proj.weight, layer.shared.up_proj.weight, layer.shared.down_proj.weight
    shared = down @ (F.silu(gate @ token) * (up @ token))
    if layer.shared.result_gate is not None:
        shared = torch.sigmoid(layer.shared.result_gate.weight @ token) * shared
    return result + shared


@pytest.mark.parametrize("name", VARIANTS)
def test_a_layer_and_its_gradients_are_the_formula(name: str) -> None:
    model = VARIANTS[name]
    layer = filled(MixtureOfExperts(model))
    assert isinstance(layer, MixtureOfExperts)
    if layer.routed.router.bias is not None:
        layer.routed.router.bias.copy_(inputs(6))  # of the size of the scores: other experts are chosen
    double = copy.deepcopy(layer).double()
    x = inputs(2, 5, 24)
    result = layer(x)
    expected = torch.stack([one_token(double, model, token) for token in x.double().flatten(0, 1)]).view_as(x)
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(result.double() / scale, expected / scale, rtol=0.0, atol=1e-6)

    d_out = inputs(2, 5, 24)
    result.backward(d_out)
    expected.backward(d_out.double())
    for (parameter_name, parameter), exact in zip(layer.named_parameters(), double.parameters(), strict=True):
        assert parameter.grad is not None, parameter_name
        assert exact.grad is not None
        largest = float(exact.grad.abs().max())
        if not largest:  # of a router whose one score is divided by itself
            continue
        torch.testing.assert_close(parameter.grad.double() / largest, exact.grad / largest, rtol=0.0, atol=2e-6)


ROUNDED_ONCE = 2**-9
"""most that a number under 1 changes when it becomes bfloat16"""
PUBLISHED_ROUTERS: dict[str, tuple[str, float, Model]] = {
    "Mixtral": ("compute", 0.0, MODEL),
    "Qwen3Moe": ("compute", ROUNDED_ONCE, MODEL),
    "Olmoe": ("compute", ROUNDED_ONCE, replace(MODEL, router_renormalize=False)),
    "Glm4Moe": ("float32", 0.0, replace(MODEL, router_score="sigmoid", router_bias=True)),
}
"""which router_dtype is that of transformers' class, and how it rounds the weights of the experts, as the docs say"""


@pytest.mark.parametrize("name", PUBLISHED_ROUTERS)
def test_each_published_class_runs_its_router_in_the_type_that_the_docs_say(name: str) -> None:
    own_type, rounding, model = PUBLISHED_ROUTERS[name]
    module = importlib.import_module(f"transformers.models.{MODULES[name]}.modeling_{MODULES[name]}")
    gate = getattr(module, f"{name}{'Topk' if name == 'Glm4Moe' else 'TopK'}Router")(
        SimpleNamespace(
            **{"hidden_size": 24, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6},
            **{"num_experts_per_tok": 2, "norm_topk_prob": model.router_renormalize, "routed_scaling_factor": 1.0},
            **{"n_group": 1, "topk_group": 1},
        )
    )
    gate = gate.bfloat16()
    tokens = inputs(1, 200, 24).bfloat16()
    with torch.no_grad():
        gate.weight.copy_(inputs(6, 24))
        logits, scores, chosen = gate(tokens)
    expected = torch.zeros(200, 6).scatter(1, chosen, scores.float())
    errors = {}
    for router_dtype in ("float32", "compute"):
        router = Router(replace(model, router_dtype=router_dtype))  # type: ignore[arg-type]
        with torch.no_grad():
            router.weight.copy_(gate.weight)
            routing = router(tokens)
        assert routing.weights.dtype == torch.float32
        weights = torch.zeros(200, 6).scatter(1, routing.experts, routing.weights)
        errors[router_dtype] = float((weights - expected).abs().max())
    other_type = "compute" if own_type == "float32" else "float32"
    assert logits.dtype == (torch.float32 if own_type == "float32" else torch.bfloat16)
    assert errors[own_type] < rounding + 1e-6
    assert errors[other_type] > rounding + 5e-4


def test_groups_are_chosen_before_experts_as_in_transformers() -> None:
    """Among tokens whose best experts are in more groups than the router allows."""
    model = replace(MODEL, experts=16, top_k=4, router_score="sigmoid", router_bias=True, router_scale=2.5)
    model = replace(model, router_groups=4, router_top_groups=2)
    module = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    gate = module.DeepseekV3TopkRouter(
        SimpleNamespace(
            **{"hidden_size": 24, "num_local_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True},
            **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        )
    )
    router, tokens = Router(model), inputs(1, 200, 24)
    with torch.no_grad():
        for parameter, own in ((gate.weight, router.weight), (gate.e_score_correction_bias, router.bias)):
            own.copy_(parameter.copy_(inputs(*parameter.shape)))
        _, weights, experts = gate(tokens)
        routing = router(tokens)
        unlimited = Router(replace(model, router_groups=1))
        unlimited.weight.copy_(router.weight)
        unlimited.bias.copy_(router.bias)
        elsewhere = unlimited(tokens)
    expected, found, without = (
        torch.zeros(200, 16).scatter(1, chosen, of_experts)
        for chosen, of_experts in ((experts, weights), (routing.experts, routing.weights), tuple(elsewhere))
    )
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)
    limited = ((without > 0) != (expected > 0)).any(-1)
    assert limited.sum() > 50


def test_a_token_without_any_score_gets_no_expert_instead_of_nan() -> None:
    router = Router(replace(MODEL, router_score="sigmoid"))
    with torch.no_grad():
        router.weight.fill_(-1.0)
        weights = router(torch.full((1, 1, 24), 100.0)).weights
    assert torch.equal(weights, torch.zeros(1, 2))


def test_the_largest_scores_come_in_the_order_of_a_stable_sort() -> None:
    """Of scores with many ties, of both signs; float64 scores take the sort itself."""
    scores = inputs(50, 64)
    scores[0] = 0.0
    scores[0, 3] = -0.0
    scores[1, 5], scores[1, 6] = math.inf, -math.inf
    for ties in (scores, (4 * scores).round() / 4, -scores, scores.softmax(-1)):
        expected = ties.sort(dim=-1, descending=True, stable=True).indices[:, :8]
        assert torch.equal(top_experts(ties, 8), expected)
        assert torch.equal(top_experts(ties.double(), 8), expected)


def test_under_autocast_experts_are_bfloat16_and_the_router_is_float32() -> None:
    """As recipes/minimal.py computes, and as FSDP's mixed precision does elsewhere."""
    layer = filled(MixtureOfExperts(replace(MODEL, shared_experts=1)))
    x = inputs(2, 5, 24).requires_grad_()
    exact = layer.routed.router(x)
    types = []

    def noting_gated(gate: Tensor, up: Tensor) -> Tensor:
        types.append(gate.dtype)
        return silu_gated(gate, up)

    layer.routed.experts.gated = noting_gated
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        routing = layer.routed.router(x)
        result = layer(x)
    assert torch.equal(routing.experts, exact.experts)
    assert torch.equal(routing.weights, exact.weights)
    assert types == [torch.float32, torch.bfloat16]
    assert result.dtype == torch.bfloat16
    assert 0.0 < (result - expected).abs().max() < 0.02 * expected.abs().max()
    result.sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def test_tokens_are_counted_in_the_backward_pass_alone() -> None:
    router = Router(MODEL)
    torch.nn.init.zeros_(router.weight)
    with torch.no_grad():
        router(inputs(1, 3, 24))
    first, second = router(inputs(1, 3, 24)), router(inputs(2, 3, 24))
    assert router.take_sums() is None
    for routing in (first, second):
        routing.weights.sum().backward()
    sums = router.take_sums()
    assert sums is not None
    assert sums.tolist() == pytest.approx([9, 9, 0, 0, 0, 0, 9 * math.log(6)])  # nine tokens, all scores equal
    assert router.take_sums() is None


PENALTIES: dict[str, Model] = {
    "sequence": replace(MODEL, balance_loss="sequence", balance_weight=0.3),
    "sequence, sigmoid": replace(MODEL, balance_loss="sequence", balance_weight=0.3, router_score="sigmoid", top_k=4),
    "global": replace(MODEL, balance_loss="global", balance_weight=0.3),
    "global, sigmoid, bias": replace(
        MODEL, balance_loss="global", balance_weight=0.3, router_score="sigmoid", router_bias=True
    ),
    "z-loss": replace(MODEL, router_z_loss=0.1),
    "both": replace(MODEL, balance_loss="sequence", balance_weight=0.3, router_z_loss=0.1, router_score="sigmoid"),
}


def written_penalties(model: Model, router: Router, logits: Tensor, experts: Tensor) -> Tensor:
    """Return the penalties of two whole sequences as the papers write them, with loops: logits (2, S, E) -> ()."""
    sequences, length, count = logits.shape
    scores = torch.sigmoid(logits) if model.router_score == "sigmoid" else logits.softmax(-1)
    probability = scores / scores.sum(-1, keepdim=True)
    total = torch.zeros((), dtype=torch.float64)
    for sequence in range(sequences):
        for expert in range(count):
            used = int((experts[sequence] == expert).sum())
            if model.balance_loss == "sequence":  # DeepSeek-V3, equations 17 to 20
                f = count / (model.top_k * length) * used
                total = total + model.balance_weight * f * probability[sequence, :, expert].mean() / sequences
            elif model.balance_loss == "global":
                assert router.last_shares is not None
                f = count * float(router.last_shares[expert])
                total = total + model.balance_weight * f * probability[sequence, :, expert].mean() / sequences
    z = torch.log(torch.exp(logits).sum(-1))
    return total + model.router_z_loss * (z * z).mean()


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_and_their_gradients_are_the_formulas(name: str) -> None:
    model = PENALTIES[name]
    router = filled(Router(model))
    assert isinstance(router, Router)
    router.tokens_per_step = 2 * 7
    router.last_shares = inputs(6).softmax(-1)
    if router.bias is not None:
        router.bias.copy_(inputs(6))
    x = inputs(2, 7, 24)
    routing = router(x)
    (0.0 * routing.weights).sum().backward()  # nothing of the loss, so what is left is the penalties'
    weight = router.weight.detach().double().requires_grad_()
    logits = x.double() @ weight.T
    expected = written_penalties(model, router, logits, routing.experts.view(2, 7, -1))
    expected.backward()
    assert weight.grad is not None
    assert router.weight.grad is not None
    scale = float(weight.grad.abs().max())
    torch.testing.assert_close(router.weight.grad.double() / scale, weight.grad / scale, rtol=0.0, atol=2e-6)
    sums = router.take_sums()
    assert sums is not None
    assert len(sums) == 7 + len(penalty_names(model))
    assert float(sums[7:].sum()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_experts_are_as_wide_as_dense_layers_by_default() -> None:
    assert Experts(replace(MODEL, expert_ffn=0)).down_proj.shape == (6, 24, 40)
