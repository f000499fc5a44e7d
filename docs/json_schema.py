"""Print the JSON schema of a run's TOML file, which editors use to complete and check keys.

    python docs/json_schema.py > docs/config.schema.json

Editors that use Taplo or Tombi (VS Code's "Even Better TOML", for example) read the name of the schema from a comment
at the top of a TOML file: `#:schema ../docs/config.schema.json`, a path relative to that file, or a URL.
"""

import json
import math
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

from torchllm.config.keys import Bound, field_types, plain_type
from torchllm.config.schema import KIND_KEYS, Config, Kinds, Model
from torchllm.tools.config.draft import plain_value
from torchllm.tools.config.help import field_docs

JsonSchema = dict[str, Any]
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def json_schema(schema: type[Config] = Config) -> JsonSchema:
    """Return the JSON schema (draft 7) of a run's TOML file; `schema` may be a forked recipe's config."""
    table = _table_schema(schema)
    base = {
        "type": "string",
        "description": "parent TOML file, relative to this one; keys of this file replace its keys",
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "torchllm run",
        **table,
        "properties": {"base": base, **table["properties"]},
    }


def _table_schema(schema: type) -> JsonSchema:
    types = field_types(schema)
    docs = field_docs(schema)
    defaults = schema()
    properties = {}
    for field in fields(schema):
        value = _value_schema(types[field.name])
        if field.name in docs:
            value["description"] = " ".join(docs[field.name].split())
        default = getattr(defaults, field.name)
        if not is_dataclass(default):
            value["default"] = plain_value(default)
        properties[field.name] = value
    return {
        "type": "object",
        "description": " ".join((schema.__doc__ or "").split()),
        "properties": properties,
        "additionalProperties": False,
    }


def _value_schema(annotated: Any) -> JsonSchema:
    kind, bound = plain_type(annotated)
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _value_schema(get_args(kind)[0])}
    if is_dataclass(kind) and isinstance(kind, type):
        return _table_schema(kind)
    if kind is Kinds:
        keys = {key: _value_schema(field_types(Model)[key]) for key in KIND_KEYS}
        table = {"type": "object", "properties": keys, "additionalProperties": False}
        return {"type": "object", "additionalProperties": table}
    return {"type": NAMES[kind], **_limits(bound)}


def _limits(bound: Bound) -> JsonSchema:
    limits = {}
    if bound.at_least > -math.inf:
        limits["minimum"] = bound.at_least
    if bound.at_most < math.inf:
        limits["maximum"] = bound.at_most
    if bound.over > -math.inf:
        limits["exclusiveMinimum"] = bound.over
    return limits


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
