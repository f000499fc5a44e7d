"""The lease of a run folder: of several takers one wins, whatever clocks and schedulers do."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from tests.patience import patience, until
from tests.tiny_run import ROOT
from torchllm.config.errors import RefusedStart
from torchllm.tools.launch import take_lease as taking
from torchllm.tools.launch.lease import (
    HANDED_DOWN,
    RELEASED,
    Claim,
    LeaseLost,
    Owner,
    Timing,
    check_owner,
    inherited_claim,
    release_leases,
)
from torchllm.tools.launch.process_identity import this_process
from torchllm.tools.launch.take_lease import TAKE, FolderOwned, Lease, own_for_ranks, take_lease

TAKERS = 8
QUICK = Timing(beat=0.05, limit=60.0, look=0.02)
"""an owner that lives is seen at once, and never taken for dead"""

TAKER = """
import json, sys
from pathlib import Path
from torchllm.tools.launch.lease import Timing
from torchllm.tools.launch.take_lease import FolderOwned, take_lease

for line in sys.stdin:
    command, *words = json.loads(line)
    if command == "take":
        folder, beat, limit, look = words
        try:
            lease = take_lease(Path(folder), Timing(beat, limit, look))
            answer = lease.claim.text()
        except FolderOwned as owned:
            answer = str(owned)
    elif command == "release":
        lease.release()
        answer = "released"
    print(json.dumps(answer), flush=True)
"""


class Taker:
    def __init__(self) -> None:
        command = [sys.executable, "-c", TAKER]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def ask(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        answer: str = json.loads(self.process.stdout.readline())
        return answer

    def take(self, folder: Path, timing: Timing) -> None:
        self.ask("take", str(folder), timing.beat, timing.limit, timing.look)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def takers() -> Iterator[list[Taker]]:
    takers = [Taker() for _ in range(TAKERS)]
    yield takers
    for taker in takers:
        taker.kill()


@pytest.fixture(autouse=True)
def _no_lease_left() -> Iterator[None]:
    yield
    release_leases()


class Clock:
    """A clock that only `sleep` moves; `events` happen meanwhile."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.events: dict[float, Callable[[], object]] = {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for moment in [moment for moment in self.events if moment <= self.now]:
            self.events.pop(moment)()

    def timing(self) -> Timing:
        return Timing(clock=lambda: self.now, sleep=self.sleep)


def owner(**changes: object) -> Owner:
    elsewhere = Owner(
        host="elsewhere",
        boot="another boot",
        namespace="pid:[1]",
        pid=1,
        started=5,
        nonce="0" * 32,
        job="77",
        launched="",
        since=0,
        count="0000000003",
    )
    return replace(elsewhere, **changes)  # type: ignore[arg-type]  # the tests' own names and types


def write_owner(folder: Path, number: int, text: str) -> Path:
    (folder / "lease").mkdir(parents=True, exist_ok=True)
    file = folder / "lease" / f"{number:06d}"
    file.write_text(text)
    return file


def gone_here() -> Owner:
    """An owner that was a process of this machine and has ended."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    process = this_process()
    return owner(**{**asdict(process), "pid": child.pid})


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "lease"))


def take(folder: Path, timing: Timing = QUICK) -> Lease:
    return take_lease(folder, timing)


# ---- several at once


@pytest.mark.parametrize("earlier", ["nothing", "ended"])
def test_of_eight_that_take_it_at_once_one_wins(takers: list[Taker], tmp_path: Path, earlier: str) -> None:
    for number in range(4):
        folder = tmp_path / str(number)
        if earlier == "ended":
            write_owner(folder, 6, gone_here().text())
        for taker in takers:
            taker.take(folder, QUICK)
        answers = [taker.answer() for taker in takers]
        winners = [index for index, answer in enumerate(answers) if Claim.parse(answer)]
        assert len(winners) == 1, answers
        claim = Claim.parse(answers[winners[0]])
        assert claim is not None
        assert claim.number == (1 if earlier == "nothing" else 7)
        assert names(folder) == [f"{claim.number:06d}"]
        check_owner(folder, claim)
        winner = takers[winners[0]]
        answers.pop(winners[0])
        assert all(f"process {winner.process.pid} on " in answer for answer in answers)
        winner.ask("release")
        assert winner.answer() == "released"


@pytest.mark.quick
def test_link_decides_where_its_answer_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def lose_the_answer(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(target)

    monkeypatch.setattr(os, "link", lose_the_answer)
    lease = take(tmp_path)
    assert lease.claim.number == 1
    check_owner(tmp_path, lease.claim)
    assert names(tmp_path) == ["000001"]


def test_a_file_system_that_never_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(source: Path, target: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))

    monkeypatch.setattr(os, "link", never)
    with pytest.raises(RefusedStart, match="cannot be written"):
        take(tmp_path)
    assert names(tmp_path) == []


def test_a_taker_that_slept_while_the_numbers_went_on_does_not_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number had been removed by then, so that its link succeeds."""
    write_owner(tmp_path, 6, owner(count=RELEASED).text())
    link = os.link
    meanwhile = iter([True, False, False])

    def slow_link(source: Path, target: Path) -> None:
        if next(meanwhile):
            write_owner(tmp_path, 8, owner(count=RELEASED, nonce="8" * 32).text())
        link(source, target)

    monkeypatch.setattr(os, "link", slow_link)
    assert take(tmp_path).claim.number == 9
    assert names(tmp_path) == ["000009"]


