"""The starts of a run as goodput.json has them (`goodput.py`), and the account of the run's wall time. No torch."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

FILE = "goodput.json"


@dataclass
class Launch:
    """One start of the run. The fields are named as in goodput.json."""

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
    last: int = 0
    """the step that it was to train to; 0: unknown, of an earlier version"""
    is_restart: bool = False
    """it is a later attempt of the job of the launch before"""

    @property
    def seconds(self) -> float:
        """From the start of the launch to its last logged step."""
        return max(0.0, self.seen - self.started)

    @property
    def is_finished(self) -> bool:
        """Whether it has trained all of its steps: later launches do more than this one was to do."""
        return 0 < self.last <= self.step

    @property
    def productive(self) -> float:
        """Seconds of steps."""
        return max(0.0, self.seconds - sum(self.lost.values()))


def read_launches(file: Path) -> list[Launch]:
    """Read the earlier launches, up to a damaged one; none if the file is missing: an account stops no run."""
    launches = []
    try:
        text = file.read_text()
        begin = text.find("{")
        while begin >= 0:
            launch, end = json.JSONDecoder().raw_decode(text, begin)
            launches.append(Launch(**launch))
            begin = text.find("{", end)
    except (OSError, ValueError, TypeError):
        pass
    return launches


def account(launches: list[Launch]) -> tuple[float, dict[str, float]]:
    """Return the wall seconds from the first launch to the last logged step, and those that were lost, by cause."""
    wall = sum(launch.seconds for launch in launches)
    lost: dict[str, float] = {}
    for launch in launches:
        for cause, seconds in launch.lost.items():
            lost[cause] = lost.get(cause, 0.0) + seconds
    retained = launches[-1].step
    """the last step that no later launch did again"""
    for launch, following in reversed(list(pairwise(launches))):
        retained = min(retained, following.first)
        pause = 0.0 if launch.is_finished else max(0.0, following.started - launch.seen)
        wall += pause
        cause = "restart" if following.is_restart else "not running"
        lost[cause] = lost.get(cause, 0.0) + pause
        # Later launches did the steps after `retained` again.
        steps = launch.step - launch.first
        redone = min(steps, max(0, launch.step - retained))
        lost["restart"] = lost.get("restart", 0.0) + (launch.productive * redone / steps if redone else 0.0)
    return wall, lost
