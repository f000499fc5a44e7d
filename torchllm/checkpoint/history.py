"""Decide which checkpoints of a run are good, by the values logged after them, which are loaded, and which are deleted.

A checkpoint with finite weights may still be bad: weights of 1e30 are finite, but losses after them are not. It
is proven by a finite evaluation of its weights or of later ones; in a run without evaluations, by ten finite steps.
"""

import logging
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torchllm import config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint.agreement import Group, change_on_first, log_on_first, on_first, rank_of, size_of
from torchllm.checkpoint.manifest import (
    PROVEN,
    SUSPECT,
    CheckpointError,
    Manifest,
    find_proven,
    read_suspects,
)
from torchllm.config.environment import is_restart
from torchllm.train.step import Health

logger = logging.getLogger(__name__)

FINITE_STEPS = 10
"""number of applied steps after a checkpoint that prove it"""
NONE = -1
"""no checkpoint, not even one of step 0"""


class Sample(NamedTuple):
    step: int
    applied: int
    """number of steps up to this one that were applied: loss and gradient were finite"""


class Proof:
    """Tracks one run in one process; the same on all ranks, since they log the same."""

    def __init__(self, start: int, *, evaluates: bool) -> None:
        """start: step of the loaded checkpoint. evaluates: the run has evaluations."""
        self.start = start
        self.evaluates = evaluates
        self.finite_until = NONE
        """checkpoints up to this step were followed by ten finite steps"""
        self.evaluated_until = NONE
        """checkpoints up to this step were followed by a finite evaluation, or are of its step"""
        self.last = NONE
        """the last logged step"""
        self._samples: deque[Sample] = deque([Sample(start, start)])
        """logged steps with fewer than ten applied steps after them"""

    def note(self, step: int, skipped: int, validation_loss: float | None) -> None:
        """Record a logged step. skipped: steps since `start` that were not applied."""
        self.last = step
        applied = step - skipped
        while self._samples and self._samples[0].applied + FINITE_STEPS <= applied:
            self.finite_until = self._samples.popleft().step
        if self._samples and self._samples[-1].applied == applied:
            self._samples.pop()  # the new one replaces it, so there are never more than ten
        self._samples.append(Sample(step, applied))
        if validation_loss is not None and math.isfinite(validation_loss):
            self.evaluated_until = step

    @property
    def proven_until(self) -> int:
        """Return the last proven step: checkpoints up to it are good."""
        return self.evaluated_until if self.evaluates else self.finite_until

    @property
    def waiting(self) -> range:
        """Return the steps whose checkpoints later steps may still prove, from this process's first logged step on."""
        return range(max(self.start, self.finite_until + 1), self.last + 1)

    def suspect_since(self, *, evaluation: bool) -> int:
        """Return the first step whose checkpoint is suspect when a run goes wrong.

        evaluation: an evaluation was not finite; False: too many steps in a row were not finite. Checkpoints before the
        one that this process started from are not suspected, since it has not seen the steps after them. The one that
        it started from may be: the next start then loads the previous checkpoint.
        """
        good = self.evaluated_until if evaluation else max(self.evaluated_until, self.finite_until)
        return max(self.start, good + 1)


class Judgment(NamedTuple):
    """The status of a run's checkpoints when it saves one."""

    proven_until: int
    """checkpoints up to this step are proven"""
    finite_until: int
    """checkpoints up to this step were followed by ten finite steps"""
    waiting: range
    """steps of checkpoints that wait for their tenth finite step"""
    suspicion: str
    """why the saved checkpoint is suspect; empty: it is not"""


class Suspicion(NamedTuple):
    """The run has gone wrong, and some checkpoints may contain the cause."""

    since: int
    """checkpoints from this step on are suspect"""
    reason: str


class Copies:
    """No copies in a second place: the interface of `remote.RemoteCopies`. All ranks call every method but `mark`."""

    def folders(self, local: Sequence[Path]) -> list[Path]:
        """Return the step folders that a run may resume from, newest first: the local ones, and those to fetch."""
        return list(local)

    def fetch(self, folder: Path) -> None:
        """Copy a step folder of `folders` here if it is not here yet. Raises CheckpointError if it cannot be read."""

    def has(self, folder: Path) -> bool:
        """Return whether there is a good copy of a step folder, from which it has not been fetched yet."""
        return False

    def in_use(self) -> Path | None:
        """Return the step folder that a rank still copies: it must stay."""
        return None

    def loaded(self, folder: Path) -> None:
        """Copy a step folder that a run has loaded, if a copy of it was interrupted."""

    def add(self, folder: Path) -> None:
        """Copy a published step folder, in the background."""

    def mark(self) -> None:
        """Copy new marks of step folders, now: the rank that made them calls it, and the run may end after it."""

    def close(self) -> None:
        """Wait for the copies. The last call."""