def test_what_killed_takers_left_is_removed(tmp_path: Path) -> None:
    write_owner(tmp_path, 3, owner(count=RELEASED).text())
    (tmp_path / "lease" / ("." + "a" * 32)).touch()
    (tmp_path / "lease" / "a note of the user").touch()
    take(tmp_path)
    assert names(tmp_path) == ["000004", "a note of the user"]


def test_without_hard_links_a_new_file_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    claim = take(tmp_path).claim
    check_owner(tmp_path, claim)
    assert names(tmp_path) == ["000001"]
    assert not taking._link(tmp_path / "lease", 1, owner())
    monkeypatch.setattr(os, "link", link)
    with pytest.raises(FolderOwned):
        take_lease(tmp_path, QUICK)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "lease").touch()
    with pytest.raises(RefusedStart, match=r"run\.folder = .* cannot be written: .*lease"):
        take_lease(tmp_path)


# ---- dead or alive


@pytest.mark.quick
def test_an_owner_that_counts_is_not_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_owner(tmp_path, 4, owner().text())
    clock = Clock()
    clock.events[clock.now + 9.5] = lambda: file.write_text(owner(count="0000000004").text())
    with pytest.raises(FolderOwned) as refused:
        take_lease(tmp_path, clock.timing())
    assert clock.now <= 1011.0
    described = r"job 77, process 1 on elsewhere, since 1970-01-01 "
    assert described in str(refused.value)
    assert "End that job, or set another run.folder" in str(refused.value)
    assert described in capfd.readouterr().err  # before it waits
    assert names(tmp_path) == ["000004"]


def test_a_requeued_job_waits_for_its_earlier_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It lives on a node that Slurm does not reach, until its ranks have missed those of the other nodes."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    earlier = owner(job="7")
    file = write_owner(tmp_path, 4, earlier.text())
    clock = Clock()
    began = clock.now
    for beat in range(1, 30):
        text = replace(earlier, count=f"{beat:010d}").text()
        clock.events[began + 10 * beat] = partial(file.write_text, text)
    assert take(tmp_path, clock.timing()).claim.number == 5
    assert 290 + 90 <= clock.now - began < 290 + 95
    assert capfd.readouterr().err.count("waiting for its end") == 1


def test_requests_to_stop_are_those_of_the_owner(tmp_path: Path) -> None:
    requests = [tmp_path / "stop", tmp_path / "stopped.json"]
    for request in requests:
        request.touch()
    file = write_owner(tmp_path, 4, owner().text())
    clock = Clock()
    clock.events[clock.now + 9.5] = lambda: file.write_text(owner(count="0000000004").text())
    with pytest.raises(FolderOwned):
        take_lease(tmp_path, clock.timing())
    assert [request.exists() for request in requests] == [True, True]
    file.write_text(owner(count=RELEASED).text())
    take(tmp_path)
    assert [request.exists() for request in requests] == [False, False]


