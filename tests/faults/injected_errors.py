"""Raise an error at each place where torchllm calls into the system: one place and one error at a time.

    python -m tests.faults.injected_errors [PROGRAM ...] [--part=0/20]

A program (a training that resumes, a preparation, an export, a launcher) runs once to record its places: the `CALLS`
that a line of torchllm or of a recipe makes. Then it runs again for each place and each error there. It must go on with
the same result, or end with one line of error and a status. A traceback, a hang or another result is a fault, and a
training that ends because of a file that only observes it. Prints each fault with its output, and a table; exit status
1 if there are faults.

A run is a fork of this process, which has imported what it needs, and takes about a second.
"""

import _multiprocessing
import argparse
import atexit
import builtins
import errno
import importlib
import io
import json
import mmap
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import synchronize  # uses SemLock as it is now  # noqa: F401
from pathlib import Path
from typing import Any, NamedTuple

from tests.patience import patience

ROOT = Path(__file__).parents[2]
LIMIT = 60.0
"""seconds; a run that takes longer hangs"""
OURS = tuple(f"{ROOT / folder}{os.sep}" for folder in ("torchllm", "recipes"))
OBSERVING = ("torchllm/metrics/", "torchllm/tools/watch/")
"""what fails in their lines ends no training"""


class Call(NamedTuple):
    """A function that calls into the system."""

    owner: Any
    name: str
    errors: tuple[str, ...]
    """to raise: names of errno, or

    ESTALE      from then on the whole top folder of the path is stale
    full        what is written to the file finds no room
    killed      the new process dies at once
    no memory   MemoryError
    no thread   the RuntimeError of Python
    """


READ = ("ENOENT", "EACCES", "ESTALE")
WRITE = (*READ, "ENOSPC")
CALLS = {
    **{name: Call(os, name, READ) for name in ("stat", "lstat", "listdir", "scandir", "readlink", "statvfs")},
    **{name: Call(os, name, READ) for name in ("unlink", "remove", "rmdir")},
    **{name: Call(os, name, WRITE) for name in ("mkdir", "rename", "replace", "link")},
    **{name: Call(os, name, ("ESTALE", "ENOSPC")) for name in ("write", "pwrite", "fsync", "ftruncate")},
    **{name: Call(os, name, ("ESTALE",)) for name in ("fstat", "pread", "preadv")},
    "open": Call(io, "open", (*READ, "no memory")),
    "open to write": Call(io, "open", (*WRITE, "full")),
    "os.open": Call(os, "open", READ),
    "os.open to write": Call(os, "open", (*WRITE, "full")),
    "mmap": Call(mmap, "mmap", ("ENOMEM",)),
    "fork": Call(os, "fork", ("ENOMEM", "killed")),
    "exec": Call(subprocess, "_fork_exec", ("ENOMEM", "killed")),
    "semaphore": Call(_multiprocessing, "SemLock", ("ENOSPC", "ENOENT")),
    "thread": Call(threading, "_start_new_thread", ("no thread",)),
    "bind": Call(socket.socket, "bind", ("EACCES",)),
    "cleanup": Call(
        None, "", ("ENOENT", "ESTALE")
    ),  # by Python 3.11's TemporaryDirectory: EACCES makes it go on for ever
}
"""by the name in the table"""


class Place(NamedTuple):
    """A call by a line of ours."""

    call: str
    line: str
    caller: str
    """the line of ours that has called the function of `line`"""


class Fault(NamedTuple):
    """An error to raise whenever a program comes to a place."""

    place: Place
    error: str


class Injector:
    """Stands before the calls, and records their places or raises the error of a fault."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault = fault
        self.places: dict[Place, None] = {}
        self.stale: str | None = None
        """a top folder whose files cannot be reached any more"""

    def install(self) -> None:
        """Replace the calls of this process."""
        for call, (owner, name, _) in CALLS.items():
            if owner is None or call.endswith(" to write"):  # the same function as for reading
                continue
            function = getattr(owner, name)
            stand_in = self._stand_in(call, function)
            for attribute, value in vars(function).items() if isinstance(function, type) else ():
                if not attribute.startswith("__"):
                    setattr(stand_in, attribute, value)
            setattr(owner, name, stand_in)
            for functions in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
                if function in functions:
                    functions.add(stand_in)
        builtins.open = io.open

    def _stand_in(self, call: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*arguments: Any, **options: Any) -> Any:
            place = _place(call, arguments, options)
            if place is not None:
                self.places[place] = None
                if self.fault is not None:
                    return self._act(self.fault, place, partial(function, *arguments, **options))
            return function(*arguments, **options)

        return stand_in

    def _act(self, fault: Fault, place: Place, call: "partial[Any]") -> Any:
        path = _path(call)
        folder = None if path is None else _top_folder(path)
        is_no_room = place.call == fault.place.call == "semaphore"  # for one is no room for any
        if place != fault.place and not is_no_room:
            if folder is not None and folder == self.stale:
                raise _system_error("ESTALE", path)
            return call()
        match fault.error:
            case "no memory":
                raise MemoryError
            case "no thread":
                raise RuntimeError("can't start new thread")
            case "full":
                full = call.func("/dev/full", *call.args[1:], **call.keywords)
                return full
            case "killed":
                child = call()
                if child:
                    os.kill(child, signal.SIGKILL)
                return child
            case "ESTALE":
                self.stale = folder
        raise _system_error(fault.error, path)


def _place(call: str, arguments: Sequence[Any], options: dict[str, Any]) -> Place | None:
    """Return the place of a call that is made now; None if no line of ours has led to it."""
    lines = []
    frame = sys._getframe(2)
    while frame is not None and len(lines) < 2:
        file = frame.f_code.co_filename
        if not lines and frame.f_code.co_name == "_rmtree" and file == tempfile.__file__:
            call = "cleanup"
        if file.startswith(OURS):
            lines.append(f"{os.path.relpath(file, ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    if not lines:
        return None
    how = [*arguments[1:2], *options.values()]
    if call == "open" and any(isinstance(word, str) and set(word) & set("wax+") for word in how[:1]):
        call = "open to write"
    if call == "os.open" and arguments[1] & (os.O_WRONLY | os.O_RDWR):
        call = "os.open to write"
    return Place(call, *lines, *[""] * (2 - len(lines)))


def _path(call: "partial[Any]") -> str | None:
    """Return the path that is a call's first argument, if it is one."""
    is_path = call.args and isinstance(call.args[0], (str, os.PathLike)) and call.keywords.get("dir_fd") is None
    return os.fspath(call.args[0]) if is_path else None


