"""The fused, shard-wise, skippable optimizers against torch's plain ones, on plain and on FSDP parameters."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.parity import build, whole
from tests.workers import run
from torchllm.config import Config, Model, Optimizer, Parallel
from torchllm.facts.parameters import canonical_name
from torchllm.models.decoder import Decoder, build_model
from torchllm.optim.optimizer import apply_if_finite, build_optimizer
from torchllm.parallel.initialize import initialize
from torchllm.runtime.torch_compat import local_region

CPU = torch.device("cpu")
# k and v have 2 rows: over 4 ranks some hold nothing of them
MODEL = Model(
    family="gpt", layers=1, hidden=12, heads=2, kv_heads=1, head_dim=2, ffn=9, vocab=13, max_sequence_length=5
)
OPTIMIZERS = {
    "adamw": Optimizer(learning_rate=0.1, weight_decay=0.3),
    "adamw-offload": Optimizer(learning_rate=0.1, weight_decay=0.3, offload=True),
    "adamw-no-beta1": Optimizer(learning_rate=0.1, beta1=0.0, weight_decay=0.3),
    "sgd": Optimizer(name="sgd", learning_rate=0.1, weight_decay=0.3),
    "sgd-momentum": Optimizer(name="sgd", learning_rate=0.1, momentum=0.8, weight_decay=0.3),
}
MUON = Optimizer(name="muon", learning_rate=0.1, weight_decay=0.3)
DENSE = Model(layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=128, vocab=13)
"""rows of all its matrices are blocks of 32"""
RATES = [0.1, 0.05, 0.1, 0.02, 0.08]
SKIPPED = 2  # index of a step that is not finite
DECAYED = ("embed_tokens.weight", "lm_head.weight", "_proj.weight")


def plain(model: Model = MODEL, weights_dtype: Literal["float32", "bfloat16"] = "float32") -> Decoder:
    with torch.device("meta"):
        decoder = build_model(model, weights_dtype=weights_dtype)
    initialize([decoder], model, CPU, seed=0)
    return decoder


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """The whole gradient of a parameter at a step: the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    return torch.randn(shape, generator=generator)


def give_gradients(stages: Iterable[nn.Module], step: int, factor: float = 1.0) -> None:
    """Give every parameter this rank's part of a gradient that no layout changes."""
    for stage in stages:
        for name, parameter in stage.named_parameters():
            values = (gradient(canonical_name(name), parameter.shape, step) * factor).to(parameter.dtype)
            parameter.grad = shard_like(parameter, values) if isinstance(parameter, DTensor) else values


