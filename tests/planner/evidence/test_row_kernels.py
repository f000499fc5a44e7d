"""Kernels, precision and recomputation of a row, by the words that tables have for them."""

import pytest

from torchllm.planner.evidence.cells import Cells
from torchllm.planner.evidence.row_kernels import measured_kernels, recompute_of
from torchllm.planner.evidence.stacks import STACKS

TITAN = STACKS["torchtitan"]


@pytest.mark.parametrize(
    ("word", "mode", "attention_only"),
    [
        ("none", "none", False),
        ("disabled", "none", False),
        ("full", "full", False),
        ("selective", "selective", False),
        ("selective op", "selective", False),
        ("selective (core_attn)", "selective", True),
        ("selective (layernorm, moe_act)", "selective", False),
        ("selective layer (every other)", "every_k", False),
    ],
)
def test_recomputation(word: str, mode: str, attention_only: bool) -> None:
    recompute, software = recompute_of(Cells({"act_ckpt": word}, []), TITAN)
    assert (recompute.mode, software.recomputes_attention_only) == (mode, attention_only)


def test_selective_means_what_it_means_to_the_framework() -> None:
    megatron = STACKS["megatron-core"]
    assert recompute_of(Cells({"act_ckpt": "selective"}, []), megatron).software.recomputes_attention_only
    assert not recompute_of(Cells({"act_ckpt": "selective op"}, []), megatron).software.recomputes_attention_only


def test_a_table_without_the_column_recomputes_nothing() -> None:
    cells = Cells({}, [])
    assert recompute_of(cells, TITAN).recompute.mode == "none"
    assert cells.assumed == ["act_ckpt none"]


@pytest.mark.parametrize(("word", "reason"), [("", "act_ckpt is missing"), ("selective (mlp)", "is unknown")])
def test_recomputation_that_is_not_known_is_said(word: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        recompute_of(Cells({"act_ckpt": word}, []), TITAN)


@pytest.mark.parametrize(
    ("word", "share"),
    [
        ("bf16", 0.0),
        ("amp_bf16", 0.0),
        ("fp16 mixed", 0.0),
        ("bf16 params+bf16 AdamW states (no fp32 master), fp32 reduce", 0.0),
        ("float8", 0.8),
        ("float8 rowwise", 0.62),
        ("float8 rowwise_with_gw_hp", 0.575),
        ("float8 dynamic tensorwise", 0.8),
        ("float8 tensorwise + fp8 all-gather", 0.8),
        ("FP8-CS", 0.8),
        ("fp8 current scaling", 0.8),
        ("mxfp8", 0.8),
        ("mxfp8_cublas_rceil", 0.8),
        ("mxfp8 linears + grouped gemm", 0.8),
    ],
)
def test_precision(word: str, share: float) -> None:
    assert measured_kernels(Cells({"precision": word, "attn_impl": "flash2"}, []), TITAN).float8 == share


def test_transformer_engine_gains_what_products_do() -> None:
    cells = Cells({"precision": "fp8", "attn_impl": "te"}, [])
    assert measured_kernels(cells, STACKS["nemo"]).float8 == 0.88


@pytest.mark.parametrize("word", ["nvfp4", "mxfp8 grouped gemm", "mxfp8 linears", "int8"])
def test_a_precision_that_is_not_of_all_products_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="is unknown, or not that of all products"):
        measured_kernels(Cells({"precision": word, "attn_impl": "flash2"}, []), TITAN)


@pytest.mark.parametrize(
    ("word", "kind"),
    [("flash", "flash2"), ("flash1", "flash1"), ("sdpa_flash", "flash2"), ("te", "flash3"), ("unfused", "eager")],
)
def test_attention(word: str, kind: str) -> None:
    cells = Cells({"attn_impl": word, "precision": "bf16"}, [])
    assert measured_kernels(cells, TITAN).attention == kind
    assert cells.assumed == []


def test_what_is_assumed_is_said() -> None:
    cells = Cells({}, [])
    kernels = measured_kernels(cells, TITAN)
    assert (kernels.attention, kernels.float8, kernels.compiled) == ("flash2", 0.0, False)
    assert cells.assumed == ["attention flash2", "precision bf16"]
    with pytest.raises(ValueError, match="attn_impl 'magic' is unknown"):
        measured_kernels(Cells({"attn_impl": "magic"}, []), TITAN)
