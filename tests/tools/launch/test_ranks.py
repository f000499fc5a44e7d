"""The ranks of a node as processes: their environment, their ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import clean
from tests.patience import patience, until
from tests.tiny_run import ROOT
from torchllm.tools.launch.ranks import RankEnd, RankPlaces, RankProcesses

NOTE = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""
"""a recipe that notes its environment"""
OF_AN_AGENT = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""variables by which torchrun's agent talks to itself"""
PER_JOB = {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}


def places(ranks: int) -> RankPlaces:
    return RankPlaces(1, 0, ranks, "none", "127.0.0.1", 29500, has_store=False)


def test_a_rank_finds_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    variables = RankPlaces(3, 1, 4, "70123.0.0", "node0", 29500, has_store=True).variables(2)
    assert {name: value for name, value in variables.items() if os.environ.get(name) != value} == {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "1",
        "ROLE_RANK": "6",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "12",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "70123.0.0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert variables["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert places(2).variables(0)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in places(1).variables(0)


@pytest.mark.exhaustive
def test_torchrun_sets_the_same(tmp_path: Path) -> None:
    """In the same values, but for the agent's own variables and the names of the job."""
    recipe = tmp_path / "note.py"
    recipe.write_text(NOTE)
    launchers = {"ours": ["-P", "-m", "torchllm.tools.launch.launch"]}
    launchers["torchrun"] = ["-m", "torch.distributed.run", "--standalone"]
    noted = []
    for name, launcher in launchers.items():
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, *launcher, "--nproc-per-node=2", str(recipe), str(folder)]
        environment = clean({"PYTHONPATH": str(ROOT)})
        environment.pop("OMP_NUM_THREADS", None)
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=patience(100))
        ranks = [json.loads((folder / rank).read_text()) for rank in ("0", "1")]
        set_here = [{k: v for k, v in rank.items() if environment.get(k) != v} for rank in ranks]
        noted.append([{k: v for k, v in rank.items() if not k.startswith("TORCHLLM_")} for rank in set_here])
    ours, torchruns = noted
    for mine, theirs in zip(ours, torchruns, strict=True):
        assert mine.keys() == theirs.keys() - OF_AN_AGENT
        assert {k: v for k, v in mine.items() if k not in PER_JOB} == {k: theirs[k] for k in mine.keys() - PER_JOB}


def never() -> None:
    """Look at nothing."""


def test_the_first_rank_that_fails_is_named_and_the_others_end(tmp_path: Path) -> None:
    recipe = tmp_path / "fail.py"
    recipe.write_text("import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(600)\n")
    ranks = RankProcesses(places(3), [str(recipe)])
    assert ranks.wait(never) == RankEnd(1, -9)
    ranks.end()
    assert [process.returncode for process in ranks.processes] == [-15, -9, -15]


def test_a_rank_that_ignores_a_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchllm.tools.launch.ranks.SECONDS_TO_END", 0.3)
    recipe = tmp_path / "ignore.py"
    ready = tmp_path / "ready"
    recipe.write_text(
        "import pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).touch()\ntime.sleep(600)\n"
    )
    ranks = RankProcesses(places(1), [str(recipe), str(ready)])
    until(ready.exists)
    ranks.end()
    assert ranks.processes[0].returncode == -9


def test_ranks_that_are_done_have_no_failure(tmp_path: Path) -> None:
    recipe = tmp_path / "note.py"
    recipe.write_text(NOTE)
    assert RankProcesses(places(2), [str(recipe), str(tmp_path)]).wait(never) is None
    noted = [json.loads((tmp_path / rank).read_text()) for rank in ("0", "1")]
    assert [rank["LOCAL_RANK"] for rank in noted] == ["0", "1"]