@pytest.mark.quick
@pytest.mark.parametrize("text", [owner().text(), "", "[]", '{"pid": 1}', owner(pid="1").text()])
def test_an_owner_elsewhere_is_dead_after_90_seconds_without_a_count(tmp_path: Path, text: str) -> None:
    write_owner(tmp_path, 4, text)
    clock = Clock()
    assert take(tmp_path, clock.timing()).claim.number == 5
    assert 1090.0 <= clock.now <= 1091.0


def test_a_reader_that_was_suspended_itself_waits_on(tmp_path: Path) -> None:
    """Else it would take a job for dead that was suspended with it, and has not counted since."""
    file = write_owner(tmp_path, 4, owner().text())
    clock = Clock()
    looks = [1.0, 500.0, 1.0, 1.0, 1.0]

    def suspend(seconds: float) -> None:
        clock.sleep(looks.pop(0) if looks else seconds)

    clock.events[1503.0] = lambda: file.write_text(owner(count="0000000004").text())
    with pytest.raises(FolderOwned):
        take_lease(tmp_path, clock.timing()._replace(sleep=suspend))


# ---- while it is held


def test_the_owner_counts_and_releases(tmp_path: Path) -> None:
    lease = take(tmp_path)
    file = tmp_path / "lease" / "000001"
    contents: set[str] = set()
    until(lambda: contents.add(file.read_text()) or len(contents) >= 4)
    lease.release()
    content = file.read_text()
    assert json.loads(content)["count"] == RELEASED
    assert {len(text) for text in contents} == {len(content)}
    lease.release()
    assert take(tmp_path, Timing()).claim.number == 2  # at once


def test_a_process_that_ends_releases(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from torchllm.tools.launch.take_lease import take_lease\n"
        "take_lease(Path(sys.argv[1]))\n"
        "if os.fork() == 0: sys.exit()\n"  # a child has no lease to release
        "os.wait(); print(open(sys.argv[1] + '/lease/000001').read()); raise SystemExit(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert RELEASED not in done.stdout
    assert RELEASED in (tmp_path / "lease" / "000001").read_text()


def test_an_owner_that_has_lost_it_ends_itself(takers: list[Taker], tmp_path: Path) -> None:
    takers[0].take(tmp_path, QUICK)
    assert Claim.parse(takers[0].answer())
    write_owner(tmp_path, 2, owner().text())
    assert takers[0].process.wait(patience(60)) == 1
    _, errors = takers[0].process.communicate()
    assert "belongs to another job by now (job 77, process 1 on elsewhere" in errors


@pytest.mark.quick
def test_a_claim_is_checked_by_number_and_nonce(tmp_path: Path) -> None:
    claim = take(tmp_path).claim
    check_owner(tmp_path, claim)
    with pytest.raises(LeaseLost, match="belongs to another job by now"):
        check_owner(tmp_path, claim._replace(nonce="f" * 32))
    write_owner(tmp_path, 2, "")
    with pytest.raises(LeaseLost, match=r"another job by now \(unknown\)"):
        check_owner(tmp_path, claim)
    release_leases()
    shutil.rmtree(tmp_path / "lease")
    with pytest.raises(LeaseLost, match="its lease is gone"):
        check_owner(tmp_path, claim)


def test_a_file_system_that_does_not_answer_is_no_lost_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = take(tmp_path, Timing()).claim

    def fail(folder: Path) -> list[str]:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", fail)
        check_owner(tmp_path, claim)
    check_owner(tmp_path, claim)


def test_a_launcher_owns_the_folder_that_run_train_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HANDED_DOWN, raising=False)
    own_for_ranks()
    assert HANDED_DOWN not in os.environ
    monkeypatch.setenv(TAKE, str(tmp_path / "run"))
    own_for_ranks()
    claim = Claim.parse(os.environ.pop(HANDED_DOWN))
    assert claim is not None
    assert TAKE not in os.environ  # the ranks are no launchers
    check_owner(tmp_path / "run", claim)


@pytest.mark.quick
def test_ranks_inherit_the_claim_of_their_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = take(tmp_path / "run").claim
    monkeypatch.setenv(HANDED_DOWN, claim.text())
    assert inherited_claim(tmp_path / "run") == claim
    assert names(tmp_path / "run") == ["000001"]
    # That of a job which this one was started from within.
    take(tmp_path / "another run")
    assert inherited_claim(tmp_path / "another run") is None
    assert Claim.parse("") is None
    assert Claim.parse("7:short") is None
