"""Save and resume a run: checkpoints exist whole or not at all, load on any layout, and are verified as they are read.

All ranks write the tensors (`plan.py`); everything else is JSON in the manifest (`manifest.py`). Neither the
learning rate nor the optimizer's settings are stored: they follow from the step and the config.
"""

import logging
import platform
import shutil
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchllm import __version__, config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint import state as run_state
from torchllm.checkpoint.agreement import (
    Group,
    change_on_first,
    first_problem,
    log_on_first,
    on_first,
    rank_of,
    size_of,
)
from torchllm.checkpoint.background import SAVES_IN_BACKGROUND, saves_in_background
from torchllm.checkpoint.history import CheckpointHistory, Copies, Judgment
from torchllm.checkpoint.index import INDEX
from torchllm.checkpoint.initial import InitialWeights, check_same_source
from torchllm.checkpoint.manifest import CheckpointError, DamagedCheckpoint, FileRecord, Manifest
from torchllm.checkpoint.plan import SavePlan, agree_on_plan, save_tensors
from torchllm.checkpoint.state import Part, holds_all_weights
from torchllm.config.applied_keys import applied, replaced_parts, saves_state
from torchllm.runtime.heartbeat import during
from torchllm.train.step import Health

LISTED = 3
"""most tensors with non-finite values that an error lists"""
DEFAULT_GRACE = 30.0
"""default seconds between SIGTERM and SIGKILL under Slurm and Kubernetes; a job cannot query the setting"""

CHECKPOINTERS: "weakref.WeakSet[Checkpointer]" = weakref.WeakSet()
"""extra states of this process, for `torchllm prove`, which compares them"""


