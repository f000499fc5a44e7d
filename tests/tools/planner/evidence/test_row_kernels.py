"""Kernels, precision and recomputation of a row, by the words that tables have for them."""

import pytest

from torchllm.tools.planner.evidence.cells import Cells
from torchllm.tools.planner.evidence.row_kernels import Recomputed, measured_kernels, recompute_of
from torchllm.tools.planner.evidence.stacks import STACKS
from torchllm.tools.planner.software import Software

TITAN = STACKS["torchtitan"]


def recompute_by_word(word: str, software: Software = TITAN) -> Recomputed:
    """Return what a word in the column of recomputation means to a framework."""
    return recompute_of(Cells({"act_ckpt": word}, []), software)


def float8_by_word(word: str) -> float:
    """Return the share of the float8 rate that a word in the column of precision means."""
    cells = Cells({"precision": word, "attn_impl": "flash2"}, [])
    return measured_kernels(cells, TITAN).float8


def test_recomputation() -> None:
    for word, mode, attention_only in [
        ("none", "none", False),
        ("disabled", "none", False),
        ("full", "full", False),
        ("selective", "selective", False),
        ("selective op", "selective", False),
        ("selective (core_attn)", "selective", True),
        ("selective (layernorm, moe_act)", "selective", False),
        ("selective layer (every other)", "every_k", False),
    ]:
        recompute, software = recompute_by_word(word)
        assert recompute.mode == mode, word
        assert software.recomputes_attention_only == attention_only, word


def test_selective_means_what_it_means_to_the_framework() -> None:
    megatron = STACKS["megatron-core"]
    selective = recompute_by_word("selective", megatron)
    assert selective.software.recomputes_attention_only
    by_operation = recompute_by_word("selective op", megatron)
    assert not by_operation.software.recomputes_attention_only


def test_a_table_without_the_column_recomputes_nothing() -> None:
    cells = Cells({}, [])
    assert recompute_of(cells, TITAN).recompute.mode == "none"
    assert cells.assumed == ["act_ckpt none"]


def test_recomputation_that_is_not_known_is_said() -> None:
    for word, reason in [("", "act_ckpt is missing"), ("selective (mlp)", "is unknown")]:
        with pytest.raises(ValueError, match=reason):
            recompute_by_word(word)


def test_a_precision_that_is_not_of_all_products_is_refused() -> None:
    for word in ["nvfp4", "mxfp8 grouped gemm", "mxfp8 linears", "int8"]:
        with pytest.raises(ValueError, match="is unknown, or does not apply to all products"):
            float8_by_word(word)


def test_what_is_assumed_is_said() -> None:
    cells = Cells({}, [])
    kernels = measured_kernels(cells, TITAN)
    assert kernels.attention == "flash2"
    assert kernels.float8 == 0.0
    assert not kernels.compiled
    assert cells.assumed == ["attention flash2", "precision bf16"]


def test_attention_that_is_unknown_is_refused() -> None:
    cells = Cells({"attn_impl": "magic"}, [])
    with pytest.raises(ValueError, match="attn_impl 'magic' is unknown"):
        measured_kernels(cells, TITAN)
