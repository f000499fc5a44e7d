"""Goodput: the share of a run's wall time that trained it, over all its launches, and where the rest went.

    start-up     from ./run_train.sh to the first step: processes, imports, model, data, checkpoint
    compile      what the first step of a launch takes beyond the later ones: compilation, allocation, warm-up
    data         waiting for a batch
    checkpoint   saving
    evaluate     evaluation
    rebuild      going on with another config (`torchllm/adapt`)
    restart      between the end of one launch and the start of the next, and steps that had to be done again

Kept in goodput.json of the run folder, as of the last logged step: a killed launch leaves all but its last steps there.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

FILE = "goodput.json"
LAUNCHED = "TORCHLLM_LAUNCHED"
"""environment variable of run_train.sh: when it was started, in seconds since 1970"""
SHOWN = 0.0005
"""causes with a smaller share of the time are not in the summary"""


@dataclass
class Launch:
    """One start of the run. The names of the fields are those of goodput.json."""

    started: float
    """seconds since 1970"""
    first: int
    """step that it resumed from"""
    seen: float = 0.0
    """when it logged last, in seconds since 1970"""
    step: int = 0
    """the step that it logged last"""
    lost: dict[str, float] = field(default_factory=dict)
    """seconds by cause"""

    @property
    def productive(self) -> float:
        """Seconds of steps."""
        return self.seen - self.started - sum(self.lost.values())


class Goodput:
    """The account of a run; only rank 0 has one."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self.earlier_launches = read_launches(self.file)
        started = time.time()
        launched = min(started, float(os.environ.get(LAUNCHED, started)))
        self.launch = Launch(launched, 0, launched)

    def begin(self, start: int) -> None:
        """Note that steps begin after step `start`: the time since the launch, or the last `write`, trained nothing."""
        begun = time.time()
        preparing = begun - self.launch.seen
        if "start-up" in self.launch.lost:
            self.charge("rebuild", preparing)
        else:
            self.launch.first = start
            self.charge("start-up", preparing)
        self.launch.seen, self.launch.step = begun, start

    def charge(self, cause: str, seconds: float) -> None:
        """Charge `seconds` of wall time to `cause`."""
        self.launch.lost[cause] = self.launch.lost.get(cause, 0.0) + seconds

    def write(self, step: int) -> None:
        """Write goodput.json, as of now and of the logged step `step`."""
        self.launch.seen, self.launch.step = time.time(), step
        launches = [asdict(launch) for launch in [*self.earlier_launches, self.launch]]
        temporary = self.file.with_suffix(".partial")
        temporary.write_text(json.dumps(launches) + "\n")
        temporary.replace(self.file)

    def summary(self) -> str:
        """Return a line: "goodput 91.2% of 104 s; start-up 5.1%, checkpoint 3.7%"."""
        seconds, lost = account([*self.earlier_launches, self.launch])
        line = f"goodput {1 - sum(lost.values()) / seconds:.1%} of {seconds:.0f} s"
        causes = []
        for cause, lost_seconds in sorted(lost.items(), key=lambda item: -item[1]):
            share = lost_seconds / seconds
            if share >= SHOWN:
                causes.append(f"{cause} {share:.1%}")
        return f"{line}; {', '.join(causes)}" if causes else line


def read_launches(file: Path) -> list[Launch]:
    """Read the earlier launches; none if the file is missing or damaged: an account stops no run."""
    try:
        return [Launch(**launch) for launch in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError):
        return []


def account(launches: list[Launch]) -> tuple[float, dict[str, float]]:
    """Return the wall seconds from the first launch to the last logged step, and those that were lost, by cause."""
    lost: dict[str, float] = {}
    for launch in launches:
        for cause, seconds in launch.lost.items():
            lost[cause] = lost.get(cause, 0.0) + seconds
    for launch, following in pairwise(launches):
        lost["restart"] = lost.get("restart", 0.0) + restart_seconds(launch, following)
    return launches[-1].seen - launches[0].started, lost


def restart_seconds(launch: Launch, following: Launch) -> float:
    """Return the seconds between two launches, and those of the steps that the second had to do again."""
    between = max(0.0, following.started - launch.seen)
    steps = launch.step - launch.first
    repeated = min(steps, max(0, launch.step - following.first))
    if not repeated:
        return between
    return between + launch.productive * repeated / steps
