"""Load the weights of a run without its optimizer: for recipes that only read, and fresh runs that start from them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchllm.checkpoint.agreement import Group, log_on_first, on_first
from torchllm.checkpoint.load import fill_tied_copies, was_frozen
from torchllm.checkpoint.manifest import CheckpointError, Manifest, read_suspects, step_folders, without_suspects
from torchllm.checkpoint.state import (
    EXTRA,
    WEIGHTS,
    Part,
    model_tensors,
    parts_of,
    saved_model_tensors,
)
from torchllm.checkpoint.tensors import load_tensors, open_checkpoint
from torchllm.checkpoint.verify import newest_verified
from torchllm.facts.parameters import is_low_rank_factor
from torchllm.optim.average import EMA

AVERAGED_WEIGHTS = f"{EXTRA}{EMA}"
"""prefix of the keys of the moving average of the weights, in runs with optimizer.ema_decay over 0"""


PartsToFill = Callable[[Sequence[nn.Module]], Mapping[str, Part]]
"""function that returns the parts of a rank's stages, by key, to read weights into"""


def saved_parts(stages: Sequence[nn.Module]) -> dict[str, Part]:
    """Return this rank's parts of `saved_model_tensors`."""
    return parts_of(saved_model_tensors(stages))


def initial_model_tensors(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the `model_tensors` that initial weights fill: all except low-rank updates."""
    return {key: tensor for key, tensor in model_tensors(stages).items() if not is_low_rank_factor(key)}


def initial_parts(stages: Sequence[nn.Module]) -> dict[str, Part]:
    """Return this rank's parts of `initial_model_tensors`."""
    return parts_of(initial_model_tensors(stages))


def load_newest_weights(run_folder: Path | str, load: Callable[[Path], Manifest], *, group: Group = None) -> Manifest:
    """Load the newest step folder of a run that is not suspect and verifies as it is read; return its manifest.

    load: `load_weights` with its other arguments. group: as there. Suspect and damaged folders are warnings.
    """
    root = Path(run_folder) / "checkpoints"
    folders = on_first(group, lambda: step_folders(root))
    warn = partial(log_on_first, group, level=logging.WARNING)
    suspects = on_first(group, lambda: read_suspects(folders))
    newest = newest_verified(without_suspects(folders, suspects, warn), load, warn)
    if newest is None:
        raise CheckpointError(f"{root} holds no checkpoint; name a run, or checkpoint.resume")
    return newest[1]


def load_weights(
    folder: Path,
    stages: Sequence[nn.Module],
    *,
    group: Group = None,
    cast: bool = False,
    prefix: str = WEIGHTS,
    to_fill: PartsToFill = saved_parts,
) -> Manifest:
    """Load the weights of a step folder into this rank's part of the model, whatever layout wrote them.

    Only the weights are read and verified, not the optimizer's state. to_fill: which of them; by default those that the
    run saves (`state.saved_model_tensors`); `initial_parts`: the frozen weights, from a checkpoint of a run without.
    group: a host-side group of the ranks with the model; None: all of it is in this process. cast: round the weights
    to the dtype of the model's parameters if it differs, one by one. prefix: AVERAGED_WEIGHTS loads their moving
    average (optimizer.ema_decay), "extra.NAME." a fork's state of that name.

    Raises, on all ranks, DamagedCheckpoint if a piece that is read is damaged, CheckpointError for another model.
    """
    stored = open_checkpoint(group, folder)
    parts = to_fill(stages)
    if prefix != WEIGHTS:
        weights = {key for key in stored.index.tensors if key.startswith(WEIGHTS)}
        frozen = {key for key in weights if was_frozen(stored.manifest.record, key.removeprefix(WEIGHTS))}
        if frozen:  # they have no average
            own = {key: parts[key] for key in parts.keys() & frozen}
            load_tensors(group, stored, own, prefix=WEIGHTS, cast=cast, left=weights - frozen)
        parts = {prefix + key.removeprefix(WEIGHTS): part for key, part in parts.items() if key not in frozen}
    load_tensors(group, stored, parts, prefix=prefix, cast=cast)
    fill_tied_copies(stages)
    return stored.manifest


@dataclass(frozen=True)
class RunWeights:
    """The weights of a checkpoint of another run."""

    folder: Path
    """a step folder, or a run folder"""
    parts: PartsToFill = initial_parts
    key: str = "checkpoint.initial"

    def load(self, stages: Sequence[nn.Module], group: Group) -> dict[str, Any]:
        is_run = on_first(group, lambda: bool(step_folders(self.folder / "checkpoints")))
        load = partial(load_weights, stages=stages, group=group, cast=True, to_fill=self.parts)
        manifest = load_newest_weights(self.folder, load, group=group) if is_run else load(self.folder)
        log_on_first(group, f"starting from the weights of {self.folder}: step {manifest.step}")
        record = {"from": str(self.folder), "step": manifest.step}
        return record | {"initial": manifest.record.get("initial")}
