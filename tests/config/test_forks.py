"""A forked recipe's config: sections and keys of its own."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from tests.config.conftest import refusal
from torchllm.config import Bound, Config, Training, write_config
from torchllm.config.paths import absolute_paths
from torchllm.tools.config.load import load_config

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Teacher:
    """A model to learn from."""

    path: str = ""
    """where it is"""


@dataclass(frozen=True)
class Distill:
    """Learning from another model."""

    teachers: tuple[Teacher, ...] = ()
    """one table each"""
    main: Teacher = field(default_factory=Teacher)
    """the first"""
    layers: tuple[Annotated[int, Bound(at_least=0)], ...] = (1, 2)
    """blocks to match"""
    power: Literal[1, 2] = 2
    """of the distance"""


@dataclass(frozen=True)
class MyTraining(Training):
    """With one key more."""

    patience: float = 0.5
    """how long"""


@dataclass(frozen=True)
class MyConfig(Config):
    training: MyTraining = field(default_factory=MyTraining)
    distill: Distill = field(default_factory=Distill)


def test_forked_schema(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.toml").write_text(
        "[training]\npatience = 1\n[distill]\nlayers = [\n0,\n3]\nmain.path = 'a'\n[[distill.teachers]]\npath = 'b'\n"
    )
    config = load_config(["x.toml", "--run.folder=a", "--distill.power=1"], MyConfig)
    assert config.training.patience == 1.0
    assert config.distill == Distill((Teacher("b"),), Teacher("a"), (0, 3), 1)
    write_config(config, folder / "again.toml")
    assert load_config(["again.toml"], MyConfig) == absolute_paths(config)

    arguments = ["x.toml", "--distill.layers.1=-1", "--distill.power=3", "--distill.main.pth=a", "--data.patience=2"]
    assert refusal(capsys, lambda: load_config(arguments, MyConfig)) == [
        "--distill.layers.1: must be a whole number of at least 0, not -1",
        "--distill.main.pth: unknown key; did you mean distill.main.path?",
        "--distill.power: must be one of 1, 2, not 3",
        "--data.patience: unknown key; did you mean training.patience?",
    ]
    with pytest.raises(SystemExit):
        load_config(["--help"], MyConfig)
    help_text = capsys.readouterr().out
    assert "distill.main.path" in help_text
    assert "training.patience = 0.5    (a number)\n      how long" in help_text
    assert "training.steps = 1000" in help_text
    assert "model.kinds = {}    (tables of keys of [model])\n      [model.kinds.NAME]: the keys of" in help_text


def test_schema_that_toml_cannot_fill(folder: Path) -> None:
    kinds: list[Any] = [dict[str, int], int | None, list[int], tuple[int, int], tuple[tuple[int, ...], ...]]
    for kind, fields, message in [
        *((kind, {"x": None}, "cannot be") for kind in kinds),
        (int, {}, "x needs a default"),
    ]:
        bad: Any = dataclass(frozen=True)(type("Bad", (), {"__annotations__": {"x": kind}, **fields}))
        members = {"__annotations__": {"bad": bad}, "bad": bad() if fields else None}
        schema: Any = dataclass(frozen=True)(type("BadConfig", (Config,), members))
        with pytest.raises(TypeError, match=message):
            load_config([], schema)
