"""Checkpoints that exist whole or not at all, load on any layout, and are verified before they are used.

Tensors are written by all ranks (`tensors.py`); everything else is JSON in the manifest
(`manifest.py`). The learning rate is a function of the step and the optimizer's settings are the config's,
so neither is stored.
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
from torchllm.checkpoint.manifest import CheckpointError, Manifest


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
        """`record`: JSON kept with every checkpoint (the resolved config, say). The optimizer's state must exist."""
        self._settings = settings
        self._root = Path(run_folder) / "checkpoints"
        self._stages, self._optimizer = stages, optimizer
        self._record = dict(record or {})
        self._group = host_group
        self._good: dict[str, bool] = {}  # step folders that this run wrote or read: do they verify?
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        if settings.asynchronous:
            # On a group that training uses too, a save in the background and the training would wait for each other.
            self._group = dist.new_group(backend="gloo") if host_group is not None else None
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._snapshot = tensor_io.Snapshot(self._tensors() | tensor_io.random_state(self._group))

    def resume(self) -> Manifest | None:
        """Load what `checkpoint.resume` asks for into model and optimizer; None when the run starts fresh.

        The caller goes on from the manifest's `step` and `data`.
        """
        on_first(self._group, lambda: manifests.delete_leftovers(self._root))
        folders = on_first(self._group, lambda: manifests.step_folders(self._root))
        found: tuple[Path, Manifest] | None = None
        if self._settings.resume == "auto":
            found = manifests.newest_verified(
                folders, self._verify, partial(log_on_first, self._group, level=logging.WARNING)
            )
        elif self._settings.resume != "none":
            found = Path(self._settings.resume), verify_in_parallel(self._group, Path(self._settings.resume))
            if newer := [folder for folder in folders if manifests.step_of(folder) > found[1].step]:
                raise CheckpointError(
                    f"checkpoint.resume names step {found[1].step}, but {newer[0]} is newer and would be in the way: "
                    "set another run.folder, or move the newer ones away"
                )
        elif folders:
            raise CheckpointError(
                f'checkpoint.resume = "none", but {folders[0]} exists: use "auto", or another run.folder'
            )
        if found is None:
            log_on_first(self._group, f"no checkpoint in {self._root}: starting fresh")
            return None
        folder, manifest = found
        random = tensor_io.random_state(self._group) if manifest.world_size == size_of(self._group) else {}
        tensor_io.load_tensors(self._group, folder, manifest, self._tensors() | random, optional=random)
        tensor_io.fill_tied_copies(self._stages, self._optimizer)
        tensor_io.set_random_state(random)
        log_on_first(
            self._group, f"resuming from {folder}: step {manifest.step}, written by {manifest.world_size} ranks"
        )
        if not random:
            log_on_first(self._group, f"its random generators belong to {manifest.world_size} ranks: they start anew")
        return manifest

    def save(self, step: int, data: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`; `data` is the loader's JSON state. In the background if the config says so.

        Waits for an earlier background save, and raises what went wrong with it. A checkpoint is never rewritten: one
        of this step that verifies is an error, one that does not is moved aside.
        """
        self._finish()
        folder = manifests.step_folder(self._root, step)
        tensors = self._tensors() | tensor_io.random_state(self._group)
        needed = tensor_io.size_in_bytes(tensors)

        def begin() -> Path | None:
            return None if folder.exists() else manifests.make_temporary(self._root, step, needed)

        temporary = on_first(self._group, begin)
        if temporary is None:
            if self._is_good(folder):
                raise CheckpointError(f"{folder}: exists already; a checkpoint is never rewritten")
            on_first(self._group, lambda: manifests.set_damaged_aside(folder))
            del self._good[folder.name]
            return self.save(step, data)
        if self._executor is None:
            self._write(temporary, step, deepcopy(dict(data)), tensors)
        else:
            copies = self._snapshot.take(tensors)
            self._pending = self._executor.submit(self._write, temporary, step, deepcopy(dict(data)), copies)

    @property
    def failed(self) -> bool:
        """Whether a background save has failed; `save` and `close` raise it, on all ranks. Asking waits for nothing."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def close(self) -> None:
        """Wait for a background save and raise what went wrong with it."""
        self._finish()
        if self._executor is not None:
            self._executor.shutdown()

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, temporary: Path, step: int, data: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """The same on the main thread and in the background: write, hash, publish, retire old ones."""
        folder = manifests.step_folder(self._root, step)
        rank = rank_of(self._group)
        try:
            tensor_io.save_tensors(self._group, temporary, tensors)
            written = on_all(self._group, lambda: tensor_io.written_files(rank, temporary))
            manifest = Manifest(
                step=step,
                data=data,
                record=self._record,
                world_size=size_of(self._group),
                versions={"torch": torch.__version__, "python": platform.python_version()},
                files={name: record for files in written for name, record in files.items()},
            )
            on_first(self._group, lambda: manifests.publish(temporary, folder, manifest))
        except CheckpointError as error:
            needed, free = tensor_io.size_in_bytes(tensors), shutil.disk_usage(self._root).free
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"{error} (it needs {needed} bytes, {free} are free; earlier checkpoints are untouched)"
            ) from error
        self._good[folder.name] = True
        log_on_first(self._group, f"saved {folder}")
        self._retire()

    def _retire(self) -> None:
        """Delete verified checkpoints beyond the newest `keep` verified ones; damaged ones neither count nor go."""
        if self._settings.keep:
            folders = on_first(self._group, lambda: manifests.step_folders(self._root))
            for folder in [folder for folder in folders if self._is_good(folder)][self._settings.keep :]:
                on_first(self._group, partial(manifests.delete_checkpoint, folder))
                del self._good[folder.name]

    def _is_good(self, folder: Path) -> bool:
        """Whether a step folder verifies; read only if this run has not written or read it."""
        if folder.name not in self._good:
            try:
                self._verify(folder)
            except CheckpointError as error:
                self._good[folder.name] = False
                log_on_first(self._group, f"damaged checkpoint: {error}", logging.WARNING)
        return self._good[folder.name]

    def _verify(self, folder: Path) -> Manifest:
        manifest = verify_in_parallel(self._group, folder)
        self._good[folder.name] = True
        return manifest

    def _tensors(self) -> dict[str, Tensor]:
        return tensor_io.model_tensors(self._stages) | tensor_io.optimizer_tensors(self._stages, self._optimizer)


def find_checkpoint(run_folder: Path | str, resume: str = "auto") -> Path:
    """The step folder that `checkpoint.resume` means to a recipe that only reads: the named one, else the newest.

    Warns of every newer one that is damaged. Raises CheckpointError when the run has none that verifies.
    """
    if resume not in ("auto", "none"):
        return Path(resume)
    root = Path(run_folder) / "checkpoints"
    found = manifests.newest_verified(manifests.step_folders(root))
    if found is None:
        raise CheckpointError(f"{root} holds no checkpoint; name a run folder's config.toml, or checkpoint.resume")
    return found[0]


def load_weights(folder: Path, model: nn.Module, *, group: Group = None) -> Manifest:
    """Verify a step folder and load its weights into `model`, plain or sharded, whatever layout wrote them.

    Raises CheckpointError: damaged, or not this model.
    """
    manifest = verify_in_parallel(group, folder)
    tensor_io.load_tensors(group, folder, manifest, tensor_io.model_tensors([model]), prefix="model.")
    return manifest


def verify_in_parallel(group: Group, folder: Path) -> Manifest:
    """The manifest of a checkpoint that is what was written, its files read by all ranks together."""
    manifest = on_first(group, lambda: manifests.read_manifest(folder))
    found = on_all(group, lambda: manifests.check_files(folder, manifest, rank_of(group), size_of(group)))
    if any(found):
        raise CheckpointError("; ".join(problem for problems in found for problem in problems))
    return manifest
