"""The parameter table: every parameter one rule, every wrapper's name canonical."""

import re
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import get_args

import pytest
import torch

from torchllm.config import Compile, Kinds, Model, Recompute
from torchllm.config.schema import Lora, RecomputeMode
from torchllm.facts.parameters import END_RULES, canonical_name, is_low_rank_factor, rule_of
from torchllm.facts.parts.registry import FEED_FORWARDS, MIXERS
from torchllm.models.decoder import Decoder, build_model
from torchllm.models.lora import apply_lora
from torchllm.parallel.compile import apply_compile
from torchllm.parallel.recompute import apply_recompute

TINY = Model(layers=4, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=31, max_sequence_length=8)
LATENT = {
    **{"mixer": "latent_attention", "kv_heads": 0, "latent_kv_width": 5},
    **{"nope_head_dim": 6, "rope_head_dim": 2, "v_head_dim": 3},
}
MODELS = {
    "llama": TINY,
    "llama-tied": replace(TINY, tied_embeddings=True),
    "llama-qk-norm": replace(TINY, qk_norm="head"),
    "olmo": replace(TINY, qk_norm="width", norm_position="after"),
    "qwen2": replace(TINY, qkv_bias=True),
    "experts": replace(TINY, experts=3, expert_ffn=8, shared_experts=2, shared_gate=True, dense_layers=1),
    "gemma": replace(TINY, norm_position="both", norm_offset=True, attention_gate="element"),
    "gemma4": replace(
        TINY,
        **{"norm_position": "both", "block_scale": True, "v_norm": True},
        pattern=("window", "full"),
        kinds=Kinds(window={"window": 4}, full={"keys_as_values": True, "head_dim": 6}),
    ),
    "gemma4-experts": replace(
        TINY, **{"experts": 3, "expert_ffn": 8, "dense_beside": True, "norm_position": "both", "dense_layers": 1}
    ),
    "gpt-gated": replace(TINY, family="gpt", attention_gate="head"),
    "gpt-oss": replace(TINY, sinks=True, o_bias=True, experts=3, dense_layers=1, expert_biases=True),
    "deepseek": replace(TINY, **LATENT, latent_q_width=6),
    "moonlight": replace(TINY, **LATENT),
    "qwen3-next": replace(TINY, mixer="gated_delta", delta_value_dim=6),
    "gpt": replace(TINY, family="gpt"),
    "gpt-tied": replace(TINY, family="gpt", tied_embeddings=True),
    "nanochat": replace(TINY, family="nanochat", qk_norm="head"),
}


def meta(model: Model) -> Decoder:
    with torch.device("meta"):
        return build_model(model)


def with_updates(model: Model) -> Decoder:
    decoder = meta(model)
    if not model.experts:
        apply_lora(decoder, Lora(rank=2), torch.float32)
    return decoder


def names_of(decoder: Decoder) -> list[str]:
    return [canonical_name(name) for name, _ in decoder.named_parameters()]


def test_every_declaration_has_a_parameter_and_one_name() -> None:
    names = {name for model in MODELS.values() for name in names_of(meta(model))}
    parts = [import_module(f"torchllm.facts.parts.{name}").PART for name in (*MIXERS, *FEED_FORWARDS)]
    rules = {(f"layers.1.{parameter.name}", parameter.rule) for part in parts for parameter in part.parameters}
    declared = [name for name, _ in rules]  # two parts may have one, with one rule
    assert len(declared) == len(set(declared))
    assert all(len(part.parameters) == len({parameter.name for parameter in part.parameters}) for part in parts)
    assert {*declared, *END_RULES} <= names
    assert all(part.name in (*MIXERS, *FEED_FORWARDS) for part in parts)


def test_an_unknown_parameter_is_named() -> None:
    for name in ("layers.0.mystery.weight", "self_attn.q_proj.weight", "layers.0.layers.1.self_attn.q_proj.weight"):
        with pytest.raises(KeyError, match=rf"torchllm/facts/parts declares.*{name}"):
            rule_of(name)


ROLES_OF_ENDS = {"embed_tokens.weight": "embedding", "embed_positions.weight": "position", "lm_head.weight": "head"}


def test_rows_agree_with_what_the_parameters_are() -> None:
    """Vectors start at a constant, matrices at random; those of the blocks have a role of their own."""
    for parameter, value in (pair for model in MODELS.values() for pair in meta(model).named_parameters()):
        rule = rule_of(parameter)
        taps = parameter.endswith("_conv")  # of a convolution by channel
        matrix = value.dim() >= 2 and "bias" not in parameter and not taps  # those of experts are stacked
        role_in_block = "router" if re.search("router|result_gate", parameter) else "matrix"
        assert (rule.role == "vector") == (not matrix), parameter
        assert (rule.role == role_in_block) == (matrix and parameter.startswith("layers.")), parameter
        assert rule.role == ROLES_OF_ENDS.get(parameter, rule.role), parameter
        assert (rule.start in ("normal", "residual")) == (matrix or taps or "sinks" in parameter), parameter
        assert (rule.start == "residual") == bool(re.search(r"\b(o|down)_proj(\.weight)?$", parameter)), parameter
        is_norm = "norm" in parameter and parameter.endswith("weight")
        is_norm |= parameter.endswith("_scale")  # of what a router norms, and of experts
        assert (rule.start in ("identity", "ones")) == is_norm, parameter


def test_updates_do_not_change_canonical_names() -> None:
    """Factors are matrices with a role of their own; A starts at random, B at zero."""
    updated = names_of(with_updates(TINY))
    factors = [name for name in updated if is_low_rank_factor(name)]
    assert [name for name in updated if name not in factors] == names_of(meta(TINY))
    assert "layers.3.self_attn.q_proj.lora_A.weight" in factors
    for name in factors:
        assert rule_of(name).role == "adapter"
        assert rule_of(name).start == ("normal" if "lora_A" in name else "zeros")


COMPILED = [Compile(), Compile(norm=True), Compile(block=True), Compile(loss=True), Compile(True, True, True)]


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_wrappers_do_not_change_canonical_names(others: bool) -> None:
    """By default each model with every seventh pair of a mode and a scope, and each pair with every seventh model."""
    wrappers = list(enumerate(product(get_args(RecomputeMode), COMPILED)))
    for (index, model), (number, (mode, compile)) in product(enumerate(MODELS.values()), wrappers):
        if (index + number) % 7 and not others:
            continue
        wrapped = meta(model)
        plain = [parameter for parameter, _ in wrapped.named_parameters()]
        assert [canonical_name(parameter) for parameter in plain] == plain
        apply_recompute(wrapped, Recompute(mode=mode), layers=TINY.layers)
        apply_compile(wrapped, compile)
        names = [parameter for parameter, _ in wrapped.named_parameters()]
        assert [canonical_name(parameter) for parameter in names] == plain, (model, mode, compile)
        if mode not in ("none", "segment") or compile.block is True:
            assert names != plain, "no wrapper in the names: this test no longer shows anything"
