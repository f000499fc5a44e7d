"""Inputs that are gathered again in the backward: the same model, what is sent, and what is kept."""

import functools
from typing import Any

import pytest
import torch

from tests.parallel.trace import traced
from tests.parity import SHORT, Settings, check

AGAIN: Settings = {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.regather": True}
EXPERTS: Settings = {"model.experts": 4, "model.top_k": 2, "model.expert_ffn": 32, "model.shared_experts": 1}
LATENT: Settings = {}
LAYOUTS: dict[str, Settings] = {
    "plain": {},
    "lora": {"lora.rank": 3, "lora.alpha": 12.0},
    "selective": {"recompute.mode": "selective"},
    "half": {"recompute.mode": "selective_half", "parallel.regather": False},
    "fsdp, documents, ffn": {"parallel.dp_shard": 2, "data.document_mask": True, "recompute.mode": "ffn"},
    "experts cut by tp": EXPERTS,
    "experts over ep": {**EXPERTS, "parallel.ep": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_trains_the_same_model(name: str) -> None:
    check({**SHORT, **AGAIN, **LAYOUTS[name]}, ragged=True)
