"""What a block keeps for its backward, against published counts; `test_model_files.py` compares it with the dry run."""

import pytest

from evidence.stacks import STACKS
from torchllm import config as c
from torchllm.tools.planner.activations import block_activations
from torchllm.tools.planner.compute import Kernels, Piece


def test_a_block_keeps_what_korthikanti_et_al_count() -> None:
    """Bytes over s b h, of a GPT block with dropout, and 5 a s / h more with scores (arXiv 2205.05198, table 2)."""
    for tp, spread, expected in [(1, 1, 34.0), (8, 1, 10 + 24 / 8), (8, 8, 34 / 8)]:
        model = c.Model(family="gpt", hidden=6144, heads=64, ffn=4 * 6144)
        piece = Piece(4, 4 * 2048, 2048, tp, spread)
        software = STACKS["megatron-2022"]
        flash = block_activations(model, piece, Kernels("flash2"), software)
        scores = block_activations(model, piece, Kernels("fused_softmax"), software)
        flash_per_token = flash.whole / piece.tokens
        scores_per_token = scores.whole / piece.tokens
        of_flash = 4 * 64 / tp  # a float32 a head
        assert flash_per_token - of_flash == pytest.approx(expected * 6144), tp
        of_scores = scores_per_token - flash_per_token + of_flash
        assert of_scores == pytest.approx(5 * 64 * 2048 / tp), tp
