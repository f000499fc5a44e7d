"""Mixers of forks: what is taken, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.facts.flops import block_flops, parameter_count
from torchllm.facts.parameters import rule_of
from torchllm.facts.parts.added import register_mixer
from torchllm.facts.parts.part import BlockPart, PartParameter, linear
from torchllm.facts.parts.registry import ADDED_PARAMETERS, MIXERS_OF_FORKS
from torchllm.models.decoder import build_model

pytestmark = pytest.mark.quick


def square(view: Model) -> tuple[int, int]:
    return view.hidden, view.hidden


TAPS = PartParameter(
    name="self_attn.taps.weight", shape=lambda view: (view.hidden, 3), cut="colwise", start="normal", role="vector"
)
MIXER = BlockPart(
    name="short_conv",
    build="tests.facts.parts.test_added:MIXER",
    parameters=(
        *linear("self_attn.in_proj", square, "colwise"),
        TAPS,
        *linear("self_attn.out_proj", square, "rowwise", to_residual=True),
    ),
    core_flops=lambda view, keys: 6.0 * view.hidden,
)


@pytest.fixture(autouse=True)
def _take_back() -> Iterator[None]:
    """Forget what these tests register."""
    yield
    MIXERS_OF_FORKS.clear()
    ADDED_PARAMETERS.clear()


def test_a_mixer_of_a_fork_has_sizes_rules_and_flops() -> None:
    register_mixer(MIXER)
    register_mixer(MIXER)  # a fork that is imported twice
    model = Model(layers=1, mixer="short_conv")
    attention = 4 * model.hidden**2
    mine = 2 * model.hidden**2 + 3 * model.hidden
    assert parameter_count(model) == parameter_count(replace(model, mixer="attention")) - attention + mine
    assert rule_of("layers.3.self_attn.taps.weight") == TAPS.rule
    assert rule_of("layers.3.self_attn.out_proj.weight").start == "residual"
    assert block_flops(model, 0, 64) == 2 * (2 * model.hidden**2 + 3 * model.hidden * model.ffn) + 6 * model.hidden


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "attention"}, "'attention' is one of the library's mixers"),
        ({"parameters": (replace(TAPS, name="taps"),)}, "'taps' must begin with self_attn., the place of a mixer"),
        ({"parameters": (replace(TAPS, name="self_attn.taps"),)}, "'self_attn.taps' needs a module of its own"),
        ({"parameters": (replace(TAPS, cut="columns"),)}, "has cut 'columns', not one of colwise, "),
        ({"parameters": (replace(TAPS, name="self_attn.q_proj.weight"),)}, "is a parameter of other blocks: rename it"),
    ],
)
def test_a_wrong_mixer_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        register_mixer(replace(MIXER, **changes))


def test_a_module_with_other_parameters_than_registered_is_refused() -> None:
    """Its sizes and FLOPs would be counted wrong."""
    for changes, message in (
        (
            {"build": lambda view: nn.Module()},
            r"self_attn.in_proj.weight: missing in the block, \(256, 256\) in its reg",
        ),
        (
            {"build": lambda view: nn.ModuleDict({"g_proj": nn.Linear(2, 2)}), "parameters": ()},
            "g_proj.bias: .* missing",
        ),
    ):
        register_mixer(replace(MIXER, **changes))
        with pytest.raises(UserError, match=f"^mixer 'short_conv': .*{message}"):
            build_model(Model(layers=1, mixer="short_conv"))


def test_an_unknown_mixer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"model.mixer: 'short_conv' is none of attention, .*set RECIPE to its file"):
        parameter_count(Model(mixer="short_conv"))
