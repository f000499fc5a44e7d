"""The model of a row: its family by its size, experts, and what is said instead of guessed."""

import pytest

from tests.tools.planner.evidence.test_score import ROW
from torchllm.config import Model
from torchllm.facts.flops import parameter_count
from torchllm.tools.planner.evidence.cells import Cells
from torchllm.tools.planner.evidence.row_model import model_of
from torchllm.tools.planner.evidence.stacks import STACKS

QWEN3_30B = {
    "layers": "48",
    "hidden": "2048",
    "heads": "32",
    "kv_heads": "4",
    "vocab": "151936",
    "seq_len": "4096",
    "experts": "128",
    "top_k": "8",
    "moe_ffn": "768",
    "tied_emb": "0",
    "note": "head_dim 128; all layers MoE",
}
"""Qwen3-30B-A3B, as huggingface.co/Qwen/Qwen3-30B-A3B describes it"""


def read(**cells: str) -> Model:
    return model_of(Cells(cells, []), STACKS["torchllm"])


def test_the_family_is_the_one_with_the_published_number_of_parameters() -> None:
    """A feed-forward layer of 4 hidden is a GPT's, but for a model that says it has three matrices."""
    sizes = {"hidden": "2048", "ffn": "8192", "heads": "32", "vocab": "131072", "tied_emb": "1"}
    cells = ROW | sizes
    gated = read(**cells | {"model": "1B", "n_params": "1342177280"})
    assert gated.family == "llama"
    assert parameter_count(gated) == pytest.approx(1342177280, rel=1e-3)
    plain = read(**cells | {"model": "0.8B"})
    assert plain.family == "gpt"


def test_a_published_model_without_a_feed_forward_width_is_a_gpt() -> None:
    sizes = {"model": "145B", "layers": "80", "hidden": "12288", "heads": "96", "ffn": ""}
    cells = Cells(ROW | sizes, [])
    model = model_of(cells, STACKS["torchllm"])
    assert model.family == "gpt"
    assert model.ffn == 49152
    assert cells.assumed == ["ffn 4 x hidden"]


def test_a_mixture_of_experts_has_the_published_number_of_parameters() -> None:
    model = read(**QWEN3_30B)
    assert model.experts == 128
    assert model.top_k == 8
    assert model.expert_width == 768
    assert model.head_width == 128
    assert parameter_count(model) == pytest.approx(30.53e9, rel=1e-3)


def test_what_is_not_said_is_not_guessed() -> None:
    for column, text, reason in [
        ("kv_heads", "", "latent attention"),
        ("moe_ffn", "", "moe_ffn is missing"),
        ("dense_layers", "1", "ffn is missing"),
        ("qk_norm", "some", "qk_norm = 'some' is not one of none, head, width"),
    ]:
        cells = QWEN3_30B | {column: text}
        with pytest.raises(ValueError, match=reason):
            read(**cells)
