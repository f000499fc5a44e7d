"""The status of a run's checkpoints (whole, suspect or proven), and the choice of those to delete."""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torchllm import config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint.agreement import Group, change_on_first, log_on_first, on_first
from torchllm.checkpoint.keeping.marks import find_proven, mark_proven, mark_suspect, read_suspects
from torchllm.checkpoint.keeping.retention import folders_to_delete, hide_all
from torchllm.checkpoint.keeping.validated import Proof
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.checkpoint.tensors import check_in_parallel
from torchllm.checkpoint.verify import check_sizes
from torchllm.train.step import Health


class Judgement(NamedTuple):
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


class CheckpointHistory:
    """Tracks the checkpoints of one run; the same on all ranks. Every method must be called on all ranks.

    While a save is in the background, `apply` and `hide_old` belong to its thread, and `suspect_since` must wait.
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

    def read_suspects(self, folders: Sequence[Path]) -> None:
        """Read which step folders were marked as suspect earlier."""
        self.suspects = on_first(self._group, lambda: read_suspects(folders))

    def begin(self, folders: Sequence[Path], step: int | None) -> None:
        """Start at the step of the loaded checkpoint, None for a fresh run; `folders`: the run's step folders."""
        good = [folder for folder in folders if self._may_be_good(folder)]
        self._proven = on_first(self._group, lambda: find_proven(good))
        if step is not None:
            self._proof = Proof(step, evaluates=self._proof.evaluates)

    def forget(self, folder: Path) -> None:
        """Forget a step folder that is gone."""
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
                mark_suspect(folder, suspicion.reason)
            return folders

        for folder in change_on_first(self._group, self._check_owner, mark):
            self.suspects[folder] = suspicion.reason
            log_on_first(
                self._group,
                f"{folder} is marked as suspect: {suspicion.reason}; a run that starts again takes an older one",
                logging.WARNING,
            )

    def judgement(self) -> Judgement:
        """Return the current status of the checkpoints; a background save uses it later."""
        proof = self._proof
        return Judgement(proof.proven_until, proof.finite_until, proof.waiting, self._suspicion)

    def apply(self, judgement: Judgement, folders: Sequence[Path]) -> None:
        """Mark the newest folder as suspect, and the newest proven one as proven, if the judgement says so."""
        if judgement.suspicion:
            self.suspects[folders[0]] = judgement.suspicion
        proven = self._newest_good(folders, judgement.proven_until)
        is_new = proven is not None and proven != self._proven
        if is_new:
            self._proven = proven

        def mark() -> None:
            if judgement.suspicion:
                mark_suspect(folders[0], judgement.suspicion)
            if proven is not None and is_new:
                mark_proven(proven, f"training and evaluation were finite after step {manifests.step_of(proven)}")

        if judgement.suspicion or is_new:
            change_on_first(self._group, self._check_owner, mark)

    def hide_old(self, folders: Sequence[Path], judgement: Judgement) -> list[Path]:
        """Hide all folders except the newest `checkpoint.keep` good ones, and return them, to be deleted.

        Suspect folders do not count, and are hidden unless they are among the newest `checkpoint.keep` of all. Damaged
        folders do not count, and stay. Folders of every `checkpoint.keep_every`-th step stay, and those in
        `_proven_or_waiting`.
        """
        keep = self._settings.keep
        old = folders_to_delete(folders, keep, self._counts)
        old += [folder for folder in folders[keep:] if folder in self.suspects and folder not in old]
        good = self._proven_or_waiting(folders, judgement)

        def may_go(folder: Path) -> bool:
            every = self._settings.keep_every
            kept_for_good = every > 0 and manifests.step_of(folder) % every == 0
            return folder not in good and not kept_for_good and self.is_whole.get(folder, True)

        return change_on_first(self._group, self._check_owner, lambda: hide_all(filter(may_go, old)))

    def _newest_good(self, folders: Sequence[Path], step: int) -> Path | None:
        """Return the newest folder up to `step` that may be good, None if there is none."""
        for folder in folders:
            if manifests.step_of(folder) <= step and self._may_be_good(folder):
                return folder
        return None

    def _may_be_good(self, folder: Path) -> bool:
        """Return whether a step folder is neither suspect nor known to be damaged, without looking into it."""
        return folder not in self.suspects and self.is_whole.get(folder, True)

    def _proven_or_waiting(self, folders: Sequence[Path], judgement: Judgement) -> list[Path]:
        """Return the step folders that stay so that the run always has a proven one.

        This is the newest proven one or, without any, the newest that ten finite steps have followed. If steps prove
        checkpoints, the oldest one that waits for its tenth step stays too: with `checkpoint.interval` under 10, all
        waiting ones would be deleted.
        """
        good = []
        if proven := self._proven or self._newest_good(folders, judgement.finite_until):
            good.append(proven)
        if self._proven is None or not self._proof.evaluates:
            waiting = [folder for folder in folders if manifests.step_of(folder) in judgement.waiting]
            good += [folder for folder in waiting if self._may_be_good(folder)][-1:]
        return good

    def _counts(self, folder: Path) -> bool:
        """Return whether a step folder counts as one of the newest `checkpoint.keep`."""
        return folder not in self.suspects and self._seems_whole(folder)

    def _seems_whole(self, folder: Path) -> bool:
        """Return whether a step folder is whole: by the sizes of its files if the run has not read or written it."""
        if folder not in self.is_whole:
            try:
                manifest = on_first(self._group, lambda: manifests.read_manifest(folder))
                check_in_parallel(self._group, folder, manifest, check_sizes)
                self.is_whole[folder] = True
            except CheckpointError as error:
                self.is_whole[folder] = False
                log_on_first(self._group, f"damaged checkpoint: {error}", logging.WARNING)
        return self.is_whole[folder]
