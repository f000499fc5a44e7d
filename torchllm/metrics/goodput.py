"""Goodput: the share of a run's wall time that trained it, over all its launches, and what the rest went to.

    start-up     from ./run_train.sh to the first step: processes, imports, model, data, checkpoint
    compile      what the first step of a launch takes beyond the later ones: compilation, allocation, warm-up
    data         waiting for a batch
    checkpoint   saving
    evaluate     evaluation
    rebuild      going on with another config (`adapt.py`)
    restart      between the end of one launch and the start of the next, and steps that had to be done again

Kept in goodput.json of the run folder, as of the last logged step: a killed launch leaves all but its last steps there.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "goodput.json"
LAUNCHED = "TORCHLLM_LAUNCHED"
"""environment variable of run_train.sh: when it was started, in seconds since 1970"""


@dataclass
class Launch:
    """One start of the run."""

    started: float
    """seconds since 1970"""
    first: int
    """step that it resumed from"""
    seen: float = 0.0
    """when it logged last"""
    step: int = 0
    """of that time"""
    lost: dict[str, float] = field(default_factory=dict)
    """seconds by cause"""

    @property
    def productive(self) -> float:
        """Seconds of steps."""
        return self.seen - self.started - sum(self.lost.values())


class Goodput:
    """The account of a run; rank 0's."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self.earlier = read(self.file)
        launched = min(time.time(), float(os.environ.get(LAUNCHED, time.time())))
        self.launch = Launch(launched, 0, launched)

    def begin(self, start: int) -> None:
        """Steps begin after step `start`; all since the launch, or since the last `write`, was getting there."""
        again = "start-up" in self.launch.lost
        if not again:
            self.launch.first = start
        self.lose("rebuild" if again else "start-up", time.time() - self.launch.seen)
        self.launch.seen, self.launch.step = time.time(), start

    def lose(self, cause: str, seconds: float) -> None:
        """So many seconds more were no steps."""
        self.launch.lost[cause] = self.launch.lost.get(cause, 0.0) + seconds

    def write(self, step: int) -> None:
        """At a logged step, and at the end."""
        self.launch.seen, self.launch.step = time.time(), step
        temporary = self.file.with_suffix(".partial")
        temporary.write_text(json.dumps([asdict(launch) for launch in [*self.earlier, self.launch]]) + "\n")
        temporary.replace(self.file)

    def summary(self) -> str:
        """In a line: "goodput 91.2 % of 104 s; start-up 5.1 %, checkpoint 3.7 %"."""
        wall, lost = account([*self.earlier, self.launch])
        shares = {cause: seconds / wall for cause, seconds in sorted(lost.items(), key=lambda pair: -pair[1])}
        causes = ", ".join(f"{cause} {share:.1%}" for cause, share in shares.items() if share >= 0.0005)
        return f"goodput {1 - sum(shares.values()):.1%} of {wall:.0f} s" + (f"; {causes}" if causes else "")


def read(file: Path) -> list[Launch]:
    """Earlier launches; none where the file is not there or is damaged: an account stops no run."""
    try:
        return [Launch(**launch) for launch in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError):
        return []


def account(launches: list[Launch]) -> tuple[float, dict[str, float]]:
    """Wall seconds from the first launch to the last logged step, and those that were lost, by cause."""
    lost: dict[str, float] = {}
    for launch, after in zip(launches, [*launches[1:], None], strict=True):
        for cause, seconds in launch.lost.items():
            lost[cause] = lost.get(cause, 0.0) + seconds
        if after is not None:
            done = launch.step - launch.first
            again = min(done, max(0, launch.step - after.first))
            redone = launch.productive * again / done if done else 0.0
            lost["restart"] = lost.get("restart", 0.0) + max(0.0, after.started - launch.seen) + redone
    return launches[-1].seen - launches[0].started, lost
