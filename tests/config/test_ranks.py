"""The number of ranks, the run folder, and what --check prints, for an environment of a launcher."""

import re
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from tests.config.conftest import refusal
from torchllm.config import Parallel
from torchllm.tools.config import refuse
from torchllm.tools.config.load import load_config

pytestmark = pytest.mark.quick

UNKNOWN_RANKS = "is -1, but the number of ranks is unknown: set NPROC (and NNODES), or give a degree"


class Refusal(NamedTuple):
    """An environment that is refused."""

    environment: dict[str, str]
    arguments: list[str]
    lines: list[str]
    """what is on stderr"""


REFUSALS = {
    "WORLD_SIZE": Refusal(
        {"WORLD_SIZE": "two"},
        [],
        ['environment: WORLD_SIZE: must be a whole number of at least 1, not "two"'],
    ),
    "NNODES and NPROC": Refusal(
        {"NNODES": "0", "NPROC": "-1"},
        ["--check"],
        [
            'environment: NNODES: must be a whole number of at least 1, not "0"',
            'environment: NPROC: must be a whole number of at least 1, not "-1"',
        ],
    ),
    "not known": Refusal({}, ["--check"], [f"x.toml: parallel.dp_shard: {UNKNOWN_RANKS}"]),
    "not started": Refusal(
        {},
        ["--parallel.dp_shard=4"],
        ["x.toml: needs 4 ranks: start it with NPROC=4 ./run_train.sh x.toml --parallel.dp_shard=4"],
    ),
    "not started on two nodes": Refusal(
        {"NNODES": "2", "NPROC": "4", "SLURM_JOB_ID": "7"},
        [],
        ["x.toml: needs 8 ranks: start it with NPROC=4 ./run_train.sh x.toml"],
    ),
    "nodes that share unevenly": Refusal(
        {"NNODES": "3"},
        ["--check", "--parallel.dp_shard=4", "--run.folder=a"],
        ["environment: NNODES: 3 nodes cannot share 4 ranks evenly"],
    ),
    "no common folder": Refusal(
        {"NNODES": "2", "NPROC": "1", "TORCHELASTIC_RUN_ID": "none"},
        ["--check"],
        ["x.toml: run.folder: set it: there is no job id to name the folder after on all ranks"],
    ),
    "no common folder of ranks": Refusal(
        {"WORLD_SIZE": "2"},
        [],
        ["x.toml: run.folder: set it: there is no job id to name the folder after on all ranks"],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_ranks(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment, arguments, expected = REFUSALS[name]
    (folder / "x.toml").write_text("")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(sys, "argv", ["recipes/pretrain.py"])
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert refusal(capsys, lambda: load_config(["x.toml", *arguments])) == expected


def test_a_fork_is_told_to_start_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(sys, "argv", ["recipes/mine.py"])
    lines = refusal(capsys, lambda: load_config(["--parallel.dp_shard=2"]))
    assert lines == [
        "defaults: needs 2 ranks: start it with RECIPE=recipes/mine.py NPROC=2 ./run_train.sh --parallel.dp_shard=2"
    ]


def test_only_one_process_of_a_node_speaks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert refusal(capsys, lambda: load_config(["--training.steps=0"])) == []


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({"WORLD_SIZE": "6", "NNODES": "3", "NPROC": "9"}, 6),
        ({"WORLD_SIZE": "1"}, 1),
        ({"NPROC": "1"}, 1),
    ],
)
def test_open_degree_is_filled_in(
    environment: dict[str, str], world: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    config = load_config(["--run.folder=a", f"--training.global_batch_size={world}"])
    assert config.parallel == Parallel(dp_shard=world)


@pytest.mark.parametrize(
    ("environment", "arguments", "degrees"),
    [
        ({}, ["--parallel.pp=16", "--parallel.dp_shard=128", "--parallel.tp=8"], (16, 1, 128, 1, 8)),
        ({"NPROC": "8", "NNODES": "4"}, [], (1, 1, 32, 1, 1)),
        ({"WORLD_SIZE": "2", "NPROC": "4"}, [], (1, 1, 4, 1, 1)),  # it is no rank of the job that starts it
        ({"NPROC": "2", "NPROC_IS_DEFAULT": "1"}, ["--parallel.dp_shard=64"], (1, 1, 64, 1, 1)),
    ],
)
def test_a_dry_run_is_of_any_number_of_ranks(
    environment: dict[str, str],
    arguments: list[str],
    degrees: tuple[int, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    big = ["--model.layers=16", "--training.global_batch_size=2048", "--run.dry_run=true"]
    parallel = load_config([*big, *arguments]).parallel
    assert (parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp) == degrees
    assert list(folder.iterdir()) == []


def test_a_dry_run_needs_to_know_its_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setenv("NPROC_IS_DEFAULT", "1")
    with pytest.raises(SystemExit):
        load_config(["--run.dry_run=true"])
    assert capsys.readouterr().err == f"defaults: parallel.dp_shard: {UNKNOWN_RANKS}\n"


def test_check_and_json_of_a_dry_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_config(["--run.dry_run=true", "--json", "--parallel.dp_shard=1", "--check"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == "DRY_RUN=1"
    assert load_config(["--run.dry_run=true", "--json", "--parallel.dp_shard=1"]).run.json


def check_lines(
    arguments: list[str], capsys: pytest.CaptureFixture[str], *optional: str
) -> tuple[dict[str, str], list[str]]:
    """Return what --check prints on stdout, by key, and its lines on stderr. optional: further keys."""
    with pytest.raises(SystemExit) as stop:
        load_config([*arguments, "--check"])
    assert stop.value.code == 0
    out, err = capsys.readouterr()
    lines = [line.partition("=") for line in out.splitlines()]
    assert [key for key, _, _ in lines] == ["NPROC", "RUN_FOLDER", "SAMPLE", "START_TIMEOUT", *optional]
    return {key: value for key, _, value in lines}, err.splitlines()


class Check(NamedTuple):
    """What --check prints for x.toml."""

    environment: dict[str, str]
    arguments: list[str]
    processes: str
    """NPROC= on stdout"""
    lines: list[str]
    """what is on stderr"""


CHECKS = {
    "as many as there are": Check(
        {"NPROC": "2"},
        [],
        "2",
        ["global batch 16 sequences = 2 data ranks x 4 micro batch x 2 accumulated"],
    ),
    "the product": Check(
        {},
        ["--parallel.dp_shard=2", "--parallel.tp=2"],
        "4",
        ["global batch 16 sequences = 2 data ranks x 4 micro batch x 2 accumulated"],
    ),
    "lowered for tp": Check(
        {"NPROC": "3"},
        ["--run.lower_ranks=true", "--parallel.tp=2"],
        "2",
        [
            "3 processes do not divide into the degrees of [parallel]: starting 2",
            "global batch 16 sequences = 1 data ranks x 4 micro batch x 4 accumulated",
        ],
    ),
    "lowered on two nodes": Check(
        {"NNODES": "2", "NPROC": "8", "SLURM_JOB_ID": "1"},
        ["--run.lower_ranks=true"],
        "2",
        [
            "8 processes do not divide the batch of 16 sequences: starting 2",
            "global batch 16 sequences = 4 data ranks x 4 micro batch x 1 accumulated",
        ],
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    environment, arguments, processes, expected = CHECKS[name]
    (folder / "x.toml").write_text("[training]\nmicro_batch_size = 4\nglobal_batch_size = 16")
    monkeypatch.delenv("WORLD_SIZE")
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    out, err = check_lines(["x.toml", *arguments], capsys)
    assert (out["NPROC"], out["SAMPLE"], err) == (processes, "0", expected)


def node_counts(
    nodes: str, processes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, list[str]]:
    """Return the exit status and the lines of --check with a range of nodes."""
    monkeypatch.setenv("NNODES", nodes)
    monkeypatch.setenv("NPROC", processes)
    with pytest.raises(SystemExit) as stop:
        load_config(["x.toml", "--check", *arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return int(stop.value.code or 0), out.splitlines()


def test_check_tells_which_numbers_of_nodes_the_batch_allows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").write_text(
        "[training]\nmicro_batch_size = 2\nglobal_batch_size = 16\n[parallel]\ndp_shard = 2\ndp_replicate = -1"
    )
    monkeypatch.delenv("WORLD_SIZE")
    status, lines = node_counts("2-4", "2", monkeypatch, capsys)
    assert (status, lines) == (
        0,
        [
            "4 nodes x 2 processes: global batch 16 sequences = 8 data ranks x 2 micro batch x 1 accumulated",
            "3 nodes x 2 processes: no: training.global_batch_size: 16 is no multiple of micro_batch_size 2 x 6 "
            "data-parallel ranks = 12",
            "2 nodes x 2 processes: global batch 16 sequences = 4 data ranks x 2 micro batch x 2 accumulated",
        ],
    )
    assert node_counts("3-3", "2", monkeypatch, capsys)[0] == 2  # none is allowed
    _, lines = node_counts("1-1", "3", monkeypatch, capsys, "--run.lower_ranks=true")
    assert lines == ["1 node x 2 processes: global batch 16 sequences = 2 data ranks x 2 micro batch x 4 accumulated"]


@pytest.mark.parametrize(
    ("nodes", "processes", "arguments", "training", "line"),
    [
        ("3", "2", [], "2", "3 nodes do not divide the batch of 16 sequences: 2 of them train, 1 waits; "
         "all would train with 4 nodes"),
        ("3", "3", ["--run.lower_ranks=true"], "2",
         "3 nodes do not divide the batch of 16 sequences: 2 of them train, 1 waits"),
        ("3", "2", ["--parallel.tp=4"], "2", "3 nodes do not divide into the degrees of [parallel]: "
         "2 of them train, 1 waits; all would train with 4 nodes"),
    ],
)  # fmt: skip
def test_of_more_nodes_than_share_the_batch_the_largest_number_trains(
    nodes: str,
    processes: str,
    arguments: list[str],
    training: str,
    line: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "x.toml").write_text("[training]\nmicro_batch_size = 1\nglobal_batch_size = 16\n[model]\nkv_heads = 4")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("NNODES", nodes)
    monkeypatch.setenv("NPROC", processes)
    words = ["x.toml", "--run.folder=runs/a", *arguments]
    out, err = check_lines(words, capsys, "TRAINING_NODES", "WAIT_REASON")
    assert (out["TRAINING_NODES"], out["WAIT_REASON"]) == (training, line)
    assert err[0] == line
    assert err[-1].startswith("global batch 16 sequences = ")


def test_numbers_of_nodes_are_tried_once_each(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = Mock(wraps=refuse.layout_problems)
    monkeypatch.setattr(refuse, "layout_problems", counted)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("NPROC", "8")
    calls = []
    for nodes in (64, 256):
        (folder / "x.toml").write_text(f"[training]\nglobal_batch_size = {nodes * 8}")
        monkeypatch.setenv("NNODES", str(nodes - 1))
        counted.reset_mock()
        words = ["x.toml", "--run.folder=runs/a"]
        out, _ = check_lines(words, capsys, "TRAINING_NODES", "WAIT_REASON")
        assert out["TRAINING_NODES"] == str(nodes // 2)
        calls.append(counted.call_count)
    assert calls[1] < 4.1 * calls[0] < 400


@pytest.mark.parametrize(
    "arguments",
    [
        ["--run.folder=runs/a", "--parallel.dp_shard=4"],  # the degrees are fixed
        ["--run.folder=runs/a", "--training.micro_batch_size=16"],  # even one node has too many ranks
        [],  # the nodes would make up a folder of their own each
    ],
)
def test_nodes_wait_only_if_a_degree_is_open_and_a_number_fits(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").write_text("[training]\nmicro_batch_size = 8\nglobal_batch_size = 16")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("NNODES", "3")
    monkeypatch.setenv("NPROC", "2")
    (line,) = refusal(capsys, lambda: load_config(["x.toml", "--check", *arguments]))
    assert "wait" not in line


def test_a_range_of_nodes_needs_check_and_the_processes_of_a_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").touch()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("NNODES", "2-4")
    unknown = "environment: NPROC: set it to the number of processes per node"
    assert refusal(capsys, lambda: load_config(["x.toml", "--check"])) == [unknown]
    monkeypatch.setenv("NPROC", "2")
    only_check = "environment: NNODES: 2-4: only --check takes a range of nodes"
    assert refusal(capsys, lambda: load_config(["x.toml"])) == [only_check]
    for wrong in ("4-2", "0-2", "2-", "2-4-6"):
        monkeypatch.setenv("NNODES", wrong)
        (line,) = refusal(capsys, lambda: load_config(["x.toml", "--check"]))
        assert line == f'environment: NNODES: must be a whole number of at least 1, not "{wrong}"'


def test_lowering_fixes_only_the_layout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").write_text(
        "[run]\nlower_ranks = true\n[training]\nmicro_batch_size = 4\nglobal_batch_size = 16\n[recompute]\nk = 9"
    )
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("NPROC", "6")
    assert refusal(capsys, lambda: load_config(["x.toml", "--check"])) == [
        "x.toml:7: recompute.k: 9 is over model.layers 4",
        "x.toml:7: recompute.k: does nothing in this run: "
        'it needs recompute.mode = "segment" or "every_k"; or remove it',
    ]


def test_run_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my run.toml").write_text("[generate]\nafter_training = true")
    first, _ = check_lines(["my run.toml"], capsys)
    second, _ = check_lines(["my run.toml"], capsys)
    assert re.fullmatch(r"runs/my run-\d{8}-\d{6}-[0-9a-f]{4}", first["RUN_FOLDER"])
    assert first["RUN_FOLDER"] != second["RUN_FOLDER"]
    assert first["SAMPLE"] == "1"
    for name, value, expected in (
        ("TORCHELASTIC_RUN_ID", "uuid", "runs/my run-uuid"),
        ("PET_RDZV_ID", "a/../b", "runs/my run-a_.._b"),
        ("SLURM_JOB_ID", "123", "runs/my run-123"),
    ):
        monkeypatch.setenv(name, value)
        assert check_lines(["my run.toml"], capsys)[0]["RUN_FOLDER"] == expected
    assert check_lines(["my run.toml", "--run.folder=a b"], capsys)[0]["RUN_FOLDER"] == "a b"
    assert list(folder.iterdir()) == [folder / "my run.toml"]


def test_one_device(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.toml").write_text("[run]\nfolder='a'\n[parallel]\ntp = 8\ndp_shard = 64\nsequence_parallel = true\n")
    for name, value in (("WORLD_SIZE", "4"), ("NNODES", "2"), ("NPROC", "x")):  # of the job, not of this process
        monkeypatch.setenv(name, value)
    assert load_config(["x.toml"], one_device=True).parallel == Parallel(dp_shard=1)
    assert refusal(capsys, lambda: load_config(["x.toml", "--parallel.tp=2"], one_device=True)) == [
        "--parallel.tp: this recipe runs on one device"
    ]