class CheckpointHistory:
    """Tracks the checkpoints of one run; the same on all ranks. Every method must be called on all ranks.

    While a save is in the background, `published` belongs to its thread, and `suspect_since` must wait.
    """

    def __init__(
        self,
        settings: config.Checkpoint,
        root: Path,
        group: Group,
        check_owner: Callable[[], None],
        *,
        evaluates: bool,
    ) -> None:
        """Track the step folders in `root`; other arguments as for Checkpointer."""
        self.is_whole: dict[Path, bool] = {}
        """whether a step folder is undamaged, for folders that this run has written, read or checked"""
        self.suspects: dict[Path, str] = {}
        """step folders that are marked as suspect, and why"""
        self._settings = settings
        self._root = root
        self._group = group
        self._check_owner = check_owner
        self._proof = Proof(0, evaluates=evaluates)
        self._proven: Path | None = None
        """the newest step folder that is marked as proven"""
        self._suspicion = ""
        """why the last evaluation was bad; empty: it was not"""
        self._deletion = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-deletion")

    def read_suspects(self, folders: Sequence[Path]) -> None:
        """Read which step folders were marked as suspect earlier."""
        self.suspects = on_first(self._group, lambda: read_suspects(folders))

    def load_asked_for(self, folders: Sequence[Path], load: Callable[[Path], Manifest]) -> Manifest | None:
        """Load the checkpoint of `checkpoint.resume`, from the run's step folders or elsewhere; None: start fresh.

        A later start of the same job loads its newest checkpoint, once there is one.
        """
        if self._settings.resume == "auto":
            return self._load_newest(folders, load)
        if self._settings.resume == "none":
            if folders and is_later_start():
                return self._load_newest(folders, load)
            if folders:
                raise CheckpointError(
                    f'checkpoint.resume = "none", but {self._place(folders[0])} exists: use "auto", or another '
                    f"{self._room}"
                )
            log_on_first(self._group, f"no checkpoint in {self._root}: starting fresh")
            return None
        folder = Path(self._settings.resume)
        step = on_first(self._group, lambda: manifests.read_manifest(folder)).step
        newer = [path for path in folders if manifests.step_of(path) > step and path not in self.suspects]
        if newer and is_later_start():
            return self._load_newest(folders, load)
        if newer:
            raise CheckpointError(
                f"checkpoint.resume names step {step}, but {self._place(newer[0])} is newer and would be in the way: "
                f"set another {self._room}, or move the newer ones away"
            )
        suspicion = on_first(self._group, lambda: manifests.read_suspects([folder])).get(folder)
        if suspicion is not None:
            named = f"{folder} is loaded because checkpoint.resume names it"
            log_on_first(self._group, f"{named}, but is marked as suspect: {suspicion}", logging.WARNING)
        return load(folder)

    def _place(self, folder: Path) -> str:
        """Return the place of a step folder, of which there may only be the copy."""
        return str(folder) if folder.exists() else f"{self._settings.remote}/{folder.name}"

    @property
    def _room(self) -> str:
        """The keys of the places where a run's steps are."""
        return "run.folder and checkpoint.remote" if self._settings.remote else "run.folder"

    def _load_newest(self, folders: Sequence[Path], load: Callable[[Path], Manifest]) -> Manifest | None:
        """Load the newest of the run's step folders that verifies and is not suspect; None if there is none."""
        if not folders:
            log_on_first(self._group, f"no checkpoint in {self._root}: starting fresh")
            return None
        from torchllm.checkpoint.verify import newest_verified  # of no use to a fresh run

        warn = partial(log_on_first, self._group, level=logging.WARNING)
        newest = newest_verified(manifests.without_suspects(folders, self.suspects, warn), load, warn)
        assert newest is not None  # an error says that none verifies
        return newest[1]

    def begin(self, folders: Sequence[Path], step: int | None) -> None:
        """Start at the step of the loaded checkpoint, None for a fresh run; `folders`: the run's step folders."""
        good = [folder for folder in folders if self._may_be_good(folder)]
        self._proven = on_first(self._group, lambda: find_proven(good))
        if step is not None:
            self._proof = Proof(step, evaluates=self._proof.evaluates)

    def forget(self, folder: Path) -> None:
        self.suspects.pop(folder, None)
        self.is_whole.pop(folder, None)

    def note(self, health: Health) -> list[Suspicion]:
        """Record a logged step; return its suspicions about earlier checkpoints, for `suspect_since`."""
        self._proof.note(health.step, health.skipped, health.validation_loss)
        suspicions = []
        if health.validation_loss is not None:
            self._suspicion = ""
            if not math.isfinite(health.validation_loss):
                self._suspicion = f"the validation loss of step {health.step} was not finite"
                suspicions.append(Suspicion(self._proof.suspect_since(evaluation=True), self._suspicion))
        if health.is_lost:
            reason = f"too many steps in a row were not finite up to step {health.step}"
            suspicions.append(Suspicion(self._proof.suspect_since(evaluation=False), reason))
        return suspicions

    def suspect_since(self, suspicion: Suspicion) -> None:
        """Mark the checkpoints of a suspicion as suspect, except proven ones."""
        step = suspicion.since
        if self._proven is not None:
            step = max(step, manifests.step_of(self._proven) + 1)

        def mark() -> list[Path]:
            folders = [folder for folder in manifests.step_folders(self._root) if manifests.step_of(folder) >= step]
            folders = [folder for folder in folders if folder not in self.suspects]
            for folder in folders:
                manifests.mark(folder, SUSPECT, suspicion.reason)
            return folders

        marked = change_on_first(self._group, self._check_owner, mark)
        for folder in marked:
            self.suspects[folder] = suspicion.reason
            log_on_first(self._group, f"{folder} is marked as suspect: {suspicion.reason}", logging.WARNING)
        if marked:
            log_on_first(self._group, self.next_start(), logging.WARNING)

    def next_start(self) -> str:
        """Return the sentence that says where a run that starts again goes on."""
        folders = on_first(self._group, lambda: manifests.step_folders(self._root))
        good = next((folder for folder in folders if self._may_be_good(folder)), None)
        if good is not None:
            return f"a run that starts again goes on from {good.name}"
        if folders:
            return "no checkpoint is left that a run could go on from: start anew in another run.folder"
        return "there is no checkpoint: a run that starts again begins at step 1"

    def judgment(self) -> Judgment:
        """Return the current status of the checkpoints; a background save uses it later."""
        proof = self._proof
        return Judgment(proof.proven_until, proof.finite_until, proof.waiting, self._suspicion)

    def published(self, folder: Path, judgment: Judgment, in_use: Path | None = None) -> None:
        """Mark checkpoints by a judgment, now that the save that it was made for is published, and delete old ones.

        in_use: a step folder that stays.
        """
        self.is_whole[folder] = True
        folders = on_first(self._group, lambda: manifests.step_folders(self._root))
        folders = [older for older in folders if manifests.step_of(older) <= manifests.step_of(folder)]
        self._mark(judgment, folders)
        if self._settings.keep:
            self.delete(self._hide_old([older for older in folders if older != in_use], judgment))

    def delete(self, hidden: Sequence[Path]) -> None:
        """Delete hidden folders in the background, each rank its share."""
        for folder in share_of(hidden, rank_of(self._group), size_of(self._group)):
            self._deletion.submit(delete_folder, folder)

    def make_way(self, folder: Path) -> None:
        """Delete a suspect step folder of a step that is saved again, or move a damaged one aside.

        Raises CheckpointError if it is a good checkpoint.
        """
        if folder in self.suspects:
            log_on_first(self._group, f"{folder}, which is marked as suspect, is replaced")
            self.delete(change_on_first(self._group, self._check_owner, lambda: [manifests.hide(folder)]))
            self.forget(folder)
            return
        if self.is_whole.get(folder, True):
            from torchllm.checkpoint.tensors import verify_in_parallel  # most runs write each step once

            try:
                verify_in_parallel(self._group, folder)
            except CheckpointError as error:
                log_on_first(self._group, f"damaged checkpoint: {error}", logging.WARNING)
            else:
                raise CheckpointError(f"{folder}: exists already; a checkpoint is never rewritten")
        self.set_aside(folder)

    def set_aside(self, folder: Path) -> None:
        """Move a damaged step folder aside."""
        change_on_first(self._group, self._check_owner, lambda: manifests.set_damaged_aside(folder))
        self.forget(folder)

    def close(self) -> None:
        """Wait until all is deleted."""
        self._deletion.shutdown()

    def _mark(self, judgment: Judgment, folders: Sequence[Path]) -> None:
        """Mark the newest folder as suspect, and the newest proven one as proven, if the judgment says so."""
        if judgment.suspicion:
            self.suspects[folders[0]] = judgment.suspicion
        proven = self._newest_good(folders, judgment.proven_until)
        is_new = proven is not None and proven != self._proven
        if is_new:
            self._proven = proven

        def mark() -> None:
            if judgment.suspicion:
                manifests.mark(folders[0], SUSPECT, judgment.suspicion)
            if proven is not None and is_new:
                reason = f"training and evaluation were finite after step {manifests.step_of(proven)}"
                manifests.mark(proven, PROVEN, reason)

        if judgment.suspicion or is_new:
            change_on_first(self._group, self._check_owner, mark)

    def _hide_old(self, folders: Sequence[Path], judgment: Judgment) -> list[Path]:
        """Hide all folders except the newest `checkpoint.keep` good ones, and return them, to be deleted.

        Suspect folders do not count, and are hidden unless they are among the newest `checkpoint.keep` of all. Damaged
        folders do not count, and stay. Folders of every `checkpoint.keep_every`-th step stay, and those in
        `_proven_or_waiting`.
        """
        keep = self._settings.keep
        old = folders_to_delete(folders, keep, self._counts)
        old += [folder for folder in folders[keep:] if folder in self.suspects and folder not in old]
        good = self._proven_or_waiting(folders, judgment)

        def may_go(folder: Path) -> bool:
            every = self._settings.keep_every
            kept_for_good = every > 0 and manifests.step_of(folder) % every == 0
            return folder not in good and not kept_for_good and self.is_whole.get(folder, True)

        return change_on_first(self._group, self._check_owner, lambda: hide_all(filter(may_go, old)))

    def _newest_good(self, folders: Sequence[Path], step: int) -> Path | None:
        """Return the newest folder up to `step` that may be good, None if there is none."""
        earlier = (folder for folder in folders if manifests.step_of(folder) <= step)
        return next(filter(self._may_be_good, earlier), None)

    def _may_be_good(self, folder: Path) -> bool:
        """Return whether a step folder is neither suspect nor known to be damaged, without looking into it."""
        return folder not in self.suspects and self.is_whole.get(folder, True)

    def _proven_or_waiting(self, folders: Sequence[Path], judgment: Judgment) -> list[Path]:
        """Return the step folders that stay so that the run always has a proven one.

        This is the newest proven one or, without any, the newest that ten finite steps have followed. If steps prove
        checkpoints, the oldest one that waits for its tenth step stays too: with `checkpoint.interval` under 10, all
        waiting ones would be deleted.
        """
        good = []
        if proven := self._proven or self._newest_good(folders, judgment.finite_until):
            good.append(proven)
        if self._proven is None or not self._proof.evaluates:
            waiting = [folder for folder in folders if manifests.step_of(folder) in judgment.waiting]
            good += [folder for folder in waiting if self._may_be_good(folder)][-1:]
        return good

    def _counts(self, folder: Path) -> bool:
        """Return whether a step folder counts as one of the newest `checkpoint.keep`."""
        return folder not in self.suspects and self._seems_whole(folder)

    def _seems_whole(self, folder: Path) -> bool:
        """Return whether a step folder is whole: by the sizes of its files if the run has not read or written it."""
        if folder not in self.is_whole:
            from torchllm.checkpoint.tensors import check_in_parallel  # these are of no use to a fresh run
            from torchllm.checkpoint.verify import check_sizes

            try:
                manifest = on_first(self._group, lambda: manifests.read_manifest(folder))
                check_in_parallel(self._group, folder, manifest, check_sizes)
                self.is_whole[folder] = True
            except CheckpointError as error:
                self.is_whole[folder] = False
                log_on_first(self._group, f"damaged checkpoint: {error}", logging.WARNING)
        return self.is_whole[folder]


