"""Restarts of a job by its launchers: how an attempt ends, and whether another one follows. No torch.

An attempt is not repeated where the same would come of it: after a RefusedStart, a UserError, or exit status 2; or
after `run.restarts` attempts without progress. Progress is a checkpoint of a later step than any before it. So a job
that dies at the same step each time ends, whereas one that loses a rank per day never does.
"""

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from torchllm.checkpoint.manifest import SUSPECT
from torchllm.runtime.stop import STOP, STOPPED
from torchllm.tools.launch.start_lines import say_line

Verdict = Literal["restart", "end", "refuse"]
"""outcome of an attempt; refuse: the job ends with exit status 2"""
EndingKind = Literal["done", "failed", "hung", "left", "user_error", "refused", "stopped", "early"]
"""how a node's part of an attempt has ended.

failed: a rank died, or had an error. hung: the launcher has ended ranks that were stuck. left: a rank ended with exit
status 0 although the job was not done. user_error, refused: ranks said why. stopped: another node's part ended first.
early: the same, after all ranks of this node had ended with exit status 0.
"""


class AttemptOver(Exception):
    """Another node's part of this attempt has failed."""


class JobOver(Exception):
    """Another launcher has ended the job, or is gone."""


class JobStopped(JobOver):
    """The job was asked to stop while its nodes waited for each other: there was nothing to save."""


_CHECKPOINT = re.compile(r"step-(\d{8,})")


class PartEnding(NamedTuple):
    """How a node's part of an attempt has ended."""

    kind: EndingKind
    rank: int = 0
    """which failed, or left"""
    status: int = 0
    """its exit status; negative: the signal that killed it"""
    host: str = ""
    """its host; "" in a job of one node"""

    def text(self) -> str:
        """Return the ending as a line; `parse` is the inverse."""
        return f"{self.kind} {self.rank} {self.status} {self.host}"

    @classmethod
    def parse(cls, text: str) -> "PartEnding":
        """Read a line that `text` wrote; "stopped" if it did not."""
        kinds = "|".join(get_args(EndingKind))
        match = re.fullmatch(rf"({kinds}) (\d{{1,9}}) (-?\d{{1,3}}) ([\w.-]{{0,255}})", text)
        if match is None:  # whoever reaches the launchers' store may write there
            return cls("stopped")
        return cls(match[1], int(match[2]), int(match[3]), match[4])  # type: ignore[arg-type]  # the pattern lists them

    def describe(self) -> str:
        """Return which rank has ended, and how; "" if none of this node has ended by itself."""
        if self.kind not in ("failed", "hung", "left"):
            return ""
        subject = f"rank {self.rank}" + (f" on {self.host}" if self.host else "")
        if self.kind == "left":
            return (
                f"{subject} ended in the middle of the run, with exit status 0: look for a return, break or exit that "
                "other ranks do not take"
            )
        if self.kind == "hung":
            return f"{subject} was stuck"
        if self.status < 0:
            return f"{subject} was killed: {signal_name(-self.status)}"
        return f"{subject} ended with status {self.status}"

    @property
    def already_reported(self) -> bool:
        """Return whether the rank, or its launcher, has printed why it has ended."""
        return self.kind in ("user_error", "refused", "hung") or (self.kind == "failed" and self.status == 1)


def signal_name(number: int) -> str:
    """Return the name of a signal, as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


@dataclass
class Restarts:
    """Node 0's account of the restarts of a job."""

    limit: int
    """`run.restarts`: restarts without progress"""
    folder: Path
    """of the run"""
    made: int = 0
    """restarts since the last progress"""
    newest: int = -1
    """highest step of a checkpoint that was published before or in earlier attempts; -1 if there is none"""

    def __post_init__(self) -> None:
        self.newest = newest_step(self.folder)

    def decide(self, endings: Sequence[PartEnding], first: int) -> Verdict:
        """Return the verdict on an attempt that has failed, and print it to stderr.

        endings: of each node. first: the node whose part ended first, which is the cause.
        """
        if any(ending.kind == "refused" for ending in endings):
            return "refuse"
        if self.limit == 0 or any(ending.kind == "user_error" for ending in endings):
            return "end"
        if (self.folder / STOP).exists() or (self.folder / STOPPED).exists():
            say_line("not restarted: the run was asked to stop")
            return "end"
        step = newest_step(self.folder)
        if step > self.newest:
            self.newest, self.made = step, 0
        cause = endings[first].describe() or f"node {first} has failed"
        start = f"the checkpoint of step {step}" if step >= 0 else "the beginning"
        if self.made >= self.limit:
            say_line(f"not restarted: {self.made} of {self.limit} restarts (run.restarts) have made no progress")
            return "end"
        self.made += 1
        say_line(f"{cause}; restart {self.made} of {self.limit} from {start}")
        return "restart"


def newest_step(folder: Path) -> int:
    """Return the highest step of the checkpoints in a run folder that are not suspect; -1 if there is none."""
    steps = [-1]
    with suppress(OSError):
        for file in (folder / "checkpoints").glob("*/manifest.json"):
            match = _CHECKPOINT.fullmatch(file.parent.name)
            if match and not file.with_name(SUSPECT).exists():
                steps.append(int(match[1]))
    return max(steps)
