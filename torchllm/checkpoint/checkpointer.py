"""Save and resume a run: checkpoints exist whole or not at all, load on any layout, and are verified before use.

All ranks write the tensors (`tensors.py`); everything else is JSON in the manifest (`manifest.py`). Neither the
learning rate nor the optimizer's settings are stored: the one is a function of the step, the others are in the config.
"""

import logging
import platform
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchllm import config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint import tensors as tensor_io
from torchllm.checkpoint.agreement import Group, log_on_first, on_all, on_first, rank_of, size_of
from torchllm.checkpoint.manifest import CheckpointError, FileRecord, Manifest


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
    ) -> None:
        """Save and load `stages` (this rank's part of the model) and `optimizer`, whose state must exist.

        `record` is JSON stored in every checkpoint, such as the resolved config.
        """
        self._settings = settings
        self._root = Path(run_folder) / "checkpoints"
        self._stages, self._optimizer = stages, optimizer
        self._record = dict(record or {})
        self._group = host_group
        self._verified: dict[str, bool] = {}
        """whether a step folder verifies, by name: only of those that this run has written or read"""
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        if settings.asynchronous:
            # If training used the same group, it and a save in the background would wait for each other.
            self._group = dist.new_group(backend="gloo") if host_group is not None else None
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._snapshot = tensor_io.Snapshot(self._tensors() | tensor_io.random_state(self._group))

    def resume(self) -> Manifest | None:
        """Load the checkpoint that `checkpoint.resume` asks for into model and optimizer, and return its manifest.

        The caller continues from the manifest's `step` and `data`. Returns None if the run starts from scratch.
        """
        on_first(self._group, lambda: manifests.delete_leftovers(self._root))
        chosen = self._choose_checkpoint()
        if chosen is None:
            log_on_first(self._group, f"no checkpoint in {self._root}: starting fresh")
            return None
        folder, manifest = chosen
        ranks = manifest.world_size
        random = tensor_io.random_state(self._group) if ranks == size_of(self._group) else {}
        tensor_io.load_tensors(self._group, folder, manifest, self._tensors() | random, optional=random)
        tensor_io.fill_tied_copies(self._stages, self._optimizer)
        tensor_io.set_random_state(random)
        log_on_first(self._group, f"resuming from {folder}: step {manifest.step}, written by {ranks} ranks")
        if not random:
            log_on_first(self._group, f"its random generators are those of {ranks} ranks: starting from run.seed")
        return manifest

    def _choose_checkpoint(self) -> tuple[Path, Manifest] | None:
        """Return the step folder that `checkpoint.resume` asks for, verified; None if the run starts from scratch."""
        folders = on_first(self._group, lambda: manifests.step_folders(self._root))
        if self._settings.resume == "auto":
            warn = partial(log_on_first, self._group, level=logging.WARNING)
            return manifests.newest_verified(folders, self._verify, warn)
        if self._settings.resume == "none":
            if folders:
                raise CheckpointError(
                    f'checkpoint.resume = "none", but {folders[0]} exists: use "auto", or another run.folder'
                )
            return None
        folder = Path(self._settings.resume)
        manifest = verify_in_parallel(self._group, folder)
        if folders and manifests.step_of(folders[0]) > manifest.step:
            raise CheckpointError(
                f"checkpoint.resume names step {manifest.step}, but {folders[0]} is newer and would be in the way: "
                "set another run.folder, or move the newer ones away"
            )
        return folder, manifest

    def save(self, step: int, data: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`, in the background if the config says so; `data` is the loader's JSON state.

        Waits for an earlier background save and raises its error. A checkpoint is never rewritten: if one of this step
        exists, it is an error if it verifies; else it is moved aside.
        """
        self._finish()
        folder = manifests.step_folder(self._root, step)
        tensors = self._tensors() | tensor_io.random_state(self._group)
        needed = tensor_io.size_in_bytes(tensors)

        def begin() -> Path | None:
            return None if folder.exists() else manifests.make_temporary(self._root, step, needed)

        temporary = on_first(self._group, begin)
        if temporary is None:
            if self._verifies(folder):
                raise CheckpointError(f"{folder}: exists already; a checkpoint is never rewritten")
            on_first(self._group, lambda: manifests.set_damaged_aside(folder))
            del self._verified[folder.name]
            return self.save(step, data)
        if self._executor is None:
            self._write(temporary, step, deepcopy(dict(data)), tensors)
        else:
            copies = self._snapshot.take(tensors)
            self._pending = self._executor.submit(self._write, temporary, step, deepcopy(dict(data)), copies)

    @property
    def failed(self) -> bool:
        """Return at once whether a background save has failed; `save` and `close` raise its error on all ranks."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def close(self) -> None:
        """Wait for a background save and raise its error."""
        self._finish()
        if self._executor is not None:
            self._executor.shutdown()

    def _finish(self) -> None:
        """Wait for the background save, if there is one, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, temporary: Path, step: int, data: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Write the tensors, hash their files, publish the checkpoint, delete old ones; also in the background."""
        folder = manifests.step_folder(self._root, step)
        rank = rank_of(self._group)
        try:
            tensor_io.save_tensors(self._group, temporary, tensors)
            files: dict[str, FileRecord] = {}
            for files_of_rank in on_all(self._group, lambda: tensor_io.written_files(rank, temporary)):
                files.update(files_of_rank)
            manifest = Manifest(
                step=step,
                data=data,
                record=self._record,
                world_size=size_of(self._group),
                versions={"torch": torch.__version__, "python": platform.python_version()},
                files=files,
            )
            on_first(self._group, lambda: manifests.publish(temporary, folder, manifest))
        except CheckpointError as error:
            needed, free = tensor_io.size_in_bytes(tensors), shutil.disk_usage(self._root).free
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"{error} (it needs {needed} bytes, {free} are free; earlier checkpoints are untouched)"
            ) from error
        self._verified[folder.name] = True
        log_on_first(self._group, f"saved {folder}")
        self._delete_old()

    def _delete_old(self) -> None:
        """Delete all verified checkpoints but the newest `checkpoint.keep`; damaged ones do not count, and stay."""
        if self._settings.keep:
            folders = on_first(self._group, lambda: manifests.step_folders(self._root))
            verified = [folder for folder in folders if self._verifies(folder)]
            for folder in verified[self._settings.keep :]:
                on_first(self._group, partial(manifests.delete_checkpoint, folder))
                del self._verified[folder.name]

    def _verifies(self, folder: Path) -> bool:
        """Return whether a step folder verifies; it is read only if this run has neither written nor read it."""
        if folder.name not in self._verified:
            try:
                self._verify(folder)
            except CheckpointError as error:
                self._verified[folder.name] = False
                log_on_first(self._group, f"damaged checkpoint: {error}", logging.WARNING)
        return self._verified[folder.name]

    def _verify(self, folder: Path) -> Manifest:
        """Verify a step folder, remember that it verifies, and return its manifest."""
        manifest = verify_in_parallel(self._group, folder)
        self._verified[folder.name] = True
        return manifest

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors of model and optimizer on this rank, by their key in a checkpoint."""
        return tensor_io.model_tensors(self._stages) | tensor_io.optimizer_tensors(self._stages, self._optimizer)


def find_checkpoint(run_folder: Path | str, resume: str = "auto") -> Path:
    """Return the step folder for a recipe that only reads: the one that `resume` names, else the newest that verifies.

    Warns of every newer one that is damaged. Raises CheckpointError if the run has none that verifies.
    """
    if resume not in ("auto", "none"):
        return Path(resume)
    root = Path(run_folder) / "checkpoints"
    newest = manifests.newest_verified(manifests.step_folders(root))
    if newest is None:
        raise CheckpointError(f"{root} holds no checkpoint; name a run folder's config.toml, or checkpoint.resume")
    folder, _ = newest
    return folder


def load_weights(folder: Path, model: nn.Module, *, group: Group = None) -> Manifest:
    """Verify a step folder and load its weights into `model`, plain or sharded, whatever layout wrote them.

    Raises CheckpointError if the checkpoint is damaged or of another model.
    """
    manifest = verify_in_parallel(group, folder)
    tensor_io.load_tensors(group, folder, manifest, tensor_io.model_tensors([model]), prefix="model.")
    return manifest


def verify_in_parallel(group: Group, folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after reading all its files, each rank its share of them.

    Raises CheckpointError on all ranks if a file is not what was written.
    """
    manifest = on_first(group, lambda: manifests.read_manifest(folder))
    problems: list[str] = []
    for of_rank in on_all(group, lambda: manifests.check_files(folder, manifest, rank_of(group), size_of(group))):
        problems += of_rank
    if problems:
        raise CheckpointError("; ".join(problems))
    return manifest
