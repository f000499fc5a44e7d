"""docs/config.schema.json: what editors know of the TOML file."""

import json
from dataclasses import dataclass, field

import pytest

from tests.test_docs import load_script
from tests.tiny_run import ROOT
from torchllm.config import Config
from torchllm.config.schema import KIND_KEYS

pytestmark = pytest.mark.quick
json_schema = load_script("json_schema").json_schema


def test_the_committed_file_is_current() -> None:
    committed = (ROOT / "docs/config.schema.json").read_text()
    assert committed == json.dumps(json_schema(), indent=2) + "\n", (
        "regenerate it: python docs/json_schema.py > docs/config.schema.json"
    )


@dataclass(frozen=True)
class Distill:
    """Learning from another model."""

    layers: tuple[int, ...] = (1, 2)
    """blocks to match"""


@dataclass(frozen=True)
class ForkedConfig(Config):
    distill: Distill = field(default_factory=Distill)


def test_a_forked_recipes_section() -> None:
    section = json_schema(ForkedConfig)["properties"]["distill"]
    assert section["description"] == "Learning from another model."
    assert section["properties"]["layers"] == {
        "type": "array",
        "items": {"type": "integer"},
        "description": "blocks to match",
        "default": [1, 2],
    }


def test_a_kind_of_blocks_has_some_keys_of_the_model() -> None:
    model = json_schema()["properties"]["model"]["properties"]
    table = model["kinds"]["additionalProperties"]
    assert table["properties"].keys() == set(KIND_KEYS)
    assert table["properties"]["window"] == {"type": "integer", "minimum": 0}
    assert not table["additionalProperties"]
    assert model["pattern"]["items"] == {"type": "string"}
