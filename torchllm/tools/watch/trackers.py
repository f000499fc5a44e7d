"""Experiment trackers in addition to TensorBoard: Weights & Biases, MLflow, trackio.

A tracker's library may raise, block, or wait for a network. So a helper process of rank 0 (`send_records.py`) calls it,
which reads metrics.jsonl while the run appends to it: nothing of a tracker is on the path of a step, and no record is
lost that is in metrics.jsonl. A helper that ends is started again; one that does not finish at the end of the run is
killed. Records that were not sent by then are sent when the run resumes, or by

    python -P -m torchllm.tools.watch.send_records RUN_FOLDER TRACKER

RUN_FOLDER/trackers holds the records sent to each tracker (`SentRecords`), which also name its run, so that a resumed
run continues it, and the output of its library.
"""

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import torch

from torchllm import __version__
from torchllm.config import Config
from torchllm.metrics.observer import ObservedRun, Observer
from torchllm.metrics.sinks import Record
from torchllm.runtime.tolerance import Tolerance

log = logging.getLogger("torchllm")

FOLDER = "trackers"
"""in the run folder"""
METRICS = "metrics.jsonl"
END = b"end\n"
"""written to a helper's standard input: send the remaining records, and end"""
PATIENCE = 20.0
"""seconds that the end of a run waits for a helper"""
RESTART_SECONDS = 60.0
"""after which a helper that has ended is started again"""


class RunFacts(NamedTuple):
    """The facts about a run that a tracker gets."""

    project: str
    """project or experiment: the value of the tracker's key in [metrics]"""
    name: str
    run_id: str
    """the same for a resumed run; letters, digits and hyphens"""
    folder: Path
    """for the tracker's own files"""
    config: Mapping[str, Any]
    """the run's config by section, and `environment`"""


class ExperimentTracker(NamedTuple):
    """An open run of a tracker. Its calls may block and raise."""

    log: Callable[[int, Mapping[str, float]], None]
    """sends the values of a step, by name"""
    close: Callable[[], None]
    """sends pending values, and ends the run"""


def record_key(record: Mapping[str, Any]) -> tuple[int, bool | str]:
    """Return the key of a record within its run: the step, and "tasks", or whether it has a loss (else a profile)."""
    of_tasks = any(key.startswith("tasks/") for key in record)
    return record["step"], "tasks" if of_tasks else "loss" in record


class SentRecords:
    """The records sent to a tracker's run, in a file that each is appended to; and the name of that run.

    A line is `["run", ID]`, after which a new run of the tracker begins, or `[*record_key(record), loss]`.
    """

    def __init__(self, run_folder: Path, tracker: str) -> None:
        self.path = run_folder / FOLDER / f"{tracker}.jsonl"
        self.run_id = ""
        """empty: no run was begun"""
        self.losses: dict[tuple[int, bool | str], float | None] = {}
        for first, *rest in complete_lines(self.path):
            if first == "run":
                [self.run_id] = rest
                self.losses = {}
            else:
                kind, loss = rest
                self.losses[first, kind] = loss

    def begin_run(self, run_id: str) -> None:
        """Note that all records are to be sent to a new run."""
        self.run_id = run_id
        self.losses = {}
        self._append(["run", run_id])

    def add(self, record: Mapping[str, Any]) -> None:
        """Note that a record was sent."""
        step, kind = record_key(record)
        self.losses[step, kind] = record.get("loss")
        self._append([step, kind, record.get("loss")])

    def _append(self, line: list[Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def complete_lines(path: Path) -> Iterator[Any]:
    """Yield the JSON values of a file's lines; none if there is no file. Lines cut short by a kill are skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                with suppress(ValueError):
                    yield json.loads(line)


def count_unsent(run_folder: Path, tracker: str) -> int:
    """Return how many records of metrics.jsonl a tracker was not sent."""
    sent = SentRecords(run_folder, tracker).losses
    return sum(record_key(record) not in sent for record in complete_lines(run_folder / METRICS))


def environment_facts(config: Config, device: str) -> dict[str, Any]:
    """Return the facts about the machine that a tracker gets. device: "cpu", or the name of the GPU."""
    return {
        "torchllm": __version__,
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "device": device,
        "ranks": config.parallel.ranks,
    }


class TrackerHelper(Observer):
    """Keeps a helper process that sends the records of rank 0 to a tracker. It takes no time of a step.

    The helper is started with the first record, when metrics.jsonl was cut to the step that the run resumed from.
    """

    def __init__(self, run_folder: Path, tracker: str, patience: float = PATIENCE) -> None:
        """tracker: a key of [metrics]. patience: seconds that `end` waits at most."""
        self.run_folder = run_folder
        self.tracker = tracker
        self.patience = patience
        self.environment: dict[str, Any] = {}
        self.tolerance = Tolerance(f"metrics.{tracker}")
        self.helper: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.output = run_folder / FOLDER / f"{tracker}.log"

    def begin(self, run: ObservedRun) -> None:
        device = run.runtime.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self.environment = environment_facts(run.config, name)

    def logged(self, n: int, record: Record) -> None:
        """See Observer. The record is in metrics.jsonl; start the helper if it does not run, but not too often."""
        has_ended = self.helper is not None and self.helper.poll() is not None
        if has_ended:
            self.tolerance.failed(ChildProcessError(0, f"its process has ended; see {self.output}"))
        if self.helper is None or (has_ended and time.monotonic() - self.started > RESTART_SECONDS):
            try:
                self._start()
            except OSError as error:
                self.tolerance.failed(error)

    def _start(self) -> None:
        self.started = time.monotonic()
        self.output.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "torchllm.tools.watch.send_records", str(self.run_folder), self.tracker]
        command += [f"--follow={os.getpid()}", f"--environment={json.dumps(self.environment)}"]
        with self.output.open("ab") as output:
            # In a separate session: the terminal's Ctrl-C is for the run, which tells the helper to end.
            self.helper = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )

    def end(self) -> None:
        """See Observer: wait until all is sent, `patience` seconds at most, and log the number that is not."""
        if self.helper is not None:
            with Tolerance(f"metrics.{self.tracker}").attempt():
                self._end(self.helper)

    def _end(self, helper: "subprocess.Popen[bytes]") -> None:
        assert helper.stdin is not None
        with suppress(OSError):  # it has ended already
            helper.stdin.write(END)
            helper.stdin.close()
        try:
            helper.wait(self.patience)
        except subprocess.TimeoutExpired:
            text = "metrics.%s: its process has not ended %g s after the steps, and is killed; see %s"
            log.warning(text, self.tracker, self.patience, self.output)
        with suppress(ProcessLookupError):
            os.killpg(helper.pid, signal.SIGKILL)  # and the processes that the tracker's library has started
        helper.wait()
        self.helper = None
        if unsent := count_unsent(self.run_folder, self.tracker):
            log.warning(
                "metrics.%s: %d records are not sent; the run sends them when it resumes, or: "
                "python -P -m torchllm.tools.watch.send_records %s %s",
                self.tracker,
                unsent,
                quote(str(self.run_folder)),
                self.tracker,
            )
