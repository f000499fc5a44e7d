import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_corpus import flip_bit, write_two_shards
from tests.patience import until
from torchllm.config.errors import DataError
from torchllm.data import verification as module
from torchllm.data.checked_file import BLOCK
from torchllm.data.corpus import Corpus
from torchllm.data.shard import Split
from torchllm.data.verification import Verification


class CountedCorpus(Corpus):
    def __init__(self, folder: Path, records: Path | None = None) -> None:
        super().__init__(folder, records)
        self.verified: list[tuple[str, int]] = []

    def verify(self, split: Split, number: int, pace: Callable[[int], None] = lambda size: None) -> None:
        super().verify(split, number, pace)
        self.verified.append((split, number))


@pytest.fixture
def corpus(tmp_path: Path) -> CountedCorpus:
    """Two shards with files of 4 MiB of training and some of held-out tokens each."""
    write_two_shards(tmp_path)
    return CountedCorpus(tmp_path / "c", tmp_path / "records")


def test_nodes_share_out_the_files_and_verify_each_once(corpus: CountedCorpus) -> None:
    Verification([corpus], 1, 2).begin()
    assert corpus.verified == [("train", 1), ("validation", 1)]
    Verification([corpus], 0, 2).begin()
    assert corpus.verified[2:] == [("train", 0), ("validation", 0)]
    Verification([corpus], 0, 1).begin()
    assert len(corpus.verified) == 4


def test_what_does_not_fit_into_the_start_is_verified_beside_training(
    corpus: CountedCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BYTES_AT_ONCE", 5 * BLOCK)
    verification = Verification([corpus], 0, 1)
    verification.begin()
    assert corpus.verified == [("train", 0), ("validation", 0)]
    verification.start()
    until(lambda: len(corpus.verified) == 4)
    verification.close()
    assert verification.problem is None


def test_it_reads_at_its_pace_and_ends_when_told(corpus: CountedCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BYTES_AT_ONCE", 0)
    monkeypatch.setattr(module, "_BYTES_PER_SECOND", BLOCK / 1000)
    verification = Verification([corpus], 0, 1)
    verification.begin()
    for _ in range(2):  # it can be started again, as after a load_state
        verification.start()
        verification.close()
    assert not corpus.verified


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_file_that_changes_during_the_run_is_verified_again(corpus: CountedCorpus, damage: str) -> None:
    verification = Verification([corpus], 0, 1)
    verification.seconds_between_checks = 0.01
    verification.begin()
    verification.start()
    path = corpus.folder / "00000.train.bin"
    os.utime(path)
    until(lambda: len(corpus.verified) == 5)
    assert verification.problem is None
    if damage == "flip":
        flip_bit(path, 5)
    elif damage == "truncate":
        os.truncate(path, 100)
    else:
        path.unlink()
    until(lambda: verification.problem)
    verification.close()
    assert verification.problem is not None
    assert verification.problem.path == path


def test_a_look_verifies_what_was_changed_and_nothing_else(
    corpus: CountedCorpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_BYTES_AT_ONCE", 0)
    verification = Verification([corpus], 0, 1)
    verification.begin()
    assert verification.look()  # as it was, if it is not verified: its blocks are checked as they are read
    assert not corpus.verified
    path = corpus.folder / "00001.train.bin"
    path.chmod(0o600)
    assert not verification.look()
    assert verification.look(everything=True)
    assert corpus.verified == [("train", 1)]
    assert "00001.train.bin was changed while the run reads it (1 files in all)" in caplog.text
    flip_bit(path, 5)
    assert not verification.look()  # more than is verified at once: the thread will
    with pytest.raises(DataError, match=r"00001\.train\.bin is damaged"):
        verification.look(everything=True)


def test_a_file_that_cannot_be_opened_for_a_while_does_not_end_the_run(
    corpus: CountedCorpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    verification = Verification([corpus], 0, 1)
    verification.seconds_between_checks = 0.01
    verification.begin()

    def check(part: int, parts: int, threads: int) -> Iterator[object]:
        raise DataError("00000.train.bin cannot be opened: Stale file handle")

    monkeypatch.setattr(corpus, "check", check)
    verification.start()
    until(lambda: caplog.records)
    verification.close()
    assert verification.problem is None
    assert "Stale file handle; the data is not verified any more" in caplog.text
    assert not verification.look()
    assert "Stale file handle; whether the data is as it was is not known" in caplog.text
    assert np.all(corpus.window("train", 0, 100).ids < 258)


def test_a_program_may_end_while_the_thread_looks_for_changes(corpus: CountedCorpus, tmp_path: Path) -> None:
    """Its end waits in the thread's pools of threads, where one that was made then would raise."""
    program = f"""
import threading, time
from concurrent.futures import thread
from pathlib import Path
from torchllm.data.corpus import Corpus
from torchllm.data.verification import Verification

corpus = Corpus(Path({str(tmp_path / "c")!r}), Path({str(tmp_path / "records")!r}))
verification = Verification([corpus], 0, 1)
verification.begin()
verification.seconds_between_checks = 0.0
thread._python_exit()  # as Python does first when the program ends
verification.start()
time.sleep(0.2)
verification.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
