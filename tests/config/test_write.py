"""A config that is written loads back as it was."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchllm.config import (
    Config,
    Generate,
    Metrics,
    MixtureStage,
    Optimizer,
    Parallel,
    Run,
    Source,
    load_config,
    write_config,
)
from torchllm.config.inert import contradictions
from torchllm.config.read import field_types, plain_type
from torchllm.config.write import dump_toml

pytestmark = pytest.mark.quick


def values_of(annotated: Any) -> st.SearchStrategy[Any]:
    """Return the values that a field may have."""
    kind, bound = plain_type(annotated)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        return st.lists(values_of(get_args(kind)[0]), min_size=1, max_size=3).map(tuple)
    if kind is bool:
        return st.booleans()
    if kind is int:
        lowest = max(bound.at_least, -(2**63))
        highest = min(bound.at_most, 2**63 - 1)
        return st.integers(int(lowest), int(highest))
    if kind is float:
        lowest = max(bound.at_least, bound.over, -1e308)
        highest = min(bound.at_most, 1e308)
        return st.floats(lowest, highest, exclude_min=bound.over == lowest)
    if kind is str:
        return st.text(st.characters(codec="utf-8"))
    return tables_of(kind)


def tables_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return the dataclasses of one kind with every possible value."""
    keys = {name: values_of(annotated) for name, annotated in field_types(kind).items()}
    return st.builds(kind, **keys)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Draw a config with every kind of value, in keys that need nothing of others."""
    config = Config()
    sources = tuple(replace(source, path=source.path or "x") for source in draw(values_of(tuple[Source, ...])))
    data = replace(
        config.data,
        sources=sources,
        tokenizer=draw(values_of(str)),
        cache=draw(values_of(str)),
        dtype="uint16",
        separator=7,
        document_mask=True,  # conversations need it
        stage=(MixtureStage(until=3, weights=(0.1,) * len(sources)), MixtureStage(weights=(2.0,) * len(sources))),
    )
    free = replace(
        config,
        run=Run(folder="a", seed=draw(values_of(field_types(Run)["seed"])), timeout=draw(st.floats(0.1, 1e308))),
        data=data,
        optimizer=draw(tables_of(Optimizer)),
        compile=replace(config.compile, block=draw(st.booleans()), loss=draw(st.booleans())),
        metrics=replace(draw(tables_of(Metrics)), profile_steps=draw(st.sampled_from(["", "10:13"]))),
        generate=draw(tables_of(Generate)),
        parallel=Parallel(dp_shard=1),
    )
    return without_contradictions(free)


def without_contradictions(config: Config) -> Config:
    """Set the keys that contradict others to their defaults."""
    for inert in contradictions(config):
        section, *element, key = inert.key.split(".")
        table = getattr(config, section)
        if element:
            sources = list(table.sources)
            index = int(element[1])
            sources[index] = replace(sources[index], **{key: getattr(Source(), key)})
            changed: dict[str, Any] = {"sources": tuple(sources)}
        else:
            changed = {key: getattr(type(table)(), key)}
        changed_section: dict[str, Any] = {section: replace(table, **changed)}
        config = replace(config, **changed_section)
    return config


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configs())
def test_written_config_loads_back(config: Config, folder: Path) -> None:
    write_config(config, folder / "config.toml")
    assert load_config(["config.toml"]) == config
    assert [path.name for path in folder.iterdir()] == ["config.toml"]


def test_every_field_is_written() -> None:
    text = dump_toml(Config())
    for section in fields(Config):
        for item in fields(getattr(Config(), section.name)):
            written = rf"^({item.name} = |\[\[{section.name}\.{item.name}\]\])"
            assert re.search(written, text, re.MULTILINE), item.name
