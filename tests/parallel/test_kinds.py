"""Blocks of several kinds under each technique: gradients equal one process.

Kinds by hand, block for block: tests/models/test_decoder.py. Compiled ones: test_compile.py. Others: the lattice.
"""

from functools import partial
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel import tiers
from tests.parity import FEW, Settings, check, tiny
from torchllm.config import Kinds
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.context import apply_context_parallel
from torchllm.parallel.ring import RingAttention
from torchllm.parallel.tensor import apply_tensor_parallel
from torchllm.parallel.windows import WindowAttention
from torchllm.tools.dry_run.trace import fake_ranks

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
ULYSSES: Settings = {"parallel.cp": 2, "parallel.cp_method": "ulysses", **DOCUMENTS}
BY_DEFAULT: dict[str, Settings] = {
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
    "a split backward of segments": {
        "parallel.pp": 2,
        "parallel.schedule": "ZBVZeroBubble",
        "recompute.mode": "segment",
        **DOCUMENTS,
    },
    "Ulysses": ULYSSES,
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


@tiers.train(BY_DEFAULT, OTHER_LAYOUTS, FEW)
def test_a_layout_trains_kinds_of_other_shapes(settings: Settings) -> None:
    check({**OTHER_SHAPES, **settings}, ragged=True)


def test_kinds_of_windows_train_the_same_under_ulysses() -> None:
    """Under a ring: test_windows.py. Under tensor parallelism: test_options.py."""
    check({**FEW, **KINDS, **ULYSSES}, ragged=True)


def later_stage(settings: Settings, first: int) -> Decoder:
    """Return a stage whose blocks begin with number `first`, and are of other kinds by their places in it."""
    with torch.device("meta"):
        stage = build_model(tiny(settings).model)
    for number in range(first):
        del stage.layers[str(number)]
    return stage


def test_cores_of_a_later_stage_are_shared_as_its_kinds_want() -> None:
    mesh = mock.Mock(device_type="cpu")
    mesh.size.return_value = 2
    stage = later_stage(KINDS, first=2)
    apply_context_parallel(stage, mesh, "ring", torch.float32, 64)
    mid, full = (block.self_attn.core for block in stage.layers.values())
    assert isinstance(mid, WindowAttention)
    assert mid.neighbors.reach == 12 - 1
    assert isinstance(full, RingAttention)


def test_mixers_of_a_later_stage_are_cut_as_their_kinds_say() -> None:
    latent = {"latent_kv_width": 24, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6, "kv_heads": 0}
    kinds = Kinds(plain={}, latent={"mixer": "latent_attention", **latent})
    settings = {"model.pattern": ("plain", "latent", "plain", "latent"), "model.kinds": kinds}
    stage = later_stage({**settings, "model.layers": 4}, first=1)
    with fake_ranks(0, 2):
        apply_tensor_parallel(stage, init_device_mesh("cpu", (2,)), True, shares_experts=False)
    for block in (stage.layers["1"], stage.layers["3"]):
        assert isinstance(block.self_attn.for_own_heads, partial)  # latents are gathered, not hidden states
