"""Read whole weights of a checkpoint one by one, in a process that never holds the whole model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from torchllm.checkpoint.data_file import data_file_name
from torchllm.checkpoint.index import Region, TensorEntry
from torchllm.checkpoint.load import was_frozen
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.checkpoint.piece_table import read_piece_table
from torchllm.checkpoint.state import EXTRA, WEIGHTS, Part, TensorSharding
from torchllm.checkpoint.tensors import load_tensors, open_checkpoint

ReadWeight = Callable[[str], Tensor]
"""returns a whole weight on the host, by its canonical name"""


class WeightReader:
    """Reads whole weights of one checkpoint, on the host, in their stored dtype.

    It verifies each piece by its checksum. While a weight is read, at most two copies of it are in memory.
    """

    def __init__(self, folder: Path, prefix: str = WEIGHTS) -> None:
        """Open a step folder. prefix: AVERAGED_WEIGHTS reads the moving average of the weights.

        Raises DamagedCheckpoint if its manifest, its index, or the size of a file has changed since it was written.
        """
        stored = open_checkpoint(None, folder)
        entries = stored.index.tensors.items()
        self.entries: dict[str, TensorEntry] = {
            key.removeprefix(prefix): entry for key, entry in entries if key.startswith(prefix)
        }
        """by canonical name"""
        self.manifest = stored.manifest
        self.folder = folder
        self._prefix = prefix
        self._frozen: set[str] = set()
        """names of the weights that have no average, since they were frozen"""
        if prefix.startswith(EXTRA):
            for key, entry in entries:
                name = key.removeprefix(WEIGHTS)
                if key.startswith(WEIGHTS) and was_frozen(self.manifest.record, name):
                    self._frozen.add(name)
                    self.entries[name] = entry
        tables = {}  # read once, not for each weight
        for writer in stored.index.writers():
            name = data_file_name(writer)
            tables[writer] = read_piece_table(folder / name, stored.manifest.files[name])
        self._stored = replace(stored, tables=tables)

    def read(self, name: str) -> Tensor:
        """Return a weight. Raises CheckpointError if the checkpoint has none of that name, DamagedCheckpoint if a bit
        of it has changed."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.folder}: holds no {self._prefix}{name}: it is of another model than the config's, or it has no "
                "moving average"
            )
        shape = entry.grid.shape
        tensor = torch.empty(shape, dtype=getattr(torch, entry.dtype))
        whole = Region((0,) * len(shape), shape)
        key = (WEIGHTS if name in self._frozen else self._prefix) + name
        part = Part(tensor, whole, TensorSharding(shape, None, ()))
        load_tensors(None, self._stored, {key: part}, prefix=key, left=self._stored.index.tensors)
        return tensor


def read_mean(checkpoints: Mapping[Path, ReadWeight], name: str) -> Tensor:
    """Return the mean of a weight of several checkpoints, float32; of a single checkpoint the weight itself.

    checkpoints: by the step folder, the newest first. Raises CheckpointError if the shapes differ, and its own errors.
    """
    newest, *others = checkpoints
    if not others:
        return checkpoints[newest](name)
    total = checkpoints[newest](name).float()
    for folder in others:
        weight = checkpoints[folder](name)
        if weight.shape != total.shape:
            raise CheckpointError(
                f"{name}: {tuple(weight.shape)} in {folder}, {tuple(total.shape)} in {newest}: average checkpoints "
                "of one model"
            )
        total += weight
    return total.div_(len(checkpoints))