class Checkpointer:
    """Saves and resumes a run. Every method must be called on all ranks, and raises CheckpointError on all."""

    def __init__(
        self,
        settings: config.Checkpoint,
        run_folder: Path,
        stages: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        *,
        host_group: Group = None,
        record: Mapping[str, Any] | None = None,
        check_owner: Callable[[], None] = lambda: None,
        evaluates: bool = False,
        extra_state: Mapping[str, Tensor] | None = None,
        initial: InitialWeights | None = None,
    ) -> None:
        """Save and load `stages` (this rank's part of the model) and `optimizer`, whose state must exist.

        `record` is JSON stored in every checkpoint, such as the resolved config. `check_owner` raises, on rank 0, if
        another job has taken the run folder; it is called before a checkpoint is published, moved, marked or deleted.
        evaluates: the run has evaluations, which prove checkpoints. initial: weights that the run starts from if it
        does not resume; the record of every checkpoint names them, under "initial".

        `extra_state` is state of a forked recipe, by names that do not depend on the layout: DTensors, or tensors that
        are equal on all ranks that have them. It may be added to a run and dropped from it: `resume` fills the tensors
        that the checkpoint has, ignores others in the checkpoint, and lists missing ones in `missing_extra_state`.
        """
        saves_state(set(extra_state or {}))
        self._settings = settings
        self._root = Path(run_folder) / "checkpoints"
        self._stages, self._optimizer = stages, optimizer
        self._record = dict(record or {})
        self._first_groups = [dict(group) for group in optimizer.param_groups]
        self._initial = initial
        self._check_owner = check_owner
        self.extra_state = dict(extra_state or {})
        self._extra_state = {f"{run_state.EXTRA}{name}": tensor for name, tensor in (extra_state or {}).items()}
        self.missing_extra_state: list[str] = list(extra_state or {})
        """names of this rank's extra state that the loaded checkpoint lacks"""
        self._group = host_group
        self._own_group: Group = None
        self._plan: SavePlan | None = None
        """of the last save"""
        self._reported_seconds = 0.0
        """seconds of the longest save that was reported as too long for a scheduler's default"""
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        if saves_in_background(settings.asynchronous, self._parts(), host_group):
            # A separate group: with a shared one, training and a background save would wait for each other.
            if host_group is not None:
                self._group = self._own_group = dist.new_group(backend="gloo", group_desc=SAVES_IN_BACKGROUND)
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._snapshot = run_state.Snapshot(self._parts())
        self._history = CheckpointHistory(settings, self._root, self._group, check_owner, evaluates=evaluates)
        self._copies = Copies()
        if settings.remote:
            from torchllm.checkpoint.remote import RemoteCopies  # most runs need none

            self._copies = RemoteCopies(settings.remote, self._root, self._group, settings.keep, settings.keep_every)
        CHECKPOINTERS.add(self)

    @during("load")
    def resume(self) -> Manifest | None:
        """Load the checkpoint of `checkpoint.resume` into model and optimizer, and return its manifest.

        The caller continues from the manifest's `step` and `data`. Returns None if the run starts from scratch. If the
        newest checkpoint is marked as suspect, or turns out damaged while it is read, the previous one is loaded
        instead.
        """
        hidden = change_on_first(self._group, self._check_owner, lambda: manifests.hidden_folders(self._root))
        self._history.delete(hidden)
        folders = on_first(self._group, lambda: manifests.step_folders(self._root))
        folders = self._copies.folders(folders)
        self._history.read_suspects(folders)
        manifest = self._history.load_asked_for(folders, self._load)
        if manifest is not None:
            from torchllm.checkpoint.load import log_other_versions  # of no use to a fresh run

            log_other_versions(self._group, manifest, current_versions())
        self._start_from(manifest)
        self._note_applied()
        self._history.begin(folders, None if manifest is None else manifest.step)
        return manifest

    def _note_applied(self) -> None:
        for key in fields(self._settings):
            if key.name != "initial":
                applied(f"checkpoint.{key.name}", getattr(self._settings, key.name))
        if self._initial is not None:
            applied(self._initial.key)

    def _start_from(self, manifest: Manifest | None) -> None:
        """Load the initial weights of a fresh run, and record their origin; a resumed run keeps its record.

        Frozen weights that checkpoints lack are loaded again. Raises CheckpointError if they differ from the weights
        that the checkpoint's low-rank updates were trained on.
        """
        initial = self._initial
        if manifest is not None and "initial" in manifest.record:
            self._record["initial"] = manifest.record["initial"]
        if initial is None:
            return
        if manifest is None:
            self._record["initial"] = initial.load(self._stages, self._group)
        elif holds_all_weights(self._stages):
            log_on_first(self._group, f"{initial.key} is not read: the run goes on from its checkpoint")
        else:
            check_same_source(initial.key, initial.load(self._stages, self._group), self._record.get("initial"))

    def _load(self, folder: Path) -> Manifest:
        """Load a step folder and return its manifest. Raises DamagedCheckpoint after recording the damage.

        A damaged one of which there is a copy is moved aside, and the copy is loaded.
        """
        self._copies.fetch(folder)
        try:
            return self._load_here(folder)
        except DamagedCheckpoint as error:
            if not self._copies.has(folder):
                raise
            log_on_first(self._group, f"damaged checkpoint: {error}", logging.WARNING)
        self._history.set_aside(folder)
        self._copies.fetch(folder)
        return self._load_here(folder)

    def _load_here(self, folder: Path) -> Manifest:
        from torchllm.checkpoint.load import load_checkpoint  # as above

        self._history.is_whole[folder] = False  # until all of it is read: an error below leaves it so
        random, extra = self._random_state(), run_state.parts_of(self._extra_state)
        manifest, self.missing_extra_state = load_checkpoint(
            self._group, folder, self._stages, self._optimizer, random, extra
        )
        self._history.is_whole[folder] = True
        self._copies.loaded(folder)
        return manifest

    @during("save")
    def save(self, step: int, data: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`, in the background if the config says so; `data` is the loader's JSON state.

        Waits for an earlier background save and raises its error. A checkpoint is never rewritten: if one of this step
        exists and verifies, that is an error; a damaged one is moved aside; a suspect one is replaced.

        Raises CheckpointError, and writes and deletes nothing, if a value to save is not finite.
        """
        self._finish()
        parts = self._parts()
        if numbers := run_state.changed_numbers(self._optimizer, self._first_groups):
            self._record["optimizer_groups"] = numbers
        self._plan = agree_on_plan(self._group, parts, self._plan)
        self._refuse_nonfinite(step, {key: parts[key] for key in self._plan.written})
        needed = run_state.size_in_bytes(parts)
        temporary = on_first(self._group, lambda: manifests.make_temporary(self._root, step, needed))
        if temporary is None:  # there is one of this step already
            self._history.make_way(manifests.step_folder(self._root, step))
            return self.save(step, data)
        # Judgment and data are of this step: a background save uses them while the run goes on.
        write = partial(self._write, temporary, step, deepcopy(dict(data)), self._plan, self._history.judgment())
        if self._executor is None:
            write(parts)
        else:
            self._pending = self._executor.submit(write, self._snapshot.take(parts))

    def judge(self, health: Health) -> None:
        """Update the status of earlier checkpoints by a logged step: it may prove them, or mark them as suspect.

        Call it on all ranks at each logged step. Before it marks suspects it waits for a background save.
        """
        for suspicion in self._history.note(health):
            self._finish()
            self._history.suspect_since(suspicion)
            if rank_of(self._group) == 0:
                self._copies.mark()

    def mark_damaged_data(self, step: int, reason: str) -> None:
        """Mark the checkpoints of `step` and later ones as suspect: they may have been trained on damaged data.

        Called by the rank that finds the damage, before it ends the run by an error; other ranks need not call it. It
        also marks proven checkpoints, since a loss may be finite on wrong data. Waits for a background save.
        """
        with suppress(CheckpointError):  # the run already ends by another error
            self._finish()
        for folder in manifests.step_folders(self._root):
            if manifests.step_of(folder) >= step:
                manifests.mark(folder, manifests.SUSPECT, reason)
        self._copies.mark()

    def _refuse_nonfinite(self, step: int, parts: Mapping[str, Part]) -> None:
        """Raise CheckpointError on all ranks if one of them would write a value that is not finite."""
        keys = run_state.nonfinite_keys(parts)
        listed = ", ".join(keys[:LISTED])
        if len(keys) > LISTED:
            listed += f" and {len(keys) - LISTED} other tensors"
        problem = first_problem(self._group, listed)
        if problem:
            raise CheckpointError(
                f"step {step} is not saved: values are not finite in {problem}. They would stay so, and the run ends "
                f"here; all checkpoints are kept: {self._history.next_start()}. If it happens again, lower "
                "optimizer.learning_rate"
            )

    @property
    def failed(self) -> bool:
        """Return at once whether a background save has failed; `save` and `close` raise its error on all ranks."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    @during("save")
    def close(self) -> None:
        """Wait for a background save, raising its error, for copies, and the deletion of old ones. The last call."""
        try:
            self._finish()
            self._copies.close()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            self._history.close()
            if self._own_group is not None:
                dist.destroy_process_group(self._own_group)

    @during("save")
    def _finish(self) -> None:
        """Wait for the background save, if there is one, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(
        self,
        temporary: Path,
        step: int,
        data: dict[str, Any],
        plan: SavePlan,
        judgment: Judgment,
        parts: Mapping[str, Part],
    ) -> None:
        """Write the tensors and their index, publish the checkpoint, delete old ones; also in the background."""
        began = time.monotonic()
        folder = manifests.step_folder(self._root, step)
        files: dict[str, FileRecord] = {}

        def publish() -> None:
            files[INDEX] = manifests.write_file(temporary / INDEX, plan.content)
            manifest = Manifest(
                step=step,
                data=data,
                record=self._record | ({"replaced": replaced} if (replaced := replaced_parts()) else {}),
                world_size=size_of(self._group),
                versions=current_versions(),
                files=files,
            )
            self._check_owner()  # again, now: writing the tensors has taken time
            manifests.publish(temporary, folder, manifest)

        try:
            files.update(save_tensors(self._group, temporary, plan, parts))
            on_first(self._group, publish)
        except CheckpointError as error:
            if rank_of(self._group) == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise manifests.lost_save(folder, str(error), run_state.size_in_bytes(parts)) from error
        log_on_first(self._group, f"saved {folder}")
        self._report_long_save(time.monotonic() - began)
        self._history.published(folder, judgment, self._copies.in_use())
        self._copies.add(folder)

    def _report_long_save(self, seconds: float) -> None:
        """Log if a save may take longer than a scheduler waits before it kills a job.

        Neither Slurm nor Kubernetes tells a job that time, so the message says how much to ask for.
        """
        if seconds <= max(DEFAULT_GRACE, 2 * self._reported_seconds):
            return
        self._reported_seconds = seconds
        log_on_first(
            self._group,
            f"writing a checkpoint takes {seconds:.0f} s: a run that is asked to stop needs that and two steps. Slurm "
            f"and Kubernetes kill it after {DEFAULT_GRACE:.0f} s unless --signal=USR1@SECONDS or "
            "terminationGracePeriodSeconds says more",
            logging.WARNING,
        )

    def _parts(self) -> dict[str, Part]:
        """Return this rank's part of all tensors of the run, by their key in a checkpoint."""
        return self._model_parts() | self._random_state() | run_state.parts_of(self._extra_state)

    def _model_parts(self) -> dict[str, Part]:
        """Return this rank's part of the tensors of model and optimizer, by key."""
        return run_state.model_parts(self._stages, self._optimizer)

    def _random_state(self) -> dict[str, Part]:
        return run_state.random_state(rank_of(self._group), size_of(self._group))


def current_versions() -> dict[str, str]:
    """Return the versions of torch and Python, by name."""
    return {"torchllm": __version__, "torch": torch.__version__, "python": platform.python_version()}
