"""The parameter table: every parameter one rule, every wrapper's name canonical."""

import re
from dataclasses import replace

import pytest
import torch

from torchllm.config import Compile, Model, Recompute
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.compile import apply_compile
from torchllm.parallel.recompute import apply_recompute
from torchllm.spec.parameters import PARAMETER_RULES, canonical_name, rule_of

TINY = Model(layers=4, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=31, max_sequence_length=8)
MODELS = {
    "llama": TINY,
    "llama-tied": replace(TINY, tied_embeddings=True),
    "llama-qk-norm": replace(TINY, qk_norm=True),
    "gpt": replace(TINY, family="gpt"),
    "gpt-tied": replace(TINY, family="gpt", tied_embeddings=True),
}


def meta(model: Model) -> Decoder:
    with torch.device("meta"):
        return build_model(model)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_matches_exactly_one_row(name: str) -> None:
    for parameter, _ in meta(MODELS[name]).named_parameters():
        matching = [rule.pattern for rule in PARAMETER_RULES if re.fullmatch(rule.pattern, parameter)]
        assert len(matching) == 1, (parameter, matching)
        assert rule_of(parameter).pattern == matching[0]


def test_every_row_has_a_parameter() -> None:
    names = {name for model in MODELS.values() for name, _ in meta(model).named_parameters()}
    for rule in PARAMETER_RULES:
        assert any(re.fullmatch(rule.pattern, name) for name in names), rule.pattern


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(KeyError, match=r"torchllm/spec/parameters.py.*layers\.0\.mystery\.weight"):
        rule_of("layers.0.mystery.weight")


@pytest.mark.parametrize("name", MODELS)
def test_rows_agree_with_what_the_parameters_are(name: str) -> None:
    """Matrices but the position table are decayed; vectors start at a constant, matrices at random."""
    for parameter, value in meta(MODELS[name]).named_parameters():
        rule = rule_of(parameter)
        matrix = value.dim() == 2
        assert rule.decayed == (matrix and parameter != "embed_positions.weight"), parameter
        assert (rule.start in ("normal", "residual")) == matrix, parameter
        assert (rule.start == "residual") == parameter.endswith(("o_proj.weight", "down_proj.weight")), parameter
        assert (rule.start == "ones") == ("norm" in parameter and parameter.endswith("weight")), parameter


COMPILED = [Compile(), Compile(norm=True), Compile(block=True), Compile(loss=True), Compile(True, True, True)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["none", "full", "segment", "every_k", "ffn", "selective", "selective_half"])
def test_wrappers_do_not_change_canonical_names(name: str, mode: str) -> None:
    plain = [parameter for parameter, _ in meta(MODELS[name]).named_parameters()]
    assert [canonical_name(parameter) for parameter in plain] == plain
    for compile in COMPILED:
        wrapped = meta(MODELS[name])
        apply_recompute(wrapped, Recompute(mode=mode), layers=TINY.layers)  # type: ignore[arg-type]
        apply_compile(wrapped, compile)
        names = [parameter for parameter, _ in wrapped.named_parameters()]
        assert [canonical_name(parameter) for parameter in names] == plain, compile
        if mode not in ("none", "segment") or compile.block is True:
            assert names != plain, "no wrapper in the names: this test no longer shows anything"
