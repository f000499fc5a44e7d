"""A config that is written loads back as it was."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchllm.config import Config, Parallel, Run, Source, load_config, write_config
from torchllm.config.inert import contradictions
from torchllm.config.read import field_types, plain_type
from torchllm.config.write import dump_toml


def _values(annotated: Any) -> st.SearchStrategy[Any]:
    kind, bound = plain_type(annotated)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        return st.lists(_values(get_args(kind)[0]), min_size=1, max_size=3).map(tuple)
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(int(max(bound.at_least, -(2**63))), int(min(bound.at_most, 2**63 - 1)))
    if kind is float:
        low = max(bound.at_least, bound.over, -1e308)
        return st.floats(low, min(bound.at_most, 1e308), exclude_min=bound.over == low)
    if kind is str:
        return st.text(st.characters(codec="utf-8"))
    return st.builds(kind, **{name: _values(item) for name, item in field_types(kind).items()})


# These may take any value without a problem between keys, and are all kinds of value there are.
FREE = st.builds(
    Config,
    run=st.builds(Run, folder=st.just("a"), seed=_values(field_types(Run)["seed"]), timeout=_values(float)),
    data=st.builds(
        lambda sources, tokenizer, cache: replace(Config().data, sources=sources, tokenizer=tokenizer, cache=cache),
        st.lists(_values(Source), min_size=1, max_size=3).map(
            lambda items: tuple(replace(item, path=item.path or "x") for item in items)
        ),
        _values(str),
        _values(str),
    ),
    optimizer=_values(type(Config().optimizer)),
    compile=st.builds(
        lambda block, loss: replace(Config().compile, block=block, loss=loss), st.booleans(), st.booleans()
    ),
    metrics=st.builds(
        lambda metrics, steps: replace(metrics, profile_steps=steps),
        _values(type(Config().metrics)),
        st.sampled_from(["", "10:13"]),
    ),
    generate=_values(type(Config().generate)),
    parallel=st.just(Parallel(dp_shard=1)),
)


def without_contradictions(config: Config) -> Config:
    """Set keys that do nothing, for another key says so, to their defaults."""
    for inert in contradictions(config):
        section, *place, key = inert.key.split(".")
        table = getattr(config, section)
        if place:
            index = int(place[1])
            source = replace(table.sources[index], **{key: getattr(Source(), key)})
            changed: Any = {"sources": (*table.sources[:index], source, *table.sources[index + 1 :])}
        else:
            changed = {key: getattr(type(table)(), key)}
        changed_section: Any = {section: replace(table, **changed)}
        config = replace(config, **changed_section)
    return config


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=FREE.filter(lambda config: config.run.timeout > 0))
def test_written_config_loads_back(config: Config, folder: Path) -> None:
    config = without_contradictions(config)
    write_config(config, folder / "config.toml")
    assert load_config(["config.toml"]) == config
    assert [path.name for path in folder.iterdir()] == ["config.toml"]


def test_every_field_is_written() -> None:
    text = dump_toml(Config())
    for section in fields(Config):
        for item in fields(getattr(Config(), section.name)):
            assert re.search(rf"^({item.name} = |\[\[{section.name}\.{item.name}\]\])", text, re.MULTILINE), item.name
