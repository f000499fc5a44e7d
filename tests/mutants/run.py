"""Runs tests on a mutant, in a copy of the repository.

The copy lies in a temporary folder. A mutant replaces one file of it, whose original comes back afterwards, and
bytecode is written for the originals only: Python would take the bytecode of another text of the same second and length
for the mutant's. pytest runs in a fork of this process, which has imported torch already.
"""

import compileall
import contextlib
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutants.generate import Mutant
from tests.mutants.relevant import ROOT

KILLED, TIMED_OUT, SURVIVED = "killed", "timed out", "survived"
MARK = "TORCHLLM_MUTANT"
"""environment variable of all processes that a run of the tests starts, whatever session they are in"""
OUTPUT = "output.txt"
IMPORT = "import"
"""in place of a failed test: pytest could not begin"""
WARM = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.attention.flex_attention",
    "torch.nn.attention.varlen",
    "torch.utils.checkpoint",
)
"""modules that every test imports, and none of ours: importing them takes longer than most tests"""
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
    for module in WARM:
        importlib.import_module(module)
    mark = uuid.uuid4().hex
    files = Path(tempfile.mkdtemp(dir=copy.parent))
    begin = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_run_pytest, args=(copy, files, tests, mark))
    process.start()
    try:
        process.join(limit)
        seconds = time.monotonic() - begin
        if process.exitcode is None:
            return TestRun(TIMED_OUT, "", seconds)
        return judge(process.exitcode, (files / OUTPUT).read_text(), seconds)
    finally:
        process.kill()
        process.join()
        kill_marked(mark)
        shutil.rmtree(files, ignore_errors=True)


def _run_pytest(copy: Path, files: Path, tests: Sequence[str], mark: str) -> None:
    """Be a process that has just started pytest in `copy`; exits with its status. files: folder for temporary files."""
    os.environ |= {
        MARK: mark,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(files),
        "TORCHINDUCTOR_CACHE_DIR": str(copy.parent / "compiled"),
    }
    os.chdir(copy)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy))
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tests", "torchllm", "recipes"):  # of the working tree, not of its copy
            del sys.modules[name]
    tempfile.tempdir = None  # it remembers the folder of the process that was forked
    with (files / OUTPUT).open("w") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        sys.stdout = sys.stderr = output
        status = pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-n", "0", *tests])
        output.flush()
        os._exit(status)


def judge(status: int, output: str, seconds: float) -> TestRun:
    """Return what pytest's exit status and its output say. Raises RuntimeError if no test ran."""
    if status == PASSED:
        return TestRun(SURVIVED, "", seconds)
    if status == NOTHING_RAN or "file or directory not found" in output or "ERROR: not found" in output:
        raise RuntimeError(f"pytest has found no test:\n{output}")
    if any(sign in output for sign in WAITED):
        return TestRun(TIMED_OUT, "", seconds)
    failure = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return TestRun(KILLED, failure[1] if failure else IMPORT, seconds)


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
