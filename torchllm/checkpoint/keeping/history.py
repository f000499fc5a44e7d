"""What a run knows of its checkpoints: which of them are whole, suspect or proven, and which may be deleted."""

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
    """What the run knows of its checkpoints when it saves one."""

    proven_until: int
    """checkpoints up to this step are proven"""
    finite_until: int
    """checkpoints up to this step were followed by ten finite steps"""
    waiting: range
    """steps whose checkpoints wait for their tenth finite step"""
    suspicion: str
    """why the one that is saved is suspect; empty: it is not"""


class Suspicion(NamedTuple):
    """The run has gone wrong, and some checkpoints may hold what made it so."""

    since: int
    """checkpoints of this step and later ones are suspect"""
    reason: str


class CheckpointHistory:
    """Follows the checkpoints of one run; the same on all ranks. Every method must be called on all ranks.

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
        """Follow the step folders in `root`; the other arguments are those of Checkpointer."""
        self.is_whole: dict[Path, bool] = {}
        """whether a step folder is what was written: as far as this run has written, read or looked at it"""
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
        """why the run has gone wrong, since its last evaluation; empty: it has not"""

    def read_suspects(self, folders: Sequence[Path]) -> None:
        """Read which step folders were marked as suspect earlier."""
        self.suspects = on_first(self._group, lambda: read_suspects(folders))

    def begin(self, folders: Sequence[Path], step: int | None) -> None:
        """Begin at the step of the checkpoint that was loaded, None if there was none, among these step folders."""
        good = [folder for folder in folders if self._may_be_good(folder)]
        self._proven = on_first(self._group, lambda: find_proven(good))
        if step is not None:
            self._proof = Proof(step, evaluates=self._proof.evaluates)

    def forget(self, folder: Path) -> None:
        """Forget a step folder that is gone."""
        self.suspects.pop(folder, None)
        self.is_whole.pop(folder, None)

    def note(self, health: Health) -> list[Suspicion]:
        """Note a logged step; return what it says against the checkpoints before it, for `suspect_since`."""
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
        """Mark the checkpoints of a suspicion as suspect, but those that are proven."""
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
        """Return what the run knows of its checkpoints now; a save in the background uses it later."""
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
        """Hide all folders but the newest `checkpoint.keep` good ones, and return them, to be deleted.

        Suspect ones do not count, and go where they are not among the newest `checkpoint.keep` of all. Those that this
        run has found damaged do not count, and stay. Those of every `checkpoint.keep_every`-th step stay, and those
        that `_good_ones` returns.
        """
        keep = self._settings.keep
        old = folders_to_delete(folders, keep, self._counts)
        old += [folder for folder in folders[keep:] if folder in self.suspects and folder not in old]
        good = self._good_ones(folders, judgement)

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

    def _good_ones(self, folders: Sequence[Path], judgement: Judgement) -> list[Path]:
        """Return the step folders that stay so that the run always has a proven one.

        The newest proven one, or where none is yet, the newest that ten finite steps have followed. Where steps prove
        them, the oldest that waits for its tenth too: with `checkpoint.interval` under 10, all that wait would go.
        """
        good = []
        if proven := self._proven or self._newest_good(folders, judgement.finite_until):
            good.append(proven)
        if self._proven is None or not self._proof.evaluates:
            waiting = [folder for folder in folders if manifests.step_of(folder) in judgement.waiting]
            good += [folder for folder in waiting if self._may_be_good(folder)][-1:]
        return good

    def _counts(self, folder: Path) -> bool:
        """Return whether a step folder is one of the `checkpoint.keep` that stay."""
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