def is_later_start() -> bool:
    """Return whether this job has been started before: again by its launchers, or requeued by Slurm."""
    return is_restart() or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def folders_to_delete(newest_first: Iterable[Path], keep: int, is_whole: Callable[[Path], bool]) -> list[Path]:
    """Return the step folders that are older than the `keep` newest whole ones.

    `is_whole` is called from the newest folder on until `keep` are found. It may judge a folder that this run has not
    read by the sizes of its files. That is safe if the run has just written and hashed the newest, which always stays:
    an older one with a flipped bit may count among the `keep`, but the last good one is never deleted.
    """
    whole = 0
    old = []
    for folder in newest_first:
        if whole == keep:
            old.append(folder)
        elif is_whole(folder):
            whole += 1
    return old


def share_of(folders: Sequence[Path], rank: int, ranks: int) -> list[Path]:
    """Return the folders that `rank` deletes, at most len / ranks rounded up; a single one goes to a random rank."""
    if not folders:
        return []
    first_rank = sum(folders[0].name.encode()) % ranks  # the name of a hidden folder ends in random digits
    return list(folders[(rank - first_rank) % ranks :: ranks])


def hide_all(folders: Iterable[Path]) -> list[Path]:
    """Hide step folders before their deletion, and return them; a folder that cannot be renamed is a warning."""
    hidden = []
    for folder in folders:
        try:
            hidden.append(manifests.hide(folder))
        except OSError as error:
            logger.warning("cannot delete the old checkpoint %s: %s", folder, error)
    return hidden


def delete_folder(folder: Path) -> None:
    """Delete a hidden folder; a failure is a warning, and is retried when the run is resumed."""
    shutil.rmtree(folder, ignore_errors=True)  # delete as much as possible
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        # Logged as an error, since ranks other than 0 show only errors.
        logger.error("warning: cannot delete %s, which is no checkpoint any more; delete it by hand: %s", folder, error)
