"""Read the model of a row of measurements. No torch."""

import re
from dataclasses import replace
from functools import cache
from typing import Any, get_args

from evidence.cells import Cells
from torchllm.config import FAMILIES, Model
from torchllm.facts.flops import parameter_count
from torchllm.tools.planner.search.question import MODELS, read_model
from torchllm.tools.planner.software import Software

UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
"""letters after a number of parameters"""
SAME_MODEL = 0.3
"""largest difference of two parameter counts of one model: sources count embeddings and heads differently"""
WITHOUT_COLUMN = re.compile(r"\b(MLA|latent attention|linear attention|sliding window|sinks?)\b", re.IGNORECASE)
"""parts of a block that a table has no columns for, as notes name them"""


def model_of(cells: Cells, software: Software) -> Model:
    """Return the model of a row. ValueError says which size is missing or wrong, or which part has no column.

    It is the one of train_configs/models that the row names and whose sizes it has, whatever its blocks are made of.
    Of others the columns decide. A dense row does not say if its feed-forward layers are gated: the family is the one
    that has the published number of parameters, else the one whose usual width the row has.
    """
    sizes = _sizes(cells, software)
    named = model_named(cells.text("model"))
    if named is not None and _has_sizes(cells, named):
        return replace(named, vocab=sizes["vocab"], max_sequence_length=sizes["max_sequence_length"])
    if part := WITHOUT_COLUMN.search(cells.text("note")):
        raise ValueError(f"{part[0]}: the planner would need a file of the model in train_configs/models")
    if cells.text("experts"):
        return _model("llama", cells, {**sizes, **_experts(cells)})
    width = cells.number_or("ffn", 0)
    if not width:
        cells.assume("ffn 4 x hidden")
        return _model("gpt", cells, {**sizes, "ffn": 4 * sizes["hidden"]})
    sizes["ffn"] = width
    llama, gpt = _model("llama", cells, sizes), _model("gpt", cells, sizes)
    published = cells.number_or("n_params", 0) or count_in_name(cells.text("model"))
    if published:

        def distance(model: Model) -> float:
            return abs(parameter_count(model) / published - 1)

        closest = min(llama, gpt, key=distance)
        if distance(closest) < SAME_MODEL:  # else it is a part of the model, as one layer
            return closest
    return gpt if width == 4 * sizes["hidden"] else llama


def model_named(name: str) -> Model | None:
    """Return the model of train_configs/models that has this name, whatever its capitals, blanks and hyphens."""
    file = _model_files().get(_plain(name))
    return None if file is None else read_model(file).config.model


@cache
def _model_files() -> dict[str, str]:
    return {_plain(file.stem): file.stem for file in MODELS.glob("*.toml")}


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _has_sizes(cells: Cells, model: Model) -> bool:
    """Return whether a row has the sizes of a model: names are also given to models with fewer blocks."""
    sizes = ("layers", "hidden", "heads", "experts", "top_k")
    return all(cells.number_or(size, 0) == getattr(model, size) for size in sizes)


def _model(family: str, cells: Cells, sizes: dict[str, Any]) -> Model:
    """Return a model; where the row does not say if the embedding is tied, GPTs' are and Llamas' are not."""
    is_tied = cells.is_set("tied_emb", default=not FAMILIES[family].gated_ffn)
    return Model(family=family, tied_embeddings=is_tied, **sizes)  # type: ignore[arg-type]  # a key of FAMILIES


def _sizes(cells: Cells, software: Software) -> dict[str, Any]:
    """Return the keys of [model] that dense models and mixtures of experts share."""
    vocab = cells.number_or("vocab", 0)
    if not vocab:
        vocab = software.default_vocab
        cells.assume(f"vocab {vocab:,}")
    sizes: dict[str, Any] = {
        "layers": cells.count("layers"),
        "hidden": cells.count("hidden"),
        "heads": cells.count("heads"),
        "kv_heads": cells.number_or("kv_heads", 0),
        "head_dim": cells.number_or("head_dim", head_dim_in_note(cells.text("note"))),
        "qkv_bias": cells.is_set("qkv_bias"),
        "window": cells.number_or("window", 0),
        "vocab": vocab,
        "max_sequence_length": cells.count("seq_len"),
    }
    for key in ("qk_norm", "norm_position"):
        value = cells.text(key) or getattr(Model(), key)
        choices = get_args(Model.__annotations__[key])
        if value not in choices:
            raise ValueError(f"{key} = {value!r} is not one of {', '.join(choices)}")
        sizes[key] = value
    return sizes


def _experts(cells: Cells) -> dict[str, int]:
    """Return the keys of [model] that only a mixture of experts has.

    Latent attention (as of DeepSeek-V3, arXiv 2412.19437) has no key and value heads, so tables leave that cell empty.
    The planner has no formula for it.
    """
    if not cells.text("kv_heads"):
        raise ValueError("latent attention (experts, and kv_heads is empty): the planner does not know it")
    width = cells.number("moe_ffn")
    dense = cells.number_or("dense_layers", 0)
    ffn = cells.number("ffn") if dense else cells.number_or("ffn", width)
    return {
        "experts": cells.count("experts"),
        "top_k": cells.count("top_k"),
        "expert_ffn": width,
        "shared_experts": cells.number_or("shared_experts", 0),
        "dense_layers": dense,
        "ffn": ffn,
    }


def head_dim_in_note(note: str) -> int:
    """Return N if a note says "head_dim N", as tables without that column do; 0: the heads divide the hidden width."""
    match = re.search(r"\bhead_dim (\d+)", note)
    return int(match[1]) if match else 0


def count_in_name(name: str) -> float:
    """Return the number of parameters that a model's name has, such as 7e9 of "Llama 7B"; 0 if it has none."""
    match = re.search(r"([\d.]+)\s*([BTM])\b", name, re.IGNORECASE)
    if match is None:
        return 0.0
    return float(match[1]) * UNITS[match[2].upper()]
