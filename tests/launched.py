"""run_train.sh as a process in the background, with all that it starts."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from tests.patience import patience
from tests.tiny_run import DEBUG, ROOT, free_port

SCRIPT_NAME = "run_train.sh"
SCRIPT = str(ROOT / SCRIPT_NAME)
PATIENCE = patience(240)
"""seconds that a run may take: alone one takes 15, but beside ranks of other tests it has a tenth of a core"""
END_WITHIN = patience(30)
"""seconds in which all processes of a run are gone after one was killed"""
MARK = "TORCHLLM_TEST_RUN"
"""environment variable by which all processes of a run are found"""


class Started:
    """run_train.sh as a process, and what it and its ranks say."""

    def __init__(self, output: Path, arguments: Sequence[str], prefix: Sequence[str] = (), **environment: str) -> None:
        """Start it. prefix: a command that runs it, such as env."""
        output.mkdir(parents=True, exist_ok=True)
        self.mark = uuid4().hex
        self.out = output / "out"
        self.err = output / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            command = [*prefix, SCRIPT, *arguments]
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=clean({MARK: self.mark, **environment}),
                stdout=out,
                stderr=err,
                start_new_session=True,
                # A test suite in the background ignores Ctrl-C, and so would all that it starts.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def until(self, happened: Callable[[], object]) -> None:
        """Wait for something that happens while it runs."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.02)

    def processes(self) -> dict[int, str]:
        """Return the command lines of its processes that run, by process id."""
        commands = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to another user
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        return commands

    def until_gone(self) -> None:
        """Wait until none of its processes is left."""
        deadline = time.monotonic() + END_WITHIN
        while commands := self.processes():
            assert time.monotonic() < deadline, commands
            time.sleep(0.05)

    def kill_everything(self) -> None:
        family = [self.process.pid]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # or it would start others meanwhile
            family += children(pid)
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def children(pid: int) -> list[int]:
    pids = []
    if Path("/proc/self/status").exists():  # `ps` is not everywhere
        for status in Path("/proc").glob("[0-9]*/status"):
            with suppress(OSError):  # it has ended
                if f"\nPPid:\t{pid}\n" in status.read_text():
                    pids.append(int(status.parent.name))
        return pids
    listing = subprocess.run(["ps", "-A", "-o", "pid=", "-o", "ppid="], capture_output=True, text=True, check=True)
    for line in listing.stdout.splitlines():
        child, parent = line.split()
        if parent == str(pid):
            pids.append(int(child))
    return pids


def launcher_of(pid: int) -> int:
    """Return the one process that a run_train.sh waits for: its torchrun, or its python where no torchrun is needed."""
    (launcher,) = [child for child in children(pid) if not is_pause(child)]
    return launcher


def is_pause(pid: int) -> bool:
    """Return whether a process is a `sleep` of run_train.sh, is about to become one, or has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() in ("sleep", "bash", SCRIPT_NAME)
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(pid: int, seconds: float = patience(20)) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def clean(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without the variables of schedulers and launchers, and with `extra`."""
    foreign = re.compile(
        r"SLURM|PET_|TORCHELASTIC|(NPROC|NPROC_IS_DEFAULT|NNODES|RECIPE|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_\w+)$"
    )
    environment = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    return environment | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | extra


def without_signs_of_life(text: str) -> str:
    """Return an output without the lines that a slow start, or another long wait, adds."""
    return re.sub(r"^.*: \d+ s so far.*\n", "", text, flags=re.MULTILINE)


def start_nodes(
    start: Callable[..., Started], folder: Path, *arguments: str, nodes: int = 2, **environment: str
) -> list[Started]:
    """Start a job of nodes with one rank each, all on this host."""
    pod = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    pod |= {"PET_MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", **environment}
    words = [DEBUG, *arguments, f"--run.folder={folder}"]
    return [start(*words, **pod, PET_NODE_RANK=str(node)) for node in range(nodes)]
