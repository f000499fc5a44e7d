"""A config that is written loads back as it was."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from torchllm.config import Config, MixtureStage, Parallel, Source, write_config
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


def written_and_loaded(config: Config, folder: Path) -> Config:
    """Return the written config; `config` has absolute paths."""
    write_config(config, folder / "config.toml")
    assert [path.name for path in folder.iterdir()] == ["config.toml"]
    return load_config(["config.toml"])


def usual() -> Config:
    """Return a config with a value of each kind: tables in arrays, arrays of numbers and of texts."""
    sources = (Source(kind="text", path="a", weight=0.5), Source(kind="jsonl", path="b"))
    stages = (MixtureStage(until=3, weights=(0.1, 1.0)), MixtureStage(weights=(2.0, 3.0)))
    config = Config()
    return replace(
        config,
        run=replace(config.run, folder="a"),
        data=replace(config.data, sources=sources, stage=stages),
        evaluate=replace(config.evaluate, tasks=("arc_easy", "b,c")),
        parallel=Parallel(dp_shard=1),
    )


@pytest.mark.parametrize("text", TEXTS)
def test_texts_load_back(text: str, folder: Path) -> None:
    config = usual()
    first, second = config.data.sources
    sources = (replace(first, path="x" + text), second)
    config = replace(config, data=replace(config.data, sources=sources, cache=text, tokenizer=text or "bytes"))
    config = replace(config, generate=replace(config.generate, prompt=text))
    config = absolute_paths(config)
    assert written_and_loaded(config, folder) == config


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_load_back(number: float, folder: Path) -> None:
    config = usual()
    config = absolute_paths(replace(config, optimizer=replace(config.optimizer, learning_rate=number)))
    loaded = written_and_loaded(config, folder)
    assert loaded == config
    assert type(loaded.optimizer.learning_rate) is float


@pytest.mark.parametrize("number", WHOLE_NUMBERS)
def test_whole_numbers_load_back(number: int, folder: Path) -> None:
    config = usual()
    config = absolute_paths(replace(config, run=replace(config.run, seed=number)))
    assert written_and_loaded(config, folder) == config


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