def _top_folder(path: str) -> str | None:
    """Return the first part of a path in the working directory, which is a program's whole world."""
    relative = os.path.relpath(path)
    return None if relative.startswith("..") else relative.split(os.sep)[0]


def _system_error(name: str, path: str | None) -> OSError:
    number = getattr(errno, name)
    return OSError(number, os.strerror(number), *([] if path is None else [path]))


CONFIG = """
[run]
device = "cpu"
folder = "run"

[model]
layers = 1
hidden = 16
ffn = 16
heads = 1
kv_heads = 1
vocab = 258

[data]
tokenizer = "bytes"
cache = "cache"
workers = 1
validation_fraction = 0.2
sources = [{kind = "text", path = "text"}]

[parallel]
dp_shard = 1

[training]
steps = 4
micro_batch_size = 2
global_batch_size = 2
sequence_length = 32

[schedule]
warmup_steps = 1

[evaluate]
interval = 2
sequences = 2

[metrics]
log_interval = 1

[checkpoint]
interval = 2
"""


class Program(NamedTuple):
    """A program to try, in a folder with config.toml, text/, recipe.py, and the run of `CONFIG` up to step 2."""

    command: tuple[str, ...]
    """a recipe or a module, and its arguments"""
    results: str
    """pattern of the files that are the same after each run that ends with status 0"""
    calls: tuple[str, ...] = tuple(CALLS)
    """calls to try"""


PROGRAMS = {
    "pretrain": Program(("recipes/pretrain.py", "config.toml"), "run/checkpoints/step-00000004/*.distcp"),
    "prepare": Program(
        ("recipes/prepare.py", "config.toml", "--prepare.folder=tokens", "--prepare.processes=1"), "tokens/*/*.bin"
    ),
    "prepare in two processes": Program(
        (
            *("recipes/prepare.py", "config.toml", "--prepare.folder=tokens"),
            *("--prepare.processes=2", "--prepare.shard_mib=0.001"),
        ),
        "tokens/*/*.bin",
        ("exec", "semaphore"),
    ),
    "export": Program(("recipes/export.py", "run/config.toml", "--export.folder=exported"), "exported/*.safetensors"),
    "launch": Program(("torchllm.tools.launch.launch", "--run-folder=run", "recipe.py"), "trained"),
}
FIRST_HALF = Program(("recipes/pretrain.py", "config.toml", "--training.steps=2"), "run/checkpoints/step-00000002/*")


class Ended(NamedTuple):
    """How a run has ended."""

    status: int | None
    """negative: the signal that killed it; None: it hung"""
    output: str


class Bench:
    """Runs programs in a folder that is made anew for each run."""

    def __init__(self, root: Path) -> None:
        self.given, self.world = root / "given", root / "world"
        (self.given / "text").mkdir(parents=True)
        for number in range(5):
            (self.given / f"text/{number}.txt").write_text("The quick brown fox. " * (20 + number))
        (self.given / "config.toml").write_text(CONFIG)
        (self.given / "recipe.py").write_text("open('trained', 'w').write('yes')\n")
        (self.given / "temporary").mkdir()

    def train_first_half(self) -> None:
        """Make the run that the others read, and go on from."""
        self.record(FIRST_HALF)
        shutil.copytree(self.world / "run", self.given / "run")

    def record(self, program: Program) -> list[Place]:
        """Run a program undisturbed; return its places, and import what it has imported."""
        ended = self.run(program, None)
        assert ended.status == 0, ended.output
        record = json.loads((self.world / "record.json").read_text())
        for module in record["modules"]:
            with suppress(Exception):  # such as __mp_main__
                importlib.import_module(module)
        return [Place(*place) for place in record["places"]]

    def results(self, program: Program) -> dict[str, bytes]:
        """Return the results of the last run."""
        return {path.name: path.read_bytes() for path in self.world.glob(program.results)}

    def run(self, program: Program, fault: Fault | None) -> Ended:
        """Run a program in a fork of this process."""
        shutil.rmtree(self.world, ignore_errors=True)
        shutil.copytree(self.given, self.world)
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                _be(program, self.world, fault, output.fileno())
            status = _wait(child)
            output.seek(0)
            return Ended(status, output.read())


