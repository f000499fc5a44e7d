"""A config that is written loads back as it was."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from torchllm.config import Config, Kinds, MixtureStage, Parallel, Source, write_config
from torchllm.config.paths import absolute_paths
from torchllm.config.write import dump_toml
from torchllm.tools.config.load import load_config

pytestmark = pytest.mark.quick

TEXTS = (
    "",
    " a = b # [c]",
    'say "so"',
    "it's",
    "'''",
    '"""',
    "back\\slash\\n",
    "two\nlines\r\n",
    "\t\b\f\x00\x1f\x7f\x85\u2028",
    "ä 漢 🙂 \ufeff \uffff",
)
NUMBERS = (5e-324, 1e-308, 0.1, 1 / 3, 1e-5, 1e16, 1e22, 1.7976931348623157e308)
WHOLE_NUMBERS = (0, 1, 2**53 + 1, 2**63 - 1)


def usual() -> Config:
    """Return a config with a value of each kind: tables in arrays and in tables, arrays of numbers and of texts."""
    sources = (Source(kind="text", path="a", weight=0.5), Source(kind="jsonl", path="b"))
    stages = (MixtureStage(until=3, weights=(0.1, 1.0)), MixtureStage(weights=(2.0, 3.0)))
    kinds = Kinds({"local": {"window": 8, "rope_truncate": False, "rope_scaling": "yarn"}, "1-global": {}})
    config = Config()
    return replace(
        config,
        run=replace(config.run, folder="a"),
        model=replace(config.model, pattern=("local", "1-global"), kinds=kinds, rope_scaling_factor=8.0),
        data=replace(config.data, sources=sources, stage=stages),
        evaluate=replace(config.evaluate, tasks=("arc_easy", "b,c")),
        parallel=Parallel(dp_shard=1),
    )


def test_values_load_back(folder: Path) -> None:
    first, second = usual().data.sources
    configs = []
    for text in TEXTS:
        sources = (replace(first, path="x" + text), second)
        data = replace(usual().data, sources=sources, cache=text, tokenizer=text or "bytes")
        configs.append(replace(usual(), data=data, generate=replace(usual().generate, prompt=text)))
    configs += [replace(usual(), optimizer=replace(usual().optimizer, learning_rate=number)) for number in NUMBERS]
    configs += [replace(usual(), run=replace(usual().run, seed=number)) for number in WHOLE_NUMBERS]
    for config in map(absolute_paths, configs):
        write_config(config, folder / "config.toml")
        assert [path.name for path in folder.iterdir()] == ["config.toml"]
        loaded = load_config(["config.toml"])
        assert loaded == config
        assert type(loaded.optimizer.learning_rate) is float


def test_every_field_is_written() -> None:
    text = dump_toml(Config())
    for section in fields(Config):
        for item in fields(getattr(Config(), section.name)):
            written = rf"^({item.name} = |\[\[{section.name}\.{item.name}\]\])"
            assert re.search(written, text, re.MULTILINE), item.name


def test_the_config_of_a_copied_run_is_of_the_copy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("runs/a", "runs/copy"):
        (folder / name / "checkpoints/step-00000001").mkdir(parents=True)
        config = replace(usual(), run=replace(usual().run, folder="runs/a"))
        write_config(config, folder / name / "config.toml")
    assert load_config(["runs/a/config.toml"]).run.folder == str(folder / "runs/a")
    assert capsys.readouterr().err == ""
    assert load_config(["runs/copy/config.toml"]).run.folder == "runs/copy"
    assert f'run.folder: is "{folder}/runs/a", which is another folder: runs/copy is used' in capsys.readouterr().err
    assert load_config(["runs/copy/config.toml", "--run.folder=runs/b"]).run.folder == "runs/b"
    (folder / "runs/a").rename(folder / "runs/renamed")
    assert load_config(["runs/renamed/config.toml"]).run.folder == "runs/renamed"
    assert capsys.readouterr().err == ""
    (folder / "runs/copy/checkpoints/step-00000001").rmdir()  # no run, only a config that lies there
    assert load_config(["runs/copy/config.toml"]).run.folder == str(folder / "runs/a")
