"""Node 0's decision on what follows an attempt that has failed."""

from pathlib import Path

import pytest

from torchllm.runtime.stop import STOP, STOPPED
from torchllm.tools.launch.restarts import PartEnding, Restarts, newest_step

pytestmark = pytest.mark.quick

KILLED = PartEnding("failed", 5, -9, "node-b")
ELSEWHERE = PartEnding("stopped")


def publish(folder: Path, step: int) -> None:
    checkpoint = folder / f"checkpoints/step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()


def test_restarts_count_anew_after_a_checkpoint_of_a_later_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path, 8)
    restarts = Restarts(2, tmp_path)
    assert restarts.decide([ELSEWHERE, KILLED], 1) == "restart"
    (tmp_path / "checkpoints/step-00000008").rename(tmp_path / "damaged")
    publish(tmp_path, 4)  # an attempt that went back has done nothing new
    assert restarts.decide([ELSEWHERE, KILLED], 1) == "restart"
    publish(tmp_path, 12)
    assert restarts.decide([ELSEWHERE, KILLED], 0) == "restart"
    assert restarts.decide([KILLED], 0) == "restart"
    assert restarts.decide([KILLED], 0) == "end"
    assert capsys.readouterr().err.splitlines() == [
        "rank 5 on node-b was killed: SIGKILL; restart 1 of 2 from the checkpoint of step 8",
        "rank 5 on node-b was killed: SIGKILL; restart 2 of 2 from the checkpoint of step 4",
        "node 0 has failed; restart 1 of 2 from the checkpoint of step 12",
        "rank 5 on node-b was killed: SIGKILL; restart 2 of 2 from the checkpoint of step 12",
        "not restarted: 2 of 2 restarts (run.restarts) have made no progress",
    ]


def test_a_limit_of_1_is_one_restart_and_0_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for limit, verdicts in ((0, ["end", "end"]), (1, ["restart", "end"])):
        restarts = Restarts(limit, tmp_path)
        assert [restarts.decide([KILLED], 0) for _ in verdicts] == verdicts
    said = "rank 5 on node-b was killed: SIGKILL; restart 1 of 1 from the beginning"
    assert capsys.readouterr().err.splitlines()[0] == said


def test_what_would_come_again_is_not_restarted(tmp_path: Path) -> None:
    for ending, verdict in ((PartEnding("user_error", 0, 1), "end"), (PartEnding("refused", 0, 2), "refuse")):
        assert Restarts(3, tmp_path).decide([KILLED, ending], 0) == verdict, ending
    assert Restarts(0, tmp_path).decide([KILLED], 0) == "end"


@pytest.mark.parametrize("name", [STOP, STOPPED])
def test_a_run_that_was_asked_to_stop_is_not_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).touch()
    assert Restarts(3, tmp_path).decide([KILLED], 0) == "end"
    assert capsys.readouterr().err == "not restarted: the run was asked to stop\n"


def test_only_published_checkpoints_count(tmp_path: Path) -> None:
    assert newest_step(tmp_path / "missing") == -1
    publish(tmp_path, 3)
    (tmp_path / "checkpoints/step-00000005").mkdir()
    (tmp_path / "checkpoints/.step-00000006.save").mkdir()
    (tmp_path / "checkpoints/.step-00000006.save/manifest.json").touch()
    assert newest_step(tmp_path) == 3


def test_a_suspect_checkpoint_that_is_replaced_is_progress(tmp_path: Path) -> None:
    for step in (200, 300):
        publish(tmp_path, step)
    suspect = tmp_path / "checkpoints/step-00000300/suspect.json"
    suspect.write_text("{}")
    restarts = Restarts(1, tmp_path)
    assert restarts.newest == 200
    suspect.unlink()
    assert [restarts.decide([KILLED], 0) for _ in range(2)] == ["restart", "end"]
    assert restarts.newest == 300


def test_an_ending_says_which_rank_ended_and_how() -> None:
    assert KILLED.describe() == "rank 5 on node-b was killed: SIGKILL"
    assert PartEnding("failed", 1, -40).describe() == "rank 1 was killed: signal 40"
    assert PartEnding("failed", 1, 3).describe() == "rank 1 ended with status 3"
    assert PartEnding("hung", 1).describe() == "rank 1 was stuck"
    assert PartEnding("left", 1).describe() == (
        "rank 1 ended in the middle of the run, with exit status 0: look for a return, break or exit that other ranks "
        "do not take"
    )
    assert ELSEWHERE.describe() == ""


def test_an_ending_is_one_line_and_back() -> None:
    for ending in [KILLED, ELSEWHERE, PartEnding("left", 1), PartEnding("failed", 1, -40)]:
        assert PartEnding.parse(ending.text()) == ending, ending
        assert PartEnding.parse(ending.text() + "\x1b[2J") == PartEnding("stopped"), ending
