"""The paths of a run's config.toml mean the same from every working folder."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from torchllm.config import Config, Data, Evaluate, Model, Source, write_config
from torchllm.config.keys import IsPath, field_types, notes_on, plain_type
from torchllm.config.paths import absolute_paths, same_path
from torchllm.tools.config.load import load_config
from torchllm.tools.proof.layouts import with_settings

pytestmark = pytest.mark.quick

NAMES = {
    "cluster.name": "dgx_h100",
    "model.from_hf": "org/name",
    "checkpoint.resume": "auto",
    "data.tokenizer": "bytes",
}
"""values of keys of paths that are no paths, also where a file has that name"""


def path_keys(section: type = Config, prefix: str = "") -> Iterator[str]:
    for name, annotated in field_types(section).items():
        if is_dataclass(annotated) and isinstance(annotated, type):
            yield from path_keys(annotated, f"{prefix}{name}.")
        elif any(notes_on(kind, IsPath) for kind in (annotated, *get_args(plain_type(annotated)[0]))):
            yield prefix + name


def value_of(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def test_every_path_of_the_schema_becomes_absolute(folder: Path) -> None:
    keys = list(path_keys())
    assert {"run.folder", "data.cache", "evaluate.tasks", "finetune.chat_template", *NAMES} <= set(keys)
    (folder / "x.toml").touch()
    for key in keys:
        value: Any = ("x.toml", "arc_easy") if key == "evaluate.tasks" else "x.toml"
        absolute = (str(folder / "x.toml"), "arc_easy") if key == "evaluate.tasks" else str(folder / "x.toml")
        assert value_of(absolute_paths(with_settings(Config(), {key: value})), key) == absolute, key
    for item in fields(Config):
        section = getattr(absolute_paths(Config()), item.name)
        assert section == getattr(Config(), item.name)  # an empty path stays empty


def test_names_and_ids_stay_as_they_are(folder: Path) -> None:
    for key, name in NAMES.items():
        if key != "model.from_hf":
            (folder / name).mkdir()
        assert absolute_paths(with_settings(Config(), {key: name})) == with_settings(Config(), {key: name})
    sources = (Source(kind="hub", path="org/name"), Source(kind="stdlib"), Source(kind="megatron", path="a/*_prefix"))
    absolute = absolute_paths(Config(data=Data(sources=sources))).data.sources
    assert [source.path for source in absolute] == ["org/name", "", str(folder / "a/*_prefix")]


def test_a_run_is_the_same_from_another_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "hf").mkdir()
    (folder / "run").mkdir()
    config = Config(
        run=replace(Config().run, folder="run"),
        model=Model(from_hf="hf"),
        data=Data(sources=(Source(kind="text", path="text/**/*.txt"),), cache="cache"),
        evaluate=Evaluate(tasks=("hf", "arc_easy")),
        parallel=replace(Config().parallel, dp_shard=1),
    )
    absolute = absolute_paths(config)
    write_config(config, folder / "run/config.toml")
    monkeypatch.chdir("/")
    text = (folder / "run/config.toml").read_text()
    assert text.count(f'"{folder}/') == 5
    assert load_config([str(folder / "run/config.toml"), "--model.from_hf="]).data == absolute.data


def test_a_saved_relative_path_is_of_any_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for saved, current, are_same in (
        ("a/b", "/home/me/a/b", True),
        ("./a/b/", "/home/me/a/b", True),
        ("a/b", "/home/me/xa/b", False),
        ("/x/a/b", "/home/me/x/a/b", False),
        ("~/a", "/home/me/a", True),
        ("", "/home", False),
        ("org/name", "org/name", True),
    ):
        assert same_path(saved, current) == are_same, saved
