"""The config that run_train.sh hands to its ranks."""

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.tiny_run import ROOT
from torchllm.config import Config, Source
from torchllm.config.applied_keys import refuse_unapplied
from torchllm.config.environment import HANDED
from torchllm.config.errors import UserError
from torchllm.tools.config.refuse import hand_over
from torchllm.tools.front.start import handed_configs, load_configs

pytestmark = pytest.mark.quick

WORDS = ["mine.toml", "--training.steps=3"]


@dataclass(frozen=True)
class Own:
    weight: float = 0.0


@dataclass(frozen=True)
class Forked(Config):
    own: Own = field(default_factory=Own)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HANDED, str(tmp_path / "config.json"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    return tmp_path / "config.json"


def test_ranks_read_what_was_checked(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Forked(own=Own(0.1))
    first = replace(first, data=replace(first.data, sources=(Source(kind="text", path="a b"), Source(weight=1e-7))))
    second = replace(first, run=replace(first.run, seed=7))
    assert handed_configs(WORDS, Forked) is None  # none was handed
    file.touch()
    assert handed_configs(WORDS, Forked) is None  # as run_train.sh makes it
    hand_over([first, second], {}, [*WORDS, "--check"])
    assert handed_configs(WORDS, Forked) == [first, second]
    assert handed_configs([*WORDS, "--run.folder=runs/a"], Forked) == [first, second]
    assert handed_configs([*WORDS, "--run.seed=1"], Forked) is None  # of another command
    monkeypatch.setattr(os, "getuid", lambda: os.stat(file).st_uid + 1)
    assert handed_configs(WORDS, Forked) is None  # it is another user's
    file.unlink()  # a cleaned temporary folder: the ranks read their command line
    assert handed_configs(WORDS, Forked) is None


def test_a_process_that_is_no_rank_reads_its_command_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over([Config()], {}, WORDS)
    monkeypatch.delenv("WORLD_SIZE")
    assert handed_configs(WORDS, Config) is None


def test_the_check_hands_over_and_ranks_neither_plan_nor_check(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("NPROC", "2")
    words = [str(ROOT / "train_configs/debug.toml"), "--parallel.layout=tune", f"--run.folder={file.parent / 'run'}"]
    with pytest.raises(SystemExit) as done:
        load_configs([*words, "--check"])
    assert done.value.code == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delitem(sys.modules, "torchllm.tools.planner.search.auto")
    configs = load_configs(words)
    assert len(configs) > 1
    assert all(config.parallel.ranks == 2 for config in configs)
    assert "torchllm.tools.planner.search.auto" not in sys.modules


def test_a_refused_key_is_still_named_with_its_line(file: Path) -> None:
    config = Config(checkpoint=replace(Config().checkpoint, initial="runs/a"))
    hand_over([config], {"checkpoint.initial": "mine.toml:7"}, WORDS)
    [read] = handed_configs(WORDS, Config) or []
    with pytest.raises(UserError, match=r"mine\.toml:7: checkpoint\.initial"):
        refuse_unapplied(read)
