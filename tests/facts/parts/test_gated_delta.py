"""Sizes, FLOPs and products of Gated DeltaNet; its parameters: tests/facts/test_shapes.py, test_model_sizes.py."""

import pytest
import torch

from torchllm.config import Model
from torchllm.facts.flops import core_flops
from torchllm.facts.parts.gated_delta import PART
from torchllm.models.parts.gated_delta import GatedDeltaNet

pytestmark = pytest.mark.quick

QWEN3_NEXT = Model(
    mixer="gated_delta",
    hidden=2048,
    delta_key_heads=16,
    delta_value_heads=32,
    delta_key_dim=128,
    delta_value_dim=128,
)


def test_sizes_that_are_not_set_are_those_of_attention() -> None:
    view = Model(mixer="gated_delta", hidden=64, heads=8, kv_heads=2)
    shapes = PART.shapes(view)
    assert shapes["self_attn.k_proj.weight"] == (16, 64)
    assert shapes["self_attn.v_proj.weight"] == (64, 64)
    assert PART.heads(view) == {"delta_value_heads": 8, "delta_key_heads": 2}


def test_flops_of_a_token() -> None:
    """A state of Q x P numbers is read twice and written once: two operations each; 4 taps of 8,192 channels."""
    expected = 32 * 3 * 2 * 128 * 128 + 2 * 4 * 8192
    assert core_flops(QWEN3_NEXT, 4096) == core_flops(QWEN3_NEXT, 64) == expected


def test_products_in_the_order_of_their_use() -> None:
    used = [product.layer for product in PART.products(QWEN3_NEXT)]
    assert used == ["q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_proj"]
    module = GatedDeltaNet(Model(mixer="gated_delta", hidden=8, heads=2))
    called: list[str] = []
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda *_, name=name: called.append(name))
    module(torch.zeros(1, 3, 8), None, None)
    assert called == used
