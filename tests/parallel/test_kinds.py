"""Blocks of several kinds under each technique: gradients equal one process.

Kinds by hand, block for block: tests/models/test_decoder.py. Compiled ones: test_compile.py. Others: the lattice.
"""

import pytest

from tests.parity import Settings, check
from torchllm.config import Kinds

KINDS: Settings = {
    "model.pattern": ("local", "local", "mid", "full"),  # a stage has other kinds by its own indices
    "model.kinds": Kinds(local={"window": 7, "rotary_fraction": 0.0}, mid={"window": 12, "rope_theta": 500.0}, full={}),
    "model.qk_norm": "head",
}
OTHER_SHAPES: Settings = {
    "model.pattern": ("few", "few", "sparse", "normed"),  # a stage without experts, or with other ones by its indices
    "model.kinds": Kinds(
        few={"heads": 4, "kv_heads": 2, "head_dim": 12, "ffn": 40, "qk_norm": "width", "window": 7, "experts": 0},
        sparse={"expert_ffn": 24, "rotary_fraction": 0.5},
        normed={
            **{"heads": 2, "kv_heads": 2, "head_dim": 16, "experts": 0, "attention": "eager", "qkv_bias": True},
            **{"norm_position": "after", "norm_epsilon": 1e-2},  # as in tests/lattice.py
        },
    ),
    "model.qk_norm": "head",
    **{"model.experts": 4, "model.top_k": 2, "model.balance_loss": "global", "model.balance_weight": 0.3},
}
"""kinds with other matrices, norms and kernels, and experts in one kind alone"""
DOCUMENTS: Settings = {"data.document_mask": True}
BY_DEFAULT: dict[str, Settings] = {
    "tensor and sequence parallel": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "a split backward of segments": {
        "parallel.pp": 2,
        "parallel.schedule": "ZBVZeroBubble",
        "recompute.mode": "segment",
        **DOCUMENTS,
    },
    "Ulysses": {"parallel.cp": 2, "parallel.cp_method": "ulysses", **DOCUMENTS},
}
LAYOUTS: dict[str, Settings] = {
    "pipeline": {"parallel.pp": 2},
    "FSDP of segments": {"parallel.dp_shard": 2, "recompute.mode": "segment", "recompute.k": 2, **DOCUMENTS},
    "full recomputation of eager attention": {
        "parallel.dp_shard": 2,
        "recompute.mode": "full",
        "model.attention": "eager",
        **DOCUMENTS,
    },
}


SHAPES_BY_DEFAULT: dict[str, Settings] = {
    "tensor and sequence parallel": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "experts over a pipeline": {
        "parallel.pp": 2,
        "parallel.dp_shard": 2,
        "parallel.ep": 2,
        "recompute.mode": "full",
        **DOCUMENTS,
    },
}
OTHER_LAYOUTS: dict[str, Settings] = {
    "pipeline": {"parallel.pp": 2},
    "a split backward of segments": BY_DEFAULT["a split backward of segments"],
    "Ulysses": BY_DEFAULT["Ulysses"],
    "ring": {"parallel.cp": 2, **DOCUMENTS},
    "ring and tensor parallel": {"parallel.cp": 2, "parallel.tp": 2, "recompute.mode": "selective"},
    "FSDP": {"parallel.dp_shard": 2, "recompute.mode": "selective_half"},
    "experts, cut by tp": {"parallel.dp_shard": 2, "parallel.tp": 2, "recompute.mode": "ffn"},
    "experts over FSDP": {"parallel.dp_shard": 2, "parallel.ep": 2, "recompute.mode": "every_k", **DOCUMENTS},
    "experts over tp": {"parallel.tp": 2, "parallel.ep": 2, "parallel.sequence_parallel": True},
    "a loop of stages, experts": {
        **{"parallel.pp": 2, "parallel.schedule": "Interleaved1F1B", "parallel.virtual_stages": 2},
        **{"parallel.dp_shard": 2, "parallel.ep": 2},
    },
    "frozen": {"parallel.dp_shard": 2, "model.frozen": r"layers\.[02]\..*", "recompute.mode": "full"},
}


@pytest.mark.parametrize("settings", SHAPES_BY_DEFAULT.values(), ids=SHAPES_BY_DEFAULT)
def test_a_layout_trains_kinds_of_other_shapes(settings: Settings) -> None:
    check({**OTHER_SHAPES, **settings}, ragged=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
def test_another_layout_trains_kinds_of_other_shapes(settings: Settings) -> None:
    check({**OTHER_SHAPES, **settings}, ragged=True)


@pytest.mark.parametrize("settings", BY_DEFAULT.values(), ids=BY_DEFAULT)
def test_a_layout_trains_the_same_kinds(settings: Settings) -> None:
    check({**KINDS, **settings}, ragged=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", LAYOUTS.values(), ids=LAYOUTS)
def test_another_layout_trains_the_same_kinds(settings: Settings) -> None:
    check({**KINDS, **settings}, ragged=True)
