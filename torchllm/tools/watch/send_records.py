"""Send the new records of a run's metrics.jsonl to an experiment tracker.

    python -P -m torchllm.tools.watch.send_records RUN_FOLDER {wandb,mlflow,trackio}

The helper process of a run (`trackers.py`) runs this with `--follow`: until the run tells it to end, or ends itself.

A run that was killed trains some steps again. They come out the same, bit by bit, and are not sent twice. Where they
come out differently (another learning rate, an earlier checkpoint), the tracker gets a new run with all of
metrics.jsonl, and the earlier one stays as it was.
"""

import argparse
import fcntl
import json
import os
import sys
import threading
import tomllib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchllm.runtime.parent import end_with_starter
from torchllm.tools.resources import RUN_CONFIG
from torchllm.tools.watch.trackers import (
    END,
    FOLDER,
    METRICS,
    ExperimentTracker,
    RunFacts,
    SentRecords,
    record_key,
)

LOOK_SECONDS = 0.5
"""between two looks at metrics.jsonl"""


class Rewritten(Exception):
    """Lines that were read are not in metrics.jsonl any more."""


class Sender:
    """Sends the records of a run folder to a tracker."""

    def __init__(self, run_folder: Path, name: str, environment: Mapping[str, Any]) -> None:
        self.run_folder = run_folder
        self.name = name
        self.environment = environment
        self.sent = SentRecords(run_folder, name)
        self.tracker: ExperimentTracker | None = None

    def send(self, ended: threading.Event) -> None:
        """Send the unsent records; then new ones, until `ended`."""
        is_done = False
        while not is_done:
            try:
                for record in follow(self.run_folder / METRICS, ended):
                    self.send_record(record)
                is_done = True
            except Rewritten:
                continue
        if self.tracker is not None:
            self.tracker.close()

    def send_record(self, record: Mapping[str, Any]) -> None:
        """Send a record, unless it was sent. Raises Rewritten if its step had another loss then."""
        key = record_key(record)
        if key in self.sent.losses:
            if self.sent.losses[key] == record.get("loss"):
                return
            self.begin_again()
            raise Rewritten
        if self.tracker is None:
            self.tracker = self.open()
        values = {name: value for name, value in record.items() if name != "step" and value is not None}
        self.tracker.log(record["step"], values)
        self.sent.add(record)

    def begin_again(self) -> None:
        """Begin a new run of the tracker, which gets all records."""
        if self.tracker is not None:
            self.tracker.close()
        self.tracker = None
        print(f"the run has trained steps anew that {self.sent.run_id} has: a new run gets them all", flush=True)
        self.sent.begin_run(new_run_id())

    def open(self) -> ExperimentTracker:
        """Return the tracker's run: the one that was begun for this run folder, or a new one."""
        if not self.sent.run_id:
            self.sent.begin_run(new_run_id())
        config = read_config(self.run_folder)
        facts = RunFacts(
            project=config["metrics"][self.name],
            name=self.run_folder.resolve().name,
            run_id=self.sent.run_id,
            folder=(self.run_folder / FOLDER).resolve(),
            config={**config, "environment": dict(self.environment)},
        )
        module = import_module(f"torchllm.tools.watch.{self.name}_tracker")
        tracker: ExperimentTracker = getattr(module, f"open_{self.name}")(facts)
        return tracker


def read_config(run_folder: Path) -> dict[str, Any]:
    """Return the resolved config of a run."""
    return tomllib.loads((run_folder / RUN_CONFIG).read_text())


def why_unsent(run_folder: Path, tracker: str) -> str:
    """Return why no record of a run can be sent to a tracker; "" if they can."""
    if not (run_folder / METRICS).exists():
        return f"{run_folder / METRICS}: no such file; name a run folder"
    if find_spec(tracker) is None:
        return f"the package {tracker} is missing: pip install 'torchllm[{tracker}]'"
    if not read_config(run_folder)["metrics"].get(tracker):
        return f"{run_folder / RUN_CONFIG}: metrics.{tracker} names no project: write one there"
    return ""


def new_run_id() -> str:
    """Return a name that no other run has."""
    return uuid.uuid4().hex[:12]


def follow(path: Path, ended: threading.Event) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, and those appended to it until `ended`. Raises Rewritten if it gets shorter."""
    position = 0
    while True:
        is_last_look = ended.is_set()
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < position:
                raise Rewritten
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                position += len(line)
                yield json.loads(line)
        if is_last_look:
            return
        ended.wait(LOOK_SECONDS)


def _wait_for_end(ended: threading.Event) -> None:
    """Set `ended` when the run says so on standard input; end this process if the run ends without a word."""
    if sys.stdin.buffer.readline() != END:
        os._exit(1)
    ended.set()


def main(arguments: Sequence[str]) -> None:
    """Send records as `arguments` say; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("tracker", choices=("wandb", "mlflow", "trackio"))
    parser.add_argument("--follow", type=int, metavar="PROCESS", help="until this process says that the run has ended")
    parser.add_argument("--environment", type=json.loads, default={}, help="facts of the machine, in JSON")
    options = parser.parse_args(arguments)
    if reason := why_unsent(options.run_folder, options.tracker):
        parser.error(reason)
    ended = threading.Event()
    if options.follow is None:
        ended.set()
    else:
        end_with_starter(options.follow)
        threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    folder = options.run_folder / FOLDER
    folder.mkdir(exist_ok=True)
    with (folder / f"{options.tracker}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the helper of an earlier start may still be sending
        Sender(options.run_folder, options.tracker, options.environment).send(ended)


if __name__ == "__main__":
    main(sys.argv[1:])
