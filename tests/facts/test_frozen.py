"""FLOPs of models with frozen parameters, by hand."""

import math
from dataclasses import replace

import pytest

from torchllm.config import Kinds, Model, Recompute
from torchllm.facts.flops import (
    ALL_TRAINED,
    block_flops,
    flops_per_token,
    matrices,
    parameter_count,
    recomputed_flops_per_token,
    trained_parameter_count,
)
from torchllm.facts.frozen import blocks_without_backward
from torchllm.facts.shapes import parameter_shapes

pytestmark = pytest.mark.quick

MODEL = Model(layers=4, hidden=64, heads=8, kv_heads=4, ffn=96, vocab=96)
S = 32
BLOCK = sum(math.prod(shape) for name, shape in parameter_shapes(MODEL).items() if name.startswith("layers.0."))
TABLE = 64 * 96


def saved(frozen: str, model: Model = MODEL) -> float:
    return flops_per_token(model, S) - flops_per_token(replace(model, frozen=frozen), S)


def test_a_frozen_weight_saves_its_gradient() -> None:
    assert saved("lm_head.*") == 2 * TABLE
    assert trained_parameter_count(replace(MODEL, frozen="lm_head.*"), ALL_TRAINED) == parameter_count(MODEL) - TABLE
    assert saved(r"layers\.2\..*") == 2 * BLOCK
    assert saved("embed_tokens.*", replace(MODEL, tied_embeddings=True)) == 2 * TABLE
    deep = replace(MODEL, mtp_depth=2)  # whose depths multiply with the head again
    assert saved("lm_head.*", deep) == 3 * 2 * TABLE
    assert saved("embed_tokens.*", replace(deep, tied_embeddings=True)) == 3 * 2 * TABLE


def test_before_the_first_trained_parameter_there_is_no_backward_pass() -> None:
    """Neither gradients of inputs nor attention's, which are 8 H Q S of the 12 H Q S of a block."""
    frozen = r"embed_tokens.*|layers\.[01]\..*"
    assert blocks_without_backward(replace(MODEL, frozen=frozen)) == 2
    assert saved(frozen) == 4 * TABLE + 2 * (4 * BLOCK + 8 * 64 * S)
    all_but_head = "(?!lm_head).*"
    assert flops_per_token(replace(MODEL, frozen=all_but_head), S) == (
        2 * parameter_count(MODEL) + 4 * TABLE + 4 * 4 * 64 * S + 2 * 64  # the norm after the blocks is counted as one
    )


def test_frozen_blocks_save_the_attention_of_their_own_windows() -> None:
    """The blocks before the first trained parameter: one with a window of 5, one without."""
    kinds = Kinds(local={"window": 5}, full={})
    model = replace(MODEL, pattern=("local", "full", "full"), kinds=kinds)
    assert saved(r"embed_tokens.*|layers\.[01]\..*", model) == 4 * TABLE + 2 * 4 * BLOCK + 8 * 64 * (5 + S)
    assert saved(r"embed_tokens.*|layers\.0\..*", model) == 4 * TABLE + 4 * BLOCK + 8 * 64 * 5


def test_of_experts_only_the_used_ones_count() -> None:
    model = replace(MODEL, experts=8, top_k=2, expert_ffn=48)
    assert saved(r"layers\.3\..*experts.*", model) == 2 * (2 * 3 * 64 * 48)


@pytest.mark.parametrize(("mode", "k", "blocks"), [("full", 0, [2, 3]), ("every_k", 2, [2]), ("segment", 4, range(4))])
def test_blocks_without_backward_are_not_recomputed(mode: str, k: int, blocks: list[int]) -> None:
    model = replace(MODEL, frozen=r"embed_tokens.*|layers\.[01]\..*")
    last = {"full": [2, 3], "every_k": [2], "segment": [3]}[mode]
    expected = sum(block_flops(model, layer, S) for layer in blocks)
    expected -= sum(2 * matrices(model, layer).down for layer in last)
    assert recomputed_flops_per_token(model, Recompute(mode, k), S) == expected  # type: ignore[arg-type]
