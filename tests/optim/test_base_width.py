"""model.base_width, muP for AdamW: the size of activations does not depend on the width, in any layout."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.test_optimizer import ROLES
from tests.parity import SHORT, compare, tiny, train_config
from tests.tiny_run import ROOT
from tests.workers import run
from torchllm.config import Config, Model, Optimizer
from torchllm.facts.parameters import canonical_name
from torchllm.models.decoder import Decoder, build_model
from torchllm.optim.optimizer import apply_if_finite, build_optimizer
from torchllm.parallel.initialize import initialize
from torchllm.tools.config.checks import setting_problems
from torchllm.tools.hub.config_json import family_to_export, write_config_json
from torchllm.tools.proof.layouts import Settings, with_settings
from torchllm.tools.proof.shrink import small_model

CPU = torch.device("cpu")
WIDTHS = (64, 128, 256, 512, 1024)
SEQUENCES, LENGTH, STEPS = 8, 32, 10
MOST_SPREAD = 1.3
VARIANTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "gpt": lambda width: {"family": "gpt"},
    "tied": lambda width: {"tied_embeddings": True, "logit_divisor": width / 64},
    "experts": lambda width: {"experts": 4, "expert_ffn": width},
    "latent attention": lambda width: {
        **{"mixer": "latent_attention", "latent_kv_width": width // 2, "latent_q_width": width // 2},
        **{"nope_head_dim": 8, "rope_head_dim": 8, "v_head_dim": 16},
    },
}
"""keys of other models, by a width: all widths but that of a head grow"""
ADAMW = Optimizer(learning_rate=3e-3, weight_decay=0.1)


def of_width(width: int, **keys: Any) -> Model:
    """Return a model of bytes whose heads have one width, as the rule wants it."""
    sizes: dict[str, Any] = {"layers": 2, "hidden": width, "heads": width // 16, "ffn": width, "vocab": 256}
    return Model(**(sizes | {"initial_std": 0.08} | keys))


def built(model: Model, seed: int = 0) -> Decoder:
    with torch.device("meta"):
        decoder = build_model(model)
    initialize([decoder], model, CPU, seed)
    return decoder


def parameters_of(model: Model) -> dict[str, Tensor]:
    return {canonical_name(name): value.detach() for name, value in built(model).named_parameters()}


def text() -> Tensor:
    """Return the first bytes of a text that does not change, (B, S + 1)."""
    some = (ROOT / "LICENSE").read_bytes()[: SEQUENCES * (LENGTH + 1)]
    return torch.tensor(list(some)).view(SEQUENCES, LENGTH + 1)


@cache
def sizes_after_training(model: Model) -> dict[str, float]:
    """Return the mean sizes of activations after 10 steps of AdamW: of the residual stream after each block, and of the
    logits."""
    decoder = built(model)
    optimizer = build_optimizer([decoder], ADAMW)
    tokens = text()
    positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    for _ in range(STEPS):
        loss = decoder(tokens[:, :-1], positions, labels=tokens[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        apply_if_finite(optimizer, ADAMW.learning_rate, torch.tensor(True))
        optimizer.zero_grad()
    sizes: dict[str, float] = {}

    def note(name: str) -> Any:
        return lambda module, inputs, output: sizes.update({name: output.abs().mean().item()})

    for index, block in decoder.layers.items():
        block.register_forward_hook(note(f"block {index}"))
    decoder.lm_head.register_forward_hook(note("logits"))  # type: ignore[union-attr]
    with torch.no_grad():
        decoder(tokens[:, :-1], positions)
    return sizes


def spreads(widths: Sequence[int], **keys: Any) -> dict[str, float]:
    """Return the largest size of each activation over the widths, divided by the smallest."""
    of_widths = [sizes_after_training(of_width(width, **keys)) for width in widths]
    return {name: max(s[name] for s in of_widths) / min(s[name] for s in of_widths) for name in of_widths[0]}


def test_the_size_of_activations_does_not_depend_on_the_width() -> None:
    """The coordinate check of Yang et al. 2022 (arXiv 2203.03466). Without the rule each size differs."""
    with_rule = spreads(WIDTHS, base_width=WIDTHS[0])
    assert max(with_rule.values()) < MOST_SPREAD, with_rule
    without = spreads(WIDTHS[:4])
    assert min(without.values()) > MOST_SPREAD, without


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_for_other_models(name: str) -> None:
    of_widths = [sizes_after_training(of_width(width, base_width=64, **VARIANTS[name](width))) for width in WIDTHS[:4]]
    for place in of_widths[0]:
        sizes = [of_width[place] for of_width in of_widths]
        assert max(sizes) / min(sizes) < MOST_SPREAD, (place, sizes)


FACTORS_AT_4 = {
    # standard deviation, learning rate and weight decay of a model four times as wide as its base, by hand
    "embed_tokens.weight": (1.0, 0.5, 0.5),
    "embed_positions.weight": (1.0, 0.5, 0.03125),
    "lm_head.weight": (0.25, 0.0625, 0.5),
    "norm.bias": (1.0, 3.0, 0.03125),
    "layers.0.input_layernorm.weight": (1.0, 3.0, 0.03125),
    "layers.0.mlp.up_proj.bias": (1.0, 3.0, 0.03125),
    "layers.0.mlp.up_proj.weight": (0.5, 0.25, 1.0),
    "layers.0.mlp.down_proj.weight": (0.5, 0.25, 1.0),
    "layers.0.self_attn.q_proj.weight": (0.5, 0.25, 1.0),
    "layers.0.self_attn.o_proj.weight": (0.5, 0.25, 1.0),
    "layers.0.mlp.routed.router.weight": (0.25, 0.25, 1.0),
    "layers.0.mlp.routed.experts.up_proj": (0.5, 0.25, 1.0),
    "layers.0.mlp.routed.experts.down_proj": (0.5, 0.25, 1.0),
    "layers.0.mlp.shared.result_gate.weight": (0.25, 0.25, 1.0),
}
SMALL = of_width(16, layers=1, heads=2, max_sequence_length=8)


def test_each_role_has_its_factors() -> None:
    """Powers of two, so that products are exact."""
    seen = set()
    sparse = {"experts": 4, "expert_ffn": 8, "shared_experts": 1, "shared_gate": True}
    for model in (replace(SMALL, family="gpt"), replace(SMALL, **sparse)):  # type: ignore[arg-type]
        base, wide = parameters_of(model), built(replace(model, base_width=4))
        groups = build_optimizer([wide], ROLES).param_groups
        found = {id(value): group for group in groups for value in group["params"]}
        for name, value in wide.named_parameters():
            if name in FACTORS_AT_4:
                std, rate, decay = FACTORS_AT_4[name]
                assert torch.equal(value, base[name] * std), name
                group = found[id(value)]
                assert (group["learning_rate_factor"], group["weight_decay"]) == (rate, decay), name
                seen.add(name)
    assert seen == FACTORS_AT_4.keys()


def test_a_model_as_wide_as_its_base_is_the_same_without_the_key() -> None:
    for model in (replace(SMALL, family="gpt"), replace(SMALL, experts=4)):
        groups, weights = [], []
        for base_width in (0, model.hidden):
            decoder = built(replace(model, base_width=base_width))
            found = build_optimizer([decoder], ROLES).param_groups
            groups.append([(group["learning_rate_factor"], group["weight_decay"]) for group in found])
            weights.append([value.detach().view(torch.int32) for value in decoder.parameters()])
        assert groups[0] == groups[1]
        assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("layout", [{"parallel.dp_shard": 2}, {"parallel.tp": 2}, {"parallel.pp": 2}], ids=str)
def test_layouts_train_as_one_process(layout: Settings) -> None:
    config = tiny({"model.base_width": 16, **SHORT})
    expected = run(train_config, 1, config, False)[0]
    trained = run(train_config, 2, with_settings(config, layout), False)[0]
    compare(trained, expected)
    without = run(train_config, 1, with_settings(config, {"model.base_width": 0}), False)[0]
    with pytest.raises(AssertionError):  # the key changes what is compared
        compare(trained, without)


def test_an_export_does_not_know_the_key() -> None:
    """The function of the weights is that of any other model of the family."""
    plain, wide = of_width(64), of_width(64, base_width=16)
    family = family_to_export(wide)
    assert write_config_json(wide, family) == write_config_json(plain, family)


def test_a_small_copy_keeps_the_ratio_of_widths() -> None:
    model = Model(hidden=4096, heads=32, kv_heads=8, base_width=1024, tied_embeddings=True, logit_divisor=4.0)
    small = with_settings(Config(model=model), small_model(model, ranks=4))
    assert small.model.hidden < 256
    assert small.model.width_ratio == pytest.approx(4.0, rel=0.1)
    assert setting_problems(small) == []
