"""Runs tests on a mutant, in a copy of the repository.

The copy lies in a temporary folder. A mutant replaces one file of it, whose original comes back afterwards, and
bytecode is written for the originals only: Python would take the bytecode of another text of the same second and length
for the mutant's.
"""

import compileall
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants.generate import Mutant
from tests.mutants.relevant import ROOT

KILLED, TIMED_OUT, SURVIVED = "killed", "timed out", "survived"
MARK = "TORCHLLM_MUTANT"
"""environment variable that all processes of a run of the tests inherit, whatever session they are in"""
WAITED = ("Timed out", "no answer within", "Timeout (>")
"""what tests print that have waited for too long: gloo, the pool of ranks and pytest-timeout"""
PASSED, NOTHING_RAN = 0, 5
"""exit statuses of pytest"""
NOT_COPIED = (".git", ".venv", ".*_cache", ".cache", ".hypothesis", "__pycache__", "runs", "build", "dist", "site")


class TestRun(NamedTuple):
    """How a run of some tests has ended."""

    __test__ = False  # pytest would take it for a class of tests

    outcome: str
    """`KILLED`: a test failed; `TIMED_OUT`: the tests or one of them waited too long; `SURVIVED`: all passed"""
    failed_test: str
    """the first that failed; empty: none did, or it is a time-out"""
    seconds: float


@contextlib.contextmanager
def copied_repository() -> Iterator[Path]:
    """Give a copy of the working tree, compiled, for as long as the context lives."""
    with tempfile.TemporaryDirectory(prefix="torchllm-mutants-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for name in ("torchllm", "recipes", "tests"):
            compileall.compile_dir(copy / name, quiet=1)
        yield copy


def try_mutant(copy: Path, mutant: Mutant, tests: Sequence[str], limit: float) -> TestRun:
    """Run tests until one fails, with the mutant in place of its file. limit: in seconds."""
    file = copy / mutant.file
    original = file.with_suffix(".original")
    shutil.copy2(file, original)
    try:
        file.write_text(mutant.source)
        return run_tests(copy, tests, limit)
    finally:
        original.replace(file)  # with its old time, by which Python knows its bytecode


def run_tests(copy: Path, tests: Sequence[str], limit: float) -> TestRun:
    """Run tests of a copy of the repository until one fails or `limit` seconds are over.

    Raises RuntimeError if there is no such test. Leaves no process.
    """
    mark = uuid.uuid4().hex
    files = copy.parent / "files"
    files.mkdir()
    environment = {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(files),
        "TORCHINDUCTOR_CACHE_DIR": str(copy.parent / "compiled"),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *tests], cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return TestRun(TIMED_OUT, "", time.monotonic() - begin)
        finally:
            kill_marked(mark)
            process.wait()
            shutil.rmtree(files, ignore_errors=True)
        output.seek(0)
        return judge(status, output.read(), time.monotonic() - begin)


def judge(status: int, output: str, seconds: float) -> TestRun:
    """Return what pytest's exit status and its output say. Raises RuntimeError if no test ran."""
    if status == PASSED:
        return TestRun(SURVIVED, "", seconds)
    if status == NOTHING_RAN or "file or directory not found" in output or "ERROR: not found" in output:
        raise RuntimeError(f"pytest has found no test:\n{output}")
    if any(sign in output for sign in WAITED):
        return TestRun(TIMED_OUT, "", seconds)
    failure = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return TestRun(KILLED, failure[1] if failure else "import", seconds)


def kill_marked(mark: str) -> None:
    """Kill all processes that have inherited `mark`, until there is none."""
    while processes := _marked(mark):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: str) -> list[int]:
    """Return the ids of the processes of this machine that have inherited `mark`."""
    entry = f"{MARK}={mark}".encode()
    marked = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    marked.append(int(folder.name))
    return marked