def _wait(child: int) -> int | None:
    """Return the status of a child process; None after killing one that hangs. What it leaves behind is killed."""
    deadline = time.monotonic() + patience(LIMIT)
    status = None
    while status is None and time.monotonic() < deadline:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        time.sleep(0.005)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def _be(program: Program, world: Path, fault: Fault | None, output: int) -> None:
    """Become a run of a program, as an interpreter would start it, and end with its status."""
    status = 70
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(world)
        os.environ |= {"HOME": str(world / "temporary"), "TMPDIR": str(world / "temporary")}
        tempfile.tempdir = None
        atexit._clear()
        sys.excepthook = sys.__excepthook__
        injector = Injector(fault)
        injector.install()
        status = _interpret(program.command)
        if fault is None:
            record = {"places": list(injector.places), "modules": list(sys.modules)}
            (world / "record.json").write_text(json.dumps(record))
    finally:
        os._exit(status)


def _interpret(command: Sequence[str]) -> int:
    """Run a recipe or a module to the end of the process, and return its status."""
    status = 0
    sys.argv = list(command)
    try:
        if command[0].endswith(".py"):
            runpy.run_path(str(ROOT / command[0]), run_name="__main__")
        else:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def judge(ended: Ended, fault: Fault, *, is_same: bool) -> str:
    """Return what came of a run, a column of the table. is_same: its results are those of an undisturbed run."""
    status, output = ended
    if status is None:
        return "hang"
    if re.search(r"^Traceback|^  File ", output, re.MULTILINE):
        return "traceback"
    if status == 0:
        return "went on" if is_same else "another result"
    ends_all = fault.error in ("ESTALE", "no memory", "no thread")  # the checkpoints are stale, too
    if fault.place.line.startswith(OBSERVING) and not ends_all:
        return "ended by an observer"
    last_line = output.rstrip().rpartition("\n")[2]
    return "one line" if status > 0 and re.search(r"\berror: .|: .|was killed", last_line) else "mute"


GOOD = ("went on", "one line")


class Table:
    """Counts what came of the runs."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.reports: list[str] = []
        """of the faults"""

    def try_part(self, bench: Bench, name: str, part: int, parts: int) -> None:
        """Try every `parts`-th fault of a program, from number `part` on."""
        program = PROGRAMS[name]
        places = bench.record(program)
        expected = bench.results(program)
        assert expected, name
        faults = [Fault(place, error) for place in places if place.call in program.calls for error in _errors(place)]
        outcomes = self.outcomes.setdefault(name, Counter())
        for fault in faults[part::parts]:
            ended = bench.run(program, fault)
            outcome = judge(ended, fault, is_same=bench.results(program) == expected)
            outcomes[outcome] += 1
            words = f"{name}: {fault.error} at {' '.join(fault.place)}: {outcome}, status {ended.status}"
            if os.environ.get("SHOW"):
                print(words, *ended.output.splitlines()[-3:], sep="\n    ", flush=True)
            if outcome not in GOOD:
                self.reports.append("\n    ".join([words, *ended.output.splitlines()[-30:]]))

    def __str__(self) -> str:
        bad = sorted({outcome for counts in self.outcomes.values() for outcome in counts} - {*GOOD})
        columns = [*GOOD, *dict.fromkeys(["traceback", "hang", *bad])]
        lines = [f"| program | tried | {' | '.join(columns)} |", f"|---|--:|{'--:|' * len(columns)}"]
        for name, counts in self.outcomes.items():
            numbers = [counts.total(), *(counts[column] for column in columns)]
            lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
        return "\n".join([*self.reports, *lines])


def _errors(place: Place) -> tuple[str, ...]:
    return CALLS[place.call].errors


def try_all(names: Sequence[str], part: int = 0, parts: int = 1) -> Table:
    """Try a part of the faults of some programs."""
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        if {"pretrain", "export"} & {*names}:
            bench.train_first_half()
        for name in names:
            table.try_part(bench, name, part, parts)
    return table


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--part", default="0/1", help="K/N: every N-th fault, from number K on")
    options = parser.parse_args(arguments)
    part, parts = map(int, options.part.split("/"))
    table = try_all(options.programs or list(PROGRAMS), part, parts)
    print(table)
    return 1 if table.reports else 0


if __name__ == "__main__":
    from tests.faults import injected_errors  # its lines are not those of a recipe, which is __main__

    sys.exit(injected_errors.main(sys.argv[1:]))
