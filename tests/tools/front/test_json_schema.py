"""docs/config.schema.json: what editors know of the TOML file."""

import json
from dataclasses import asdict, dataclass, field

import pytest

from tests.tiny_run import ROOT
from torchllm.config import Config, Source
from torchllm.tools.front.json_schema import json_schema

pytestmark = pytest.mark.quick


def test_the_committed_file_is_current() -> None:
    committed = (ROOT / "docs/config.schema.json").read_text()
    assert committed == json.dumps(json_schema(), indent=2) + "\n", (
        "regenerate it: python -P -m torchllm.tools.front.json_schema > docs/config.schema.json"
    )


def test_what_it_says_of_keys() -> None:
    sections = json_schema()["properties"]
    assert sections["base"]["type"] == "string"
    steps = sections["training"]["properties"]["steps"]
    assert steps == {"type": "integer", "minimum": 1, "description": "optimizer steps", "default": 1000}
    rate = sections["optimizer"]["properties"]["learning_rate"]
    assert (rate["type"], rate["exclusiveMinimum"], rate["default"]) == ("number", 0.0, 3e-4)
    mode = sections["recompute"]["properties"]["mode"]
    assert mode["enum"] == ["none", "full", "segment", "every_k", "ffn", "selective", "selective_half"]
    sources = sections["data"]["properties"]["sources"]
    assert sources["items"]["properties"]["kind"]["default"] == "stdlib"
    assert sources["default"] == [asdict(Source())]
    assert sections["training"]["additionalProperties"] is False


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
