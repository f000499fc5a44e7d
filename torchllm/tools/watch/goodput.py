"""Goodput: the share of a run's wall time that trained it, over all its launches, and where the rest went.

    start-up     from ./run_train.sh to the first step: processes, imports, model, data, checkpoint
    compile      extra time of the first step of a launch over the later ones: compilation, allocation, warm-up
    data         waiting for a batch
    checkpoint   saving
    evaluate     evaluation
    rebuild      going on with another config (`torchllm/tools/adapt`)
    restart      between the end of an attempt and the start of the job's next one, and steps that had to be done again
    not running  between the end of a job and the start of the next one, unless the run was finished

Kept in goodput.json of the run folder, as of the last logged step: a killed launch leaves all but its last steps there.
The file is a list in JSON with a line per launch.

Within a launch a monotonic clock is read. Between launches it is the machine's clock; if that was set back, no time has
passed between them. So a run's time is never less than the sum of its parts.
"""

import json
import logging
import os
import time
from dataclasses import asdict
from pathlib import Path

from torchllm.config.environment import LAUNCHED, is_restart
from torchllm.metrics.observer import ObservedRun, Observer
from torchllm.metrics.sinks import Record
from torchllm.runtime.tolerance import Tolerance
from torchllm.tools.watch.launches import FILE, Launch, account, read_launches

log = logging.getLogger("torchllm")

SHOWN = 0.0005
"""causes with a smaller share of the time are not in the summary"""


class Goodput(Observer):
    """The account of a run; only rank 0 has one. logs_summary: log it at the end."""

    def __init__(self, folder: Path, *, logs_summary: bool = True) -> None:
        self.logs_summary = logs_summary
        self.logged_step: int | None = None
        self.file = folder / FILE
        self.tolerance = Tolerance(str(self.file))
        self.earlier_launches = read_launches(self.file)
        self.clock_started = time.monotonic()
        self.began = started = time.time()
        launched = float(os.environ.get(LAUNCHED, started))
        if self.earlier_launches:  # a time that two launches share is counted once
            launched = max(launched, self.earlier_launches[-1].seen)
        launched = min(started, launched)
        self.launch = Launch(launched, 0, launched, is_restart=is_restart())

    def begin(self, run: ObservedRun) -> None:
        self.begin_steps(run.start, run.config.training.steps)

    def begin_steps(self, start: int, last: int = 0) -> None:
        """Note that steps begin after `start`, up to `last`: the time since the launch or `write` trained nothing."""
        self.launch.last = last
        begun = self._now()
        preparing = begun - self.launch.seen
        if "start-up" in self.launch.lost:
            self.spent("rebuild", preparing)
        else:
            self.launch.first = start
            self.spent("start-up", preparing)
        self.launch.seen, self.launch.step = begun, start

    def spent(self, cause: str, seconds: float) -> None:
        self.launch.lost[cause] = self.launch.lost.get(cause, 0.0) + seconds

    def write(self, step: int) -> None:
        """Write the launches to goodput.json, this one as of now and of the logged step `step`.

        A file that cannot be written is logged and ends nothing; the next logged step writes it.
        """
        self.launch.seen, self.launch.step = self._now(), step
        lines = ",\n".join(json.dumps(asdict(launch)) for launch in [*self.earlier_launches, self.launch])
        with self.tolerance.attempt():
            temporary = self.file.with_suffix(".partial")
            temporary.write_text(f"[\n{lines}\n]\n")
            temporary.replace(self.file)

    def _now(self) -> float:
        """Return seconds since 1970, unaffected by clock changes since this launch began."""
        return self.began + time.monotonic() - self.clock_started

    def summary(self) -> str:
        """Return a line: "goodput 91.2% of 104 s; start-up 5.1%, checkpoint 3.7%"."""
        seconds, lost = account([*self.earlier_launches, self.launch])
        if not seconds:
            return "goodput: no step was taken"
        line = f"goodput {max(0.0, 1 - sum(lost.values()) / seconds):.1%} of {seconds:.0f} s"
        causes = []
        for cause, lost_seconds in sorted(lost.items(), key=lambda item: -item[1]):
            share = lost_seconds / seconds
            if share >= SHOWN:
                causes.append(f"{cause} {share:.1%}")
        return f"{line}; {', '.join(causes)}" if causes else line

    def logged(self, n: int, record: Record) -> None:
        self.logged_step = n
        self.write(n)

    def end(self) -> None:
        """See Observer: account for the time after the last logged step."""
        if self.logged_step is not None:
            self.write(self.logged_step)

    def close(self) -> None:
        if self.logs_summary:
            log.info("%s", self.summary())
