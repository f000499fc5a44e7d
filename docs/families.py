"""Print the families of published models: their parts as keys of [model], the models whose sizes are tested, what is
left out. A page of docs/ quotes it.

    python -m docs.families
"""

import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tests.tools.hub.published_sizes import PUBLISHED
from torchllm.config import Model
from torchllm.tools.config.read import read_table
from torchllm.tools.hub.config_json import FREE_KEYS, NoFamily, family_to_export, read_config_json
from torchllm.tools.hub.families.family import HubFamily
from torchllm.tools.hub.families.registry import HUB_FAMILIES
from torchllm.tools.hub.families.text_part import TEXT_PARTS

SIZES = {"layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "expert_ffn", "vocab", "max_sequence_length"}
SIZES |= {"norm_epsilon", "initial_std", "rope_theta", "tied_embeddings", "experts", "top_k", "router_scale"}
"""keys of [model] that are numbers of any model, or that all models with experts have"""
INDENT = 14


def parts(family: HubFamily) -> Iterator[str]:
    """Yield the keys of [model] in which the family's models differ from the debug model, with their values."""
    model = Model(**read_config_json({"model_type": family.model_type}).values)
    if model.experts:
        yield "experts"
    for key, value in vars(model).items():
        default = getattr(Model, key, None)
        if key not in SIZES | FREE_KEYS and value != default:
            yield f"{key} = {value}"
    for kind, keys in model.kinds.items():
        yield f"{kind}: {', '.join(f'{key} = {value}' for key, value in keys.items()) or 'the same without'}"


def choices(family: HubFamily) -> Iterator[str]:
    """Yield the keys of [model] that config.json may set."""
    for config_field in family.fields:
        if config_field.key not in SIZES:
            yield config_field.key
    if family.rotary_fraction is not None:
        yield "rotary_fraction"


def tested_sizes() -> dict[str, list[str]]:
    """Return the published models whose number of parameters is tested, by model_type."""
    names: dict[str, list[str]] = defaultdict(list)
    for file in sorted(Path("train_configs/models").glob("*.toml")):  # tests/facts/test_model_sizes.py
        if "debug" in file.stem:
            continue
        model = read_table(Model, tomllib.loads(file.read_text())["model"], [])
        few_blocks = replace(model, layers=max(1, len(model.pattern)) + model.dense_layers)  # each is compared
        with suppress(NoFamily):
            names[family_to_export(few_blocks).model_type].append(file.stem)
    for name, published in PUBLISHED.items():
        of_type = names[published.fields["model_type"]]
        if name not in of_type:
            of_type.append(name)
    return names


def main() -> None:
    sizes = tested_sizes()
    for model_type, family in HUB_FAMILIES.items():
        rows = {
            "parts": ", ".join(parts(family)),
            "may have": ", ".join(choices(family)),
            "sizes": ", ".join(sizes[model_type]),
            "left out": "blocks that predict further tokens"
            * (family.has_prediction_blocks and "num_nextn_predict_layers" not in family.field_names),
        }
        print(model_type)
        for name, text in rows.items():
            if text:
                indent = " " * INDENT
                print(textwrap.fill(text, 86, initial_indent=f"  {name}".ljust(INDENT), subsequent_indent=indent))
    print(f"the text models within {', '.join(TEXT_PARTS)}")


if __name__ == "__main__":
    main()
