"""Every file of train_configs/models has the number of parameters that its source publishes."""

import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchllm.config import Model
from torchllm.facts.flops import active_parameter_count, parameter_count
from torchllm.models.decoder import build_model
from torchllm.tools.config.read import read_table

FOLDER = Path(__file__).parents[2] / "train_configs" / "models"

# Exact figures: those of the released checkpoints (Llama 2, 3.1, 3.2, Qwen2.5, Qwen3, OLMo 2, Mistral); for Hagemann
# et al. the counts behind their MFU, with both embeddings of 128,000 tokens (30B, of which they print none: by hand).
EXACT = {
    "llama_13b": 13_998_904_320,
    "llama_30b": 60 * (4 * 6656**2 + 3 * 6656 * 17_888 + 2 * 6656) + 2 * 128_000 * 6656 + 6656,
    "llama_65b": 66_858_524_672,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen2.5_0.5b": 494_032_768,
    "olmo2_1b": 1_484_916_736,
    "mistral_7b": 7_241_732_096,
    "gemma2_9b": 9_241_705_984,
    "gemma3_4b": 3_880_263_168,
    "gemma4_31b": 30_697_345_280,
    "olmo_hybrid_7b": 7_430_870_688,
    "nanochat_d32": 1_879_048_192,
    "debug": 1_222_560,
    "moe_debug": 2_886_560,
}
# Narayanan et al. 2021, table 1: billions of parameters, layers, hidden size, attention heads.
GPT = {
    "gpt_1.7b": (1.7, 24, 2304, 24),
    "gpt_3.6b": (3.6, 30, 3072, 32),
    "gpt_7.5b": (7.5, 36, 4096, 32),
    "gpt_18b": (18.4, 40, 6144, 48),
    "gpt_39b": (39.1, 48, 8192, 64),
    "gpt_76b": (76.1, 60, 10240, 80),
    "gpt_145b": (145.6, 80, 12288, 96),
    "gpt_310b": (310.1, 96, 16384, 128),
    "gpt_530b": (529.6, 105, 20480, 128),
    "gpt_1t": (1008.0, 128, 25600, 160),
}


# All parameters (safetensors.total of huggingface.co/api/models/NAME), and billions of parameters that a token uses, as
# the authors print them (Jiang et al. 2024, arXiv 2401.04088; Yang et al. 2025, arXiv 2505.09388; Muennighoff et al.
# 2024, arXiv 2409.02060).
SPARSE = {
    "mixtral_8x7b": (46_702_792_704, 12.9),
    "qwen3_30b_a3b": (30_532_122_624, 3.4),  # they print 3.3
    "qwen3_235b_a22b": (235_093_634_560, 22.2),
    "olmoe_1b_7b": (6_919_161_856, 1.3),
    # they print 3.61 and 5.13, without the 0.58 of the embedding (arXiv 2508.10925, table 1)
    "gpt_oss_20b": (20_914_757_184, 4.2),
    "gpt_oss_120b": (116_829_156_672, 5.7),
}
# All parameters that transformers' class has, and billions of those that a token uses, as the card prints them.
SPARSE["gemma4_26b_a4b"] = (25_233_141_760, 3.8)
# All parameters in the files of zai-org/GLM-4.5 and GLM-4.5-Air, and billions of parameters that a token uses, as the
# authors round them (arXiv 2508.06471, table 1: 32B and 12B).
GLM = {"glm4.5": (358_337_791_296, 32), "glm4.5_air": (110_468_824_832, 12)}
# All parameters with the biases of routers, and billions of those that a token uses. DeepSeek-V3: the figures of
# transformers' class without the block that predicts (arXiv 2412.19437: 671B, 37B). Moonlight: without embedding and
# head, as printed (arXiv 2502.16982, table 4: 15.29B, 2.24B).
LATENT = {"deepseek_v3": (671_026_419_200, 37.55), "moonlight_16b_a3b": (15_289_021_568, 2.24)}
# The files of Qwen's hub without the tensors of the block that predicts, and of its image encoder.
RECURRENT = {"qwen3_next_80b_a3b": (79_674_391_296, 3.9), "qwen3.5_9b": (8_953_803_264, 9.0)}
FILES = [*EXACT, *GPT, *SPARSE, *GLM, *LATENT, *RECURRENT]