def take_steps(stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(stages, step)
        apply_if_finite(optimizer, 0.1, torch.tensor(True))


def shard_like(parameter: DTensor, values: Tensor) -> DTensor:
    """Return a tensor cut among the ranks as the parameter is, from the whole of it."""
    part = values
    shape, offset = local_region(parameter)
    for dimension, (first, length) in enumerate(zip(offset, shape, strict=True)):
        part = part.narrow(dimension, first, length)
    return DTensor.from_local(
        part.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def expected_parameters(settings: Optimizer) -> dict[str, Tensor]:
    """torch's plain optimizer, with the step that is not finite skipped by hand."""
    model = plain()
    named = dict(model.named_parameters())
    decayed = []
    undecayed = []
    for name, parameter in named.items():
        group = decayed if name.endswith(DECAYED) else undecayed
        group.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    torchs: torch.optim.Optimizer
    if settings.name == "adamw":
        betas = (settings.beta1, settings.beta2)
        torchs = torch.optim.AdamW(groups, betas=betas, eps=settings.epsilon, foreach=False, fused=False)
    else:
        torchs = torch.optim.SGD(groups, momentum=settings.momentum, foreach=False, fused=False)
    for step, rate in enumerate(RATES):
        if step != SKIPPED:
            give_gradients([model], step)
            for parameter_group in torchs.param_groups:
                parameter_group["lr"] = rate
            torchs.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Everything that a step may change, as bytes: weights, buffers, moments, counters."""
    tensors = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for name in sorted(state):
            tensors.append(state[name])
    contents = []
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        contents.append(local.detach().flatten().view(torch.uint8).numpy().tobytes())
    return contents


def train(stages: Sequence[nn.Module], settings: Optimizer) -> torch.optim.Optimizer:
    """Take all steps with the library, one of them not finite: it must change no bit."""
    optimizer = build_optimizer(stages, settings)
    for step, rate in enumerate(RATES):
        skipped = step == SKIPPED
        give_gradients(stages, step, math.nan if skipped else 1.0)
        initial_bits = [bits(stage, optimizer) for stage in stages]
        apply_if_finite(optimizer, rate, torch.tensor(not skipped))
        assert ([bits(stage, optimizer) for stage in stages] == initial_bits) == skipped, step
    return optimizer


def trained(ranks: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the whole parameters after all steps, by optimizer and name."""
    of_optimizers = {}
    for name in names:
        _, (stage,) = build(Config(model=MODEL, parallel=Parallel(dp_shard=ranks)))
        optimizer = train([stage], OPTIMIZERS[name])
        if OPTIMIZERS[name].name == "adamw":
            assert {float(state["step"]) for state in optimizer.state.values()} == {len(RATES) - 1}
        of_optimizers[name] = {parameter: whole(value) for parameter, value in stage.named_parameters()}
    return of_optimizers


@pytest.mark.parametrize("ranks", [1, 4])
def test_parameters_are_those_of_torch(ranks: int) -> None:
    """One rank has plain parameters, the others shards."""
    parameters = run(trained, ranks, ranks, list(OPTIMIZERS))[0]
    for name, settings in OPTIMIZERS.items():
        for parameter, value in expected_parameters(settings).items():
            got = torch.from_numpy(parameters[name][parameter])
            # five updates of size 0.1 at most, each good to float32's 6e-8 a few times over
            torch.testing.assert_close(got, value, rtol=1e-6, atol=1e-6, msg=f"{name} {parameter}")


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_a_step_that_is_not_finite_changes_no_bit_of_rounded_moments(state_dtype: Any) -> None:
    """With a momentum that is rounded: tests/optim/test_rounded_muon.py."""
    train([plain(DENSE)], replace(OPTIMIZERS["adamw"], state_dtype=state_dtype))


def test_state_exists_from_the_start_and_weights_are_untouched() -> None:
    entries = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "sgd": set(), "sgd-momentum": {"momentum_buffer"}}
    for name, expected in entries.items():
        model, untouched = plain(), plain()
        optimizer = build_optimizer([model], OPTIMIZERS[name])
        for parameter, value in zip(model.parameters(), untouched.parameters(), strict=True):
            assert torch.equal(parameter.view(torch.int32), value.view(torch.int32))  # -0.0 is not 0.0 here
            assert parameter.grad is None
            state = optimizer.state[parameter]
            assert state.keys() == expected
            assert not any(tensor.any() for tensor in state.values())


def test_a_loop_of_a_fork_may_take_the_step_itself() -> None:
    for settings in (*OPTIMIZERS.values(), MUON):
        itself, by_library = plain(), plain()
        for model in (itself, by_library):
            give_gradients([model], 0)
        build_optimizer([itself], settings).step()
        apply_if_finite(build_optimizer([by_library], settings), settings.learning_rate, torch.tensor(True))
        for weight, expected in zip(itself.parameters(), by_library.parameters(), strict=True):
            assert torch.equal(weight, expected)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "muon"])
def test_a_group_that_a_fork_adds_trains_like_the_others(name: str) -> None:
    """With the weight decay of the config, unless it has another."""
    settings = OPTIMIZERS.get(name, MUON)
    results = []
    for is_late in (False, True):
        model = plain()
        matrix = dict(model.named_parameters())["layers.0.self_attn.o_proj.weight"].requires_grad_(not is_late)
        optimizer = build_optimizer([model], settings)
        if is_late:
            group = {"params": [matrix.requires_grad_()], "orthogonalized": name == "muon"}
            optimizer.add_param_group(group)
            assert optimizer.state[matrix].keys() == results[0][0]  # from the start
        for step, rate in enumerate(RATES):
            give_gradients([model], step)
            apply_if_finite(optimizer, rate, torch.tensor(True))
        results.append((optimizer.state[matrix].keys(), bits(model, optimizer)))
    assert results[0] == results[1]


