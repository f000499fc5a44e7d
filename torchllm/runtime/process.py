"""A rank of a job: its device, its connection to the other ranks, and their decisions to stop and to save.

Every rank makes the same calls in the same order. Votes (stop now?) go through a gloo group on the host and are read
one step (or batch) late, so that none waits for them. They also show whether all ranks are at the same step.
`torchllm/tools/launch/rank_start.py` makes a `Runtime`.
"""

import gc
import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.config.errors import UserError
from torchllm.runtime.heartbeat import beat, heartbeat
from torchllm.runtime.stop import STOP, STOPPED, StopSource, write_marker
from torchllm.runtime.terminal import drop_unwritten_output
from torchllm.runtime.tolerance import Tolerance
from torchllm.runtime.torch_compat import unrecorded

log = logging.getLogger(__name__)

SAVE = "save"
"""file in the run folder that requests a checkpoint now; the user creates it, and the run deletes it"""


@dataclass(kw_only=True)
class Hooks:
    """Hooks of a launcher in a rank. By default they do nothing: a rank without a launcher."""

    check_owner: Callable[[], None] = lambda: None
    """raises LeaseLost if another job has taken the run folder; called before each write to it"""

    def end(self) -> None:
        """Leave the job: called on success, before the process group is destroyed."""


@dataclass
class Runtime:
    """This process, its device, and its connection to the other ranks of the job."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    folder: Path
    host_group: dist.ProcessGroup
    """gloo group of all ranks, for communication on the host"""
    collect_interval: int
    """steps between two garbage collections; 0 leaves them to Python"""
    stop_requests: StopSource
    """requests to stop this rank"""
    hooks: Hooks = field(default_factory=Hooks)
    """hooks of the launcher"""
    has_given_up: bool = False
    """whether an evaluation has ended early because the run is asked to stop: the same on all ranks"""
    _vote: "_Vote | None" = None
    _vote_on_giving_up: "_Vote | None" = None
    should_save: bool = False
    """whether the file `SAVE` requests a checkpoint, as of the last `should_stop`: the same on all ranks"""
    _deletion_of_request: Tolerance = field(default_factory=lambda: Tolerance(f"deletion of the file {SAVE!r}"))
    _is_frozen: bool = False
    """later collections skip the objects that have survived the first one"""

    def __post_init__(self) -> None:
        heartbeat().step = 0

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, the one that logs and writes files."""
        return self.rank == 0

    @property
    def first_rank_on_node(self) -> int:
        """Return the rank of the first process on this node: torchrun numbers the processes of a node in a row."""
        return self.rank - self.local_rank

    @property
    def ranks_on_node(self) -> int:
        """Return the number of ranks on this node; without a launcher, all ranks."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    def should_stop(self, failed: bool = False) -> bool:
        """Return whether any rank was asked to stop, or passed `failed`, by the previous call: the same on all ranks.

        Call it once per step. It reads the vote that the previous call started and starts the next one, which overlaps
        with the step, so the answer comes one step late and no step waits for it.
        """
        beat("vote on stopping")
        stop = False
        if self._vote is None:
            self.stop_requests.begin_votes()
        else:
            stop, self.should_save = self._vote.wait()
            self.stop_requests.begin_training()
            heartbeat().begin_steps()
        self._vote = self._start_vote(failed or self.stop_requests.requested(), self._save_requested())
        return stop or self.has_given_up

    def should_give_up(self) -> bool:
        """Return whether an evaluation should end early, by the previous call: the same on all ranks."""
        last_vote = self._vote_on_giving_up
        self._vote_on_giving_up = self._start_vote(self.stop_requests.is_urgent())
        self.has_given_up = last_vote is not None and any(last_vote.wait())
        return self.has_given_up

    def _start_vote(self, *wishes: bool) -> "_Vote":
        step = heartbeat().step
        flags = torch.tensor([*wishes, step, -step])
        with unrecorded():  # it is under way when the profile of a step ends
            return _Vote(flags, dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.host_group, async_op=True))

    def end_votes(self) -> None:
        """Wait for the current votes, which must end before their process group is destroyed."""
        for vote in (self._vote, self._vote_on_giving_up):
            if vote is not None:
                vote.wait()

    def _save_requested(self) -> bool:
        """Return whether rank 0 has found the file `SAVE` since the last call; the file is deleted."""
        file = self.folder / SAVE
        if not self.is_main or not os.path.exists(file):
            return False
        with self._deletion_of_request.attempt():
            file.unlink()
            log.info("%s: saving at the next step boundary", file)
            return True
        return False

    def gather_texts(self, text: str | None) -> list[str | None]:
        """Return the text of every rank, by rank; all ranks must call it. It is cheap if all pass the same text.

        Mostly error texts (None: no error): bad input on one rank must end all ranks instead of leaving them waiting.
        """
        return gather_texts(text, self.host_group)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.host_group)

    def collect_garbage(self, step: int, saved: bool = False) -> None:
        """Run Python's cycle collector, over all generations, every `collect_interval` steps and after a save.

        All ranks collect at the same step: at different steps each rank would stall all others in turn. Objects that
        survive the first collection (the model, Python's modules: some 300,000 objects, 0.2 s) usually stay, so later
        collections skip them and scan only some thousands of objects. A save leaves ten per tensor (`torch.save`).
        """
        if not self.collect_interval:
            return
        if not saved and step % self.collect_interval != 0:
            return
        gc.collect()
        if not self._is_frozen:
            gc.freeze()
            self._is_frozen = True

    def release_memory(self) -> None:
        """Free all unused memory, including reference cycles and the GPU's cached blocks.

        Call it on all ranks between two models: the old one is a reference cycle. The next step has the timeout of the
        start-up again.
        """
        heartbeat().begin("start-up")
        gc.unfreeze()
        gc.collect()
        if self.collect_interval:
            gc.freeze()  # only Python's modules survive; the next collection freezes the new model too
            self._is_frozen = False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def check_owner(self) -> Callable[[], None]:
        """Return a check to call before a write: on rank 0 it raises LeaseLost if another job has the run folder."""
        return self.hooks.check_owner

    def mark_stopped(self, step: int) -> None:
        """Write the marker that tells run_train.sh: this run ended early on purpose, with a checkpoint of `step`."""
        self.check_owner()
        if self.is_main:
            try:
                write_marker(self.folder, step)
            except OSError as error:  # the checkpoint exists, which is enough to resume
                log.warning("%s: %s; a new start goes on from the checkpoint", self.folder / STOPPED, error.strerror)

    def close(self) -> None:
        """Leave the process group. Call it on success only: after an error peers may be stuck, and waiting hangs."""
        if self.is_main:
            with suppress(OSError):  # the next start removes it, too
                (self.folder / STOP).unlink()
        self.end_votes()
        self.hooks.end()
        dist.destroy_process_group()
        heartbeat().close()
        drop_unwritten_output()


class _Vote(NamedTuple):
    """An asynchronous vote of all ranks."""

    flags: Tensor
    """(questions + 2), int64: 1 where this rank votes yes, its step, -step; after the vote, the maxima of all ranks"""
    work: dist.Work | None
    """None if torch finished the reduction immediately"""

    def wait(self) -> list[bool]:
        """Wait for the vote and return its result: per question, whether any rank has voted yes.

        Raises UserError if the ranks were at different steps.
        """
        if self.work is not None:
            self.work.wait()
        *answers, last, minus_first = self.flags.tolist()
        if last != -minus_first:
            raise UserError(
                f"a rank was at step {last} while another was at step {-minus_first}: look for a continue, or another "
                "branch of the recipe's loop, that not all ranks take. Checkpoints of earlier steps are right"
            )
        return [bool(answer) for answer in answers]


def gather_texts(text: str | None, group: dist.ProcessGroup) -> list[str | None]:
    """Return the text of every rank, by rank.

    If all ranks pass the same text, or None, they exchange only its hash: 32 bytes in one all-reduce, whatever the
    number of ranks. Otherwise each rank gets the texts of all ranks.
    """
    ranks = dist.get_world_size(group)
    if same_on_all_ranks(text, group):
        return [text] * ranks
    texts: list[str | None] = [None] * ranks
    dist.all_gather_object(texts, text, group=group)
    return texts


def same_on_all_ranks(text: str | None, group: dist.ProcessGroup) -> bool:
    """Return whether all ranks pass the same text: they exchange its hash, in one all-reduce of 32 bytes."""
    digest = hashlib.sha256(repr(text).encode()).digest()[:16]
    hashes = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    # The largest of all ~x is the inverse of the smallest x: one reduction finds both.
    bounds = torch.cat([hashes, ~hashes])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    largest, smallest = bounds[:2], ~bounds[2:]
    return torch.equal(largest, smallest)
