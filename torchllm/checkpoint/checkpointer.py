"""Save and resume a run: checkpoints exist whole or not at all, load on any layout, and are verified as they are read.

All ranks write the tensors (`tensors.py`); everything else is JSON in the manifest (`manifest.py`). Neither the
learning rate nor the optimizer's settings are stored: the one is a function of the step, the others are in the config.
"""

import logging
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torchllm import config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint import state as run_state
from torchllm.checkpoint import tensors as tensor_io
from torchllm.checkpoint.agreement import Group, log_on_first, on_first, rank_of, size_of
from torchllm.checkpoint.index import INDEX
from torchllm.checkpoint.manifest import CheckpointError, FileRecord, Manifest
from torchllm.checkpoint.plan import SavePlan, agree_on_plan
from torchllm.checkpoint.retention import BackgroundDeletion, folders_to_delete, share_of
from torchllm.checkpoint.state import Part
from torchllm.checkpoint.verify import check_files, check_sizes, newest_verified

T = TypeVar("T")


class Checkpointer:
    """Saves a run and resumes it. Every method must be called on all ranks, and raises CheckpointError on all."""

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
    ) -> None:
        """Save and load `stages` (this rank's part of the model) and `optimizer`, whose state must exist.

        `record` is JSON stored in every checkpoint, such as the resolved config. `check_owner` raises, on rank 0, if
        another job has taken the run folder; it is called before a checkpoint is published, moved or deleted.
        """
        self._settings = settings
        self._root = Path(run_folder) / "checkpoints"
        self._stages, self._optimizer = stages, optimizer
        self._record = dict(record or {})
        self._check_owner = check_owner
        self._group = host_group
        self._own_group: Group = None
        self._is_whole: dict[Path, bool] = {}
        """whether a step folder is what was written: as far as this run has written, read or looked at it"""
        self._plan: SavePlan | None = None
        """of the last save"""
        self._deletion = BackgroundDeletion()
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        if settings.asynchronous:
            # If training used the same group, it and a save in the background would wait for each other.
            self._group = self._own_group = dist.new_group(backend="gloo") if host_group is not None else None
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._snapshot = run_state.Snapshot(self._parts())

    def resume(self) -> Manifest | None:
        """Load the checkpoint that `checkpoint.resume` asks for into model and optimizer, and return its manifest.

        The caller continues from the manifest's `step` and `data`. Returns None if the run starts from scratch. Where
        the newest checkpoint turns out damaged while it is read, the one before it is loaded instead.
        """
        self._delete(self._change_on_first(lambda: manifests.hidden_folders(self._root)))
        folders = on_first(self._group, lambda: manifests.step_folders(self._root))
        if self._settings.resume == "auto":
            warn = partial(log_on_first, self._group, level=logging.WARNING)
            newest = newest_verified(folders, self._load, warn)
            if newest is None:
                log_on_first(self._group, f"no checkpoint in {self._root}: starting fresh")
            return None if newest is None else newest[1]
        if self._settings.resume == "none":
            if folders:
                raise CheckpointError(
                    f'checkpoint.resume = "none", but {folders[0]} exists: use "auto", or another run.folder'
                )
            log_on_first(self._group, f"no checkpoint in {self._root}: starting fresh")
            return None
        folder = Path(self._settings.resume)
        step = on_first(self._group, lambda: manifests.read_manifest(folder)).step
        if folders and manifests.step_of(folders[0]) > step:
            raise CheckpointError(
                f"checkpoint.resume names step {step}, but {folders[0]} is newer and would be in the way: "
                "set another run.folder, or move the newer ones away"
            )
        return self._load(folder)

    def _load(self, folder: Path) -> Manifest:
        """Load a step folder and return its manifest. Raises DamagedCheckpoint, and remembers that it is damaged."""
        self._is_whole[folder] = False
        stored = tensor_io.open_checkpoint(self._group, folder)
        manifest = stored.manifest
        ranks = manifest.world_size
        random: dict[str, Part] = {}
        if ranks == size_of(self._group):
            for key, part in self._random_state().items():
                if key in stored.index.tensors:
                    random[key] = part
        tensor_io.load_tensors(self._group, stored, self._model_parts() | random)
        self._is_whole[folder] = True
        run_state.fill_tied_copies(self._stages, self._optimizer)
        run_state.set_random_state(random)
        log_on_first(self._group, f"resuming from {folder}: step {manifest.step}, written by {ranks} ranks")
        if not random:
            log_on_first(self._group, f"its random generators are those of {ranks} ranks: starting from run.seed")
        return manifest

    def save(self, step: int, data: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`, in the background if the config says so; `data` is the loader's JSON state.

        Waits for an earlier background save and raises its error. A checkpoint is never rewritten: if one of this step
        exists, it is an error if it verifies; else it is moved aside.
        """
        self._finish()
        folder = manifests.step_folder(self._root, step)
        parts = self._parts()
        self._plan = agree_on_plan(self._group, parts, self._plan)
        needed = run_state.size_in_bytes(parts)

        def begin() -> Path | None:
            return None if folder.exists() else manifests.make_temporary(self._root, step, needed)

        temporary = on_first(self._group, begin)
        if temporary is None:
            self._set_damaged_aside(folder)
            return self.save(step, data)
        if self._executor is None:
            self._write(temporary, step, deepcopy(dict(data)), self._plan, parts)
        else:
            copies = self._snapshot.take(parts)
            arguments = (temporary, step, deepcopy(dict(data)), self._plan, copies)
            self._pending = self._executor.submit(self._write, *arguments)

    @property
    def failed(self) -> bool:
        """Return at once whether a background save has failed; `save` and `close` raise its error on all ranks."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def close(self) -> None:
        """Wait for a background save, raising its error, and for the deletion of old checkpoints. The last call."""
        try:
            self._finish()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            self._deletion.close()
            if self._own_group is not None:
                dist.destroy_process_group(self._own_group)

    def _finish(self) -> None:
        """Wait for the background save, if there is one, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(
        self, temporary: Path, step: int, data: dict[str, Any], plan: SavePlan, parts: Mapping[str, Part]
    ) -> None:
        """Write the tensors and their index, publish the checkpoint, delete old ones; also in the background."""
        folder = manifests.step_folder(self._root, step)
        files: dict[str, FileRecord] = {}

        def publish() -> None:
            files[INDEX] = manifests.write_file(temporary / INDEX, plan.content)
            manifest = Manifest(
                step=step,
                data=data,
                record=self._record,
                world_size=size_of(self._group),
                versions={"torch": torch.__version__, "python": platform.python_version()},
                files=files,
            )
            self._check_owner()
            manifests.publish(temporary, folder, manifest)

        try:
            files.update(tensor_io.save_tensors(self._group, temporary, plan, parts))
            on_first(self._group, publish)
        except CheckpointError as error:
            needed, free = run_state.size_in_bytes(parts), shutil.disk_usage(self._root).free
            if rank_of(self._group) == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"cannot write {folder}: {error} (it needs {needed} bytes, {free} are free; earlier checkpoints are "
                "untouched)"
            ) from error
        self._is_whole[folder] = True
        log_on_first(self._group, f"saved {folder}")
        self._delete_old(step)

    def _delete_old(self, step: int) -> None:
        """Delete checkpoints but the newest `checkpoint.keep` whole ones up to `step`, just saved, in the background.

        Those that this run has found damaged do not count, and stay.
        """
        if self._settings.keep:
            folders = on_first(self._group, lambda: manifests.step_folders(self._root))
            folders = [folder for folder in folders if manifests.step_of(folder) <= step]
            old = folders_to_delete(folders, self._settings.keep, self._seems_whole)
            old = [folder for folder in old if self._is_whole.get(folder, True)]
            self._delete(self._change_on_first(lambda: [manifests.hide(folder) for folder in old]))

    def _delete(self, hidden: Sequence[Path]) -> None:
        """Delete hidden folders in the background, each rank its share."""
        self._deletion.delete(share_of(hidden, rank_of(self._group), size_of(self._group)))

    def _seems_whole(self, folder: Path) -> bool:
        """Return whether a step folder is whole: by the sizes of its files if the run has not read or written it."""
        if folder not in self._is_whole:
            try:
                manifest = on_first(self._group, lambda: manifests.read_manifest(folder))
                tensor_io.check_in_parallel(self._group, folder, manifest, check_sizes)
                self._is_whole[folder] = True
            except CheckpointError as error:
                self._is_whole[folder] = False
                log_on_first(self._group, f"damaged checkpoint: {error}", logging.WARNING)
        return self._is_whole[folder]

    def _set_damaged_aside(self, folder: Path) -> None:
        """Rename a step folder that is in the way of a save. Raises CheckpointError if it is a good checkpoint."""
        if self._is_whole.get(folder, True):
            try:
                verify_in_parallel(self._group, folder)
            except CheckpointError as error:
                log_on_first(self._group, f"damaged checkpoint: {error}", logging.WARNING)
            else:
                raise CheckpointError(f"{folder}: exists already; a checkpoint is never rewritten")
        self._change_on_first(lambda: manifests.set_damaged_aside(folder))
        self._is_whole.pop(folder, None)

    def _change_on_first(self, change: Callable[[], T]) -> T:
        """Change the run folder on rank 0 if this job still owns it, and return on every rank what `change` returns."""

        def change_if_owned() -> T:
            self._check_owner()
            return change()

        return on_first(self._group, change_if_owned)

    def _parts(self) -> dict[str, Part]:
        """Return this rank's part of all tensors of the run, by their key in a checkpoint."""
        return self._model_parts() | self._random_state()

    def _model_parts(self) -> dict[str, Part]:
        """Return this rank's part of the tensors of model and optimizer, by key."""
        tensors = run_state.model_tensors(self._stages)
        return run_state.parts_of(tensors | run_state.optimizer_tensors(self._stages, self._optimizer))

    def _random_state(self) -> dict[str, Part]:
        return run_state.random_state(rank_of(self._group), size_of(self._group))


def verify_in_parallel(group: Group, folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after reading all its files, each rank its share of them.

    Raises DamagedCheckpoint on all ranks if a file is not what was written.
    """
    manifest = on_first(group, lambda: manifests.read_manifest(folder))
    tensor_io.check_in_parallel(group, folder, manifest, check_files)
    return manifest
