import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import patience
from tests.tiny_run import process_as_it_was
from torchllm.tools.launch.stop_requests import STOP_SIGNALS, StopRequests


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    with process_as_it_was():
        for number in STOP_SIGNALS:  # under nohup a test process ignores SIGHUP, and so would all that is tested
            signal.signal(number, signal.SIG_DFL)
        yield


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which this process would have ended."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


def test_a_signal_ends_the_start_up_and_asks_a_training_run_to_stop(tmp_path: Path, statuses: list[int]) -> None:
    for number in STOP_SIGNALS:
        requests = StopRequests(tmp_path, rank=0, world_size=1)
        requests.listen()
        signal.raise_signal(number)
        assert statuses == [128 + number]

        statuses.clear()
        requests = StopRequests(tmp_path, rank=0, world_size=1)
        requests.listen()
        requests.begin_votes()
        assert not requests.requested()
        signal.raise_signal(number)
        assert requests.requested()
        assert not statuses


def test_only_a_second_interrupt_ends_a_training_run_at_once(
    tmp_path: Path, statuses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = StopRequests(tmp_path, rank=0, world_size=1)
    requests.listen()
    requests.begin_votes()
    for moment in (100.0, 110.0, 120.0):
        monkeypatch.setattr(time, "monotonic", lambda moment=moment: moment)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.raise_signal(number)
    for moment in (130.0, 130.1, 135.0):  # torchrun forwards what the terminal has sent to every process already
        monkeypatch.setattr(time, "monotonic", lambda moment=moment: moment)
        signal.raise_signal(signal.SIGINT)
    assert not statuses
    monkeypatch.setattr(time, "monotonic", lambda: 135.1)
    signal.raise_signal(signal.SIGINT)
    assert statuses == [128 + signal.SIGINT]


def test_signals_that_run_train_or_nohup_ignores_stay_ignored(tmp_path: Path) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    requests = StopRequests(tmp_path, rank=0, world_size=1)
    requests.listen()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        assert signal.getsignal(number) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == requests._hear


def test_a_request_is_urgent_when_an_evaluation_has_had_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = StopRequests(tmp_path, rank=0, world_size=1)
    assert not requests.is_urgent()
    (tmp_path / "stop").touch()
    for moment, is_urgent in ((100.0, False), (105.0, False), (105.1, True)):
        monkeypatch.setattr(time, "monotonic", lambda moment=moment: moment)
        assert requests.is_urgent() == is_urgent


def test_only_rank_0_looks_for_the_file_in_training(tmp_path: Path) -> None:
    ranks = [StopRequests(tmp_path, rank, world_size=2) for rank in (0, 1)]
    assert [requests.requested() for requests in ranks] == [False, False]
    (tmp_path / "stop").touch()
    assert [requests.requested() for requests in ranks] == [True, False]


def launched(folder: Path, rank: int, is_owned: bool = True) -> StopRequests:
    """What run_train.sh has started, with a thread that looks for the file ten times per second."""
    requests = StopRequests(folder, rank, world_size=2, is_launched=True, is_owned=is_owned)
    requests.look_interval = 0.1
    return requests


@pytest.mark.parametrize("rank", [0, 1])
def test_the_file_ends_the_start_up_of_every_rank_with_status_0(
    tmp_path: Path, statuses: list[int], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    requests = launched(tmp_path, rank)
    looked, end_if_asked = threading.Event(), requests._end_if_asked
    monkeypatch.setattr(requests, "_end_if_asked", lambda: (end_if_asked(), looked.set()))
    requests.listen()
    assert looked.wait(patience(10))
    signal.raise_signal(signal.SIGTERM)  # whoever sends it to a rank alone has not asked run_train.sh
    assert not statuses
    (tmp_path / "stop").touch()
    for _ in range(2):  # the first look may have begun before
        looked.clear()
        assert looked.wait(patience(10))
    requests.begin_votes()
    assert set(statuses) == {0}
    marker = tmp_path / "stopped.json"
    assert (marker.read_text() if marker.exists() else "") == ('{"step": null}\n' if rank == 0 else "")


def test_what_asked_an_earlier_job_to_stop_ends_no_rank_until_this_job_owns_the_folder(
    tmp_path: Path, statuses: list[int]
) -> None:
    file = tmp_path / "stop"
    file.touch()
    requests = launched(tmp_path, 1, is_owned=False)
    requests._end_if_asked()
    file.unlink()  # rank 0 has taken the folder
    requests._end_if_asked()
    assert not statuses
    file.touch()
    os.utime(file, ns=(0, 1))  # a file system may give it the number of the one before
    requests._end_if_asked()
    assert statuses == [0]

    early = launched(tmp_path, 1, is_owned=False)
    early.folder_is_owned()
    early._end_if_asked()
    assert statuses == [0, 0]


def test_a_rank_that_has_voted_stays_and_saves(tmp_path: Path, statuses: list[int]) -> None:
    requests = launched(tmp_path, 0)
    requests.listen()
    requests.begin_votes()
    (tmp_path / "stop").touch()
    for thread in threading.enumerate():
        if thread.name == "stop in the start-up":
            thread.join(patience(10))
    assert requests.requested()
    assert not statuses


def test_until_all_ranks_have_voted_an_error_is_a_consequence_of_the_request(
    tmp_path: Path, statuses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    requests = launched(tmp_path, 1)
    requests.listen()
    requests.begin_votes()
    sys.excepthook(OSError, OSError("a bug"), None)
    assert (len(printed), statuses) == (1, [])

    (tmp_path / "stop").touch()
    sys.excepthook(OSError, OSError("a peer has gone"), None)
    assert statuses == [0]

    requests.begin_training()
    sys.excepthook(OSError, OSError("a bug"), None)
    assert statuses == [0]