def load(name: str) -> Model:
    return read_table(Model, tomllib.loads((FOLDER / f"{name}.toml").read_text())["model"], [])


def features(view: Model) -> tuple[Any, ...]:
    """Return what a block has, and not how much of it: blocks with the same features differ in their sizes."""
    values = (getattr(view, field.name) for field in fields(Model))
    return tuple(bool(value) if isinstance(value, int) else value for value in values if isinstance(value, (int, str)))


def features_of_blocks(name: str) -> tuple[Any, ...]:
    """Return the features of the blocks of a file: of a period of its pattern, or of the first and the last."""
    model = load(name)
    places = range(len(model.pattern)) if model.pattern else (0, model.layers - 1)
    return tuple(features(model.of_block(place)) for place in places)


MODELS_BY_FEATURES = sorted(
    {features_of_blocks(path.stem): path for path in sorted(FOLDER.glob("*.toml"))[::-1]}.values()
)
"""the first file of each set of features"""


def test_gpts_of_narayanan() -> None:
    for name, (billions, layers, hidden, heads) in GPT.items():
        model = load(name)
        sizes = (model.layers, model.hidden, model.heads, model.kv, model.ffn)
        assert sizes == (layers, hidden, heads, heads, 4 * hidden), name
        # Equation 2, 12 L h^2 (1 + 13 / 12 h + (V + s) / 12 L h), leaves the norm after the last block out: 2 h.
        equation = 12 * layers * hidden**2 + 13 * layers * hidden + (51_200 + 2048) * hidden
        assert parameter_count(model) == equation + 2 * hidden, name
        assert round(parameter_count(model) / 1e9, 1) == billions, name


def test_published_counts_of_experts() -> None:
    for name, (parameters, active_billions) in (SPARSE | RECURRENT).items():
        model = load(name)
        assert parameter_count(model) == parameters, name
        assert round(active_parameter_count(model) / 1e9, 1) == active_billions, name


@pytest.mark.parametrize("name", GLM)
def test_published_count_of_shared_experts(name: str) -> None:
    """The files of zai-org also hold a block that predicts the token after the next, and biases of the routers.

    That block has an embedding, a head, a projection of two hidden states to one, and three norms of its own.
    """
    parameters, active_billions = GLM[name]
    model = load(name)
    with_block = replace(model, layers=model.layers + 1)
    of_block = 2 * model.vocab * model.hidden + 2 * model.hidden**2 + 3 * model.hidden
    biases = (with_block.layers - model.dense_layers) * model.experts
    assert parameter_count(with_block) + of_block + biases == parameters
    ends = 2 * model.vocab * model.hidden  # embedding and head, which they leave out
    assert round((active_parameter_count(model) - ends) / 1e9) == active_billions


def test_published_count_of_latent_attention() -> None:
    for name, (parameters, active_billions) in LATENT.items():
        model = load(name)
        ends = 2 * model.vocab * model.hidden if name == "moonlight_16b_a3b" else 0
        biases = (model.layers - model.dense_layers) * model.experts
        assert parameter_count(model) + biases - ends == parameters, name
        assert round((active_parameter_count(model) - ends) / 1e9, 2) == active_billions, name


def test_published_counts_are_those_of_the_built_models() -> None:
    """Built with two blocks, or one of each place in the pattern: how a count grows with the blocks is published."""
    assert {name: parameter_count(load(name)) for name in EXACT} == EXACT
    for name in FILES:
        model = load(name)
        model = replace(model, layers=max(2, len(model.pattern)), dense_layers=min(1, model.dense_layers))
        with torch.device("meta"):
            built = build_model(model)
        assert sum(parameter.numel() for parameter in built.parameters()) == parameter_count(model), name


def test_headers_say_what_they_are() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(FILES)
    for name in FILES:
        header = (FOLDER / f"{name}.toml").read_text().split("[model]")[0]
        assert all(line.startswith("# ") for line in header.splitlines()), name
        stated = dict(re.findall(r"^# (Parameters|Active|Source): (.+)$", header, re.MULTILINE))
        model = load(name)
        counts = {"Parameters": f"{parameter_count(model):,}"}
        if model.experts:
            counts["Active"] = f"{active_parameter_count(model):,}"
        assert stated.pop("Source"), name
        assert stated == counts, name
