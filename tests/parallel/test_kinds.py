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


@pytest.mark.parametrize("settings", BY_DEFAULT.values(), ids=BY_DEFAULT)
def test_a_layout_trains_the_same_kinds(settings: Settings) -> None:
    check({**KINDS, **settings}, ragged=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", LAYOUTS.values(), ids=LAYOUTS)
def test_another_layout_trains_the_same_kinds(settings: Settings) -> None:
    check({**KINDS, **settings}, ragged=True)