ROLES = Optimizer(
    learning_rate=0.5,
    weight_decay=0.25,
    embedding_rate=0.5,
    embedding_decay=2.0,
    head_rate=0.25,
    head_decay=0.5,
    vector_rate=3.0,
    vector_decay=0.125,
)
SPARSE = Model(layers=1, hidden=8, heads=2, kv_heads=2, ffn=12, vocab=16, experts=4, router_bias=True)
RATE_AND_DECAY = {
    "embed_tokens.weight": (0.25, 0.5),
    "embed_positions.weight": (0.25, 0.03125),
    "lm_head.weight": (0.125, 0.125),
    "layers.0.mlp.up_proj.weight": (0.5, 0.25),
    "layers.0.mlp.up_proj.bias": (1.5, 0.03125),
    "layers.0.input_layernorm.weight": (1.5, 0.03125),
    "norm.bias": (1.5, 0.03125),
    "layers.0.mlp.routed.router.weight": (0.5, 0.25),
    "layers.0.mlp.routed.experts.up_proj": (0.5, 0.25),
}
"""of the keys above, by hand: powers of two, so that products are exact"""


@pytest.mark.parametrize(("name", "model"), [("adamw", MODEL), ("sgd", MODEL), ("adamw", SPARSE), ("muon", SPARSE)])
def test_learning_rate_and_weight_decay_by_role(name: Any, model: Model) -> None:
    """A gradient of zero: what is left is the weight decay, of which torch takes rate x decay off a weight."""
    decoder = plain(model)
    optimizer = build_optimizer([decoder], replace(ROLES, name=name))
    initial = {parameter: value.detach().clone() for parameter, value in decoder.named_parameters()}
    for value in decoder.parameters():
        value.grad = torch.zeros_like(value)
    apply_if_finite(optimizer, 0.5, torch.tensor(True))
    for parameter, value in decoder.named_parameters():
        if parameter in RATE_AND_DECAY:
            rate, decay = RATE_AND_DECAY[parameter]
            torch.testing.assert_close(value.detach(), initial[parameter] * (1 - rate * decay), msg=parameter)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25, 0.125, 0.5, 1.5}


def test_a_tied_head_has_the_settings_of_the_embedding() -> None:
    decoder = plain(replace(MODEL, tied_embeddings=True))
    (group,) = (
        group
        for group in build_optimizer([decoder], ROLES).param_groups
        if any(member is decoder.lm_head.weight for member in group["params"])  # type: ignore[union-attr]
    )
    assert group["learning_rate_factor"] == ROLES.embedding_rate


def test_any_optimizer_gets_the_learning_rate_and_skips_what_is_not_finite() -> None:
    kinds: list[Any] = [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad]
    for kind, fused in itertools.product(kinds, (True, False)):
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        settings = {"weight_decay": 0.0} if kind is torch.optim.AdamW else {}
        optimizer = kind([weight], 1.0, fused=fused, **settings)
        apply_if_finite(optimizer, 0.25, torch.tensor(False))
        assert weight.item() == 1.0
        apply_if_finite(optimizer, 0.25, torch.tensor(True))
        assert weight.item() == pytest.approx(0.75), (kind, fused)


def test_a_parameter_without_a_gradient_stays() -> None:
    for settings in (*OPTIMIZERS.values(), MUON):
        model = plain()
        optimizer = build_optimizer([model], settings)
        weight = model.get_parameter("layers.0.self_attn.o_proj.weight")
        initial_weight = weight.detach().clone()
        give_gradients([model], 0)
        weight.grad = None
        apply_if_finite(optimizer, 0.1, torch.tensor(True))
        assert torch.equal(weight, initial_weight)
