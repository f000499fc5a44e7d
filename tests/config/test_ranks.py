"""The number of ranks, the run folder, and what --check prints, for an environment of a launcher."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.config.conftest import RANK_VARIABLES, refusal
from torchllm.config import Parallel
from torchllm.config.environment import HANDED
from torchllm.tools.config.load import load_config

pytestmark = pytest.mark.quick

UNKNOWN_RANKS = (
    "is -1, but the number of ranks is unknown: set NPROC (and NNODES), or --gpus=N for --check, or give a degree"
)


Launch = Callable[..., None]


@pytest.fixture
def launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Returns a function that sets the variables of a launcher, and no others."""

    def set_variables(**variables: str) -> None:
        for name in RANK_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


class Refusal(NamedTuple):
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


def test_wrong_ranks(
    folder: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").write_text("")
    monkeypatch.setattr(sys, "argv", ["recipes/pretrain.py"])
    for name, (environment, arguments, expected) in REFUSALS.items():
        launch(**environment)
        words = ["x.toml", *arguments]
        assert refusal(capsys, partial(load_config, words)) == expected, name
    launch()
    monkeypatch.setattr(sys, "argv", ["recipes/mine.py"])
    assert refusal(capsys, lambda: load_config(["--parallel.dp_shard=2"])) == [
        "defaults: needs 2 ranks: start it with RECIPE=recipes/mine.py NPROC=2 ./run_train.sh --parallel.dp_shard=2"
    ]


def test_only_one_process_of_a_node_speaks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert refusal(capsys, lambda: load_config(["--training.steps=0"])) == []


def test_open_degree_is_filled_in(launch: Launch) -> None:
    for environment, world in (
        ({"WORLD_SIZE": "6", "NNODES": "3", "NPROC": "9"}, 6),
        ({"WORLD_SIZE": "1"}, 1),
        ({"NPROC": "1"}, 1),
    ):
        launch(**environment)
        config = load_config(["--run.folder=a", f"--training.global_batch_size={world}"])
        assert config.parallel == Parallel(dp_shard=world)


def test_a_dry_run_is_of_any_number_of_ranks(folder: Path, launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    big = ["--model.layers=16", "--training.global_batch_size=2048", "--run.dry_run=true"]
    for environment, arguments, degrees in (
        ({}, ["--parallel.pp=16", "--parallel.dp_shard=128", "--parallel.tp=8"], (16, 128, 8)),
        ({"NPROC": "8", "NNODES": "4"}, [], (1, 32, 1)),
        ({"WORLD_SIZE": "2", "NPROC": "4"}, [], (1, 4, 1)),  # it is no rank of the job that starts it
        ({"NPROC": "2", "NPROC_IS_DEFAULT": "1"}, ["--parallel.dp_shard=64"], (1, 64, 1)),
    ):
        launch(**environment)
        parallel = load_config([*big, *arguments]).parallel
        assert (parallel.pp, parallel.dp_shard, parallel.tp) == degrees
    assert list(folder.iterdir()) == []
    capsys.readouterr()
    launch(NPROC="16")
    assert load_config(["--run.dry_run=true", "--run.lower_ranks=true"]).parallel.dp_shard == 8
    assert capsys.readouterr().err.splitlines() == [
        "16 processes cannot share the batch of 8 sequences: with run.lower_ranks a run starts 8, and what follows is "
        "of these"
    ]
    launch()
    lines = refusal(capsys, lambda: load_config(["--run.dry_run=true"]))
    unknown = "is -1, but the number of ranks is unknown: set --gpus=N, or give a degree"
    assert lines == [f"defaults: parallel.dp_shard: {unknown}"]
    launch(NPROC="4", NNODES="2")
    for gpus in (["--gpus=64"], ["--gpus", "64"]):  # before the environment
        assert load_config(["--training.global_batch_size=64", "--run.dry_run=true", *gpus]).parallel.dp_shard == 64


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
    "lowered, although 16 divides the batch": Check(
        {"NPROC": "16"},
        ["--run.lower_ranks=true"],
        "4",
        [
            "16 processes cannot share the batch of 16 sequences: starting 4",
            "global batch 16 sequences = 4 data ranks x 4 micro batch x 1 accumulated",
        ],
    ),
    "a check of fewer than asked": Check(
        {"NPROC": "2"},
        ["--run.lower_ranks=true", "--gpus=16"],
        "4",
        [
            "16 processes cannot share the batch of 16 sequences: with run.lower_ranks a run starts 4, and what "
            "follows is of these",
            "global batch 16 sequences = 4 data ranks x 4 micro batch x 1 accumulated",
        ],
    ),
    "lowered on two nodes": Check(
        {"NNODES": "2", "NPROC": "8", "SLURM_JOB_ID": "1"},
        ["--run.lower_ranks=true"],
        "2",
        [
            "8 processes per node cannot share the batch of 16 sequences: starting 2",
            "global batch 16 sequences = 4 data ranks x 4 micro batch x 1 accumulated",
        ],
    ),
}


def test_check(folder: Path, launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.toml").write_text("[training]\nmicro_batch_size = 4\nglobal_batch_size = 16")
    for name, (environment, arguments, processes, expected) in CHECKS.items():
        launch(**environment)
        out, err = check_lines(["x.toml", *arguments], capsys)
        assert (out["NPROC"], out["SAMPLE"], err) == (processes, "0", expected), name


def node_counts(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Return the exit status and the lines of --check with a range of nodes."""
    with pytest.raises(SystemExit) as stop:
        load_config(["x.toml", "--check", *arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return int(stop.value.code or 0), out.splitlines()


def test_check_tells_which_numbers_of_nodes_the_batch_allows(
    folder: Path, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").write_text(
        "[training]\nmicro_batch_size = 2\nglobal_batch_size = 16\n[parallel]\ndp_shard = 2\ndp_replicate = -1"
    )
    launch(NNODES="2-4", NPROC="2")
    assert node_counts(capsys) == (
        0,
        [
            "4 nodes x 2 processes: global batch 16 sequences = 8 data ranks x 2 micro batch x 1 accumulated",
            "3 nodes x 2 processes: no: training.global_batch_size: 16 is no multiple of micro_batch_size 2 x 6 "
            "data-parallel ranks = 12",
            "2 nodes x 2 processes: global batch 16 sequences = 4 data ranks x 2 micro batch x 2 accumulated",
        ],
    )
    launch(NNODES="3-3", NPROC="2")
    assert node_counts(capsys)[0] == 2  # none is allowed
    launch(NNODES="1-1", NPROC="3")
    _, lines = node_counts(capsys, "--run.lower_ranks=true")
    assert lines == ["1 node x 2 processes: global batch 16 sequences = 2 data ranks x 2 micro batch x 4 accumulated"]


def test_a_range_of_nodes_needs_check_and_the_processes_of_a_node(
    folder: Path, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").touch()
    launch(NNODES="2-4")
    unknown = "environment: NPROC: set it to the number of processes per node"
    assert refusal(capsys, lambda: load_config(["x.toml", "--check"])) == [unknown]
    launch(NNODES="2-4", NPROC="2")
    only_check = "environment: NNODES: 2-4: only --check takes a range of nodes"
    assert refusal(capsys, lambda: load_config(["x.toml"])) == [only_check]
    for wrong in ("4-2", "0-2", "2-", "2-4-6"):
        wanted = "a range from the smaller number to the larger" if wrong == "4-2" else "a whole number of at least 1"
        launch(NNODES=wrong, NPROC="2")
        (line,) = refusal(capsys, lambda: load_config(["x.toml", "--check"]))
        assert line == f'environment: NNODES: must be {wanted}, not "{wrong}"'


def test_lowering_fixes_only_the_layout(folder: Path, launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.toml").write_text(
        "[run]\nlower_ranks = true\n[training]\nmicro_batch_size = 4\nglobal_batch_size = 16\n[recompute]\nk = 9"
    )
    launch(NPROC="6")
    over, idle = refusal(capsys, lambda: load_config(["x.toml", "--check"]))
    assert over == "x.toml:7: recompute.k: 9 is over model.layers 4"
    assert idle.startswith("x.toml:7: recompute.k: does nothing in this run")


def test_gpus_are_those_of_a_check_or_a_dry_run(
    folder: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(NPROC="2")
    (folder / "x.toml").write_text("[training]\nglobal_batch_size = 64")
    assert check_lines(["x.toml", "--gpus=64"], capsys)[0]["NPROC"] == "64"
    only = "--gpus: only --check and the dry run of a training take it; set NPROC (and NNODES)"
    assert refusal(capsys, lambda: load_config(["x.toml", "--gpus=2"]))[0] == only
    assert refusal(capsys, lambda: load_config(["--run.dry_run=true", "--gpus=2"], one_device=True)) == [only]
    for words in (["--gpus=0"], ["--gpus=many"], ["--gpus"]):
        line, *_ = refusal(capsys, lambda words=words: load_config(["x.toml", "--check", *words]))  # type: ignore[misc]
        assert line.startswith("--gpus: must be a whole number of at least 1, not ")
    monkeypatch.setenv(HANDED, str(folder / "handed"))  # the check by which run_train.sh starts a training
    assert refusal(capsys, lambda: load_config(["x.toml", "--check", "--gpus=2"])) == [only]


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


def test_a_second_run_in_a_job_does_not_go_on_from_the_first_in_silence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").touch()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (folder / "runs/x-7/checkpoints/step-00000004").mkdir(parents=True)
    (line,) = refusal(capsys, lambda: load_config(["x.toml", "--check"]))
    assert line.startswith(
        "x.toml: run.folder: set it: runs/x-7, named after this job, has the checkpoints of an earlier run"
    )
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # requeued
    assert check_lines(["x.toml"], capsys)[0]["RUN_FOLDER"] == "runs/x-7"


def test_one_device(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.toml").write_text("[run]\nfolder='a'\n[parallel]\ntp = 8\ndp_shard = 64\nsequence_parallel = true\n")
    for name, value in (("WORLD_SIZE", "4"), ("NNODES", "2"), ("NPROC", "x")):  # of the job, not of this process
        monkeypatch.setenv(name, value)
    assert load_config(["x.toml"], one_device=True).parallel == Parallel(dp_shard=1)
    assert refusal(capsys, lambda: load_config(["x.toml", "--parallel.tp=2"], one_device=True)) == [
        "--parallel.tp: this recipe runs on one device"
    ]
