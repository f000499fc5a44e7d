"""Load a checkpoint into model and optimizer, whose state a fresh run may lack; `tensors.py` reads the tensors."""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchllm.checkpoint.agreement import Group, any_rank, log_on_first, size_of
from torchllm.checkpoint.manifest import Manifest
from torchllm.checkpoint.state import (
    EXTRA,
    OPTIMIZER,
    Part,
    model_parts,
    named_tensors,
    tensors_by_name,
    tied_copies,
)
from torchllm.checkpoint.tensors import load_tensors, open_checkpoint
from torchllm.facts.state_blocks import SCALE
from torchllm.optim.optimizer import set_mode
from torchllm.runtime.torch_compat import reads_found_inf


def load_checkpoint(
    group: Group,
    folder: Path,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    random: Mapping[str, Part],
    extra: Mapping[str, Part],
) -> tuple[Manifest, list[str]]:
    """Load a step folder; return its manifest, and the names of the extra state that it lacks.

    random: parts of the states of this rank's generators, set if the same number of ranks wrote the checkpoint. Raises
    DamagedCheckpoint on all ranks.
    """
    stored = open_checkpoint(group, folder)
    manifest = stored.manifest
    ranks = manifest.world_size
    stored_random: dict[str, Part] = {}
    if ranks == size_of(group):
        for key, part in random.items():
            if key in stored.index.tensors:
                stored_random[key] = part
    start_state(stages, optimizer, manifest.record)
    stored_extra = {key: part for key, part in extra.items() if key in stored.index.tensors}
    parts = model_parts(stages, optimizer)
    for key in parts.keys() - stored.index.tensors.keys():
        state = key.removeprefix(OPTIMIZER)
        if state != key and was_frozen(manifest.record, state.rpartition(".")[0]):
            parts.pop(key).local.zero_()  # as in a new run
        elif state.endswith(".step") and f"{key.removesuffix('step')}momentum_buffer" in stored.index.tensors:
            parts.pop(key)  # Muon counts the steps of matrices only if it rounds their momentum
    frozen = frozen_state(stages)
    left = {key for key in stored.index.tensors if key.startswith(frozen)}
    left |= {f"{key.removesuffix('momentum_buffer')}step" for key in parts if key.endswith(".momentum_buffer")}
    if any_rank(group, any(key.endswith(SCALE) for key in (*parts, *stored.index.tensors))):
        from torchllm.checkpoint.moments import read_as_stored  # of no use to other runs

        reading: AbstractContextManager[dict[str, Part]] = read_as_stored(group, parts, stored.index.tensors)
    else:
        reading = nullcontext(parts)
    with reading as filled:
        load_tensors(group, stored, filled | stored_random | stored_extra, left=left)
    for parameters in optimizer.param_groups:
        parameters.update(manifest.record.get("optimizer_groups", {}))
    fill_tied_copies(stages, optimizer)
    set_random_state(stored_random)
    log_on_first(group, f"resuming from {folder}: step {manifest.step}, written by {ranks} ranks")
    if not stored_random:
        log_on_first(group, f"it has random generators for {ranks} ranks: starting them from run.seed")
    missing = [key.removeprefix(EXTRA) for key in extra if key not in stored_extra]
    if missing:
        log_on_first(group, f"it has no extra state {shorten(missing)}: starting without it")
    return manifest, missing


def log_other_versions(group: Group, manifest: Manifest, versions: Mapping[str, str]) -> None:
    """Log if other versions than these, of this run, wrote the checkpoint: they may compute something else."""
    differences = [
        f"{name} {manifest.versions.get(name)}, now {version}"
        for name, version in versions.items()
        if manifest.versions.get(name) != version
    ]
    if differences:
        log_on_first(group, f"the checkpoint was written by other versions: {'; '.join(differences)}")


def frozen_state(stages: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the prefixes of keys of optimizer state that this rank's frozen parameters would have."""
    return tuple(f"{OPTIMIZER}{name}." for name, tensor in tensors_by_name(stages).items() if not tensor.requires_grad)


def was_frozen(record: Mapping[str, Any], name: str) -> bool:
    """Return whether the run that wrote the checkpoint with this record froze a parameter by model.frozen.

    name: canonical. A checkpoint has no optimizer state of it and no moving average.
    """
    pattern = record.get("config", {}).get("model", {}).get("frozen", "")
    return pattern != "" and re.fullmatch(pattern, name) is not None


def start_state(stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, record: Mapping[str, Any]) -> None:
    """Make a torch optimizer create its state, which it lacks before its first step, so that it can be loaded.

    This takes a step with gradients of zero: call it before the weights are loaded. record: of the checkpoint; a
    parameter that was frozen there has no state yet, as in a new run.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer.state or not parameters:
        return
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    set_mode(optimizer, "train")
    if reads_found_inf(optimizer):  # the attributes that `apply_if_finite` sets
        vars(optimizer).update(found_inf=torch.zeros((), device=parameters[0].device), grad_scale=None)
    optimizer.step()
    set_mode(optimizer, "eval")
    optimizer.zero_grad()
    for name, tensor in named_tensors(stages):
        if was_frozen(record, name):
            optimizer.state.pop(tensor, None)


@torch.no_grad()
def fill_tied_copies(stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Copy the loaded value of each tied parameter, and its optimizer state, to its other copy on this rank."""
    for saved, copy in tied_copies(stages):
        copy.copy_(saved)
        if optimizer is None:
            continue
        for entry, value in optimizer.state[saved].items():
            if isinstance(value, Tensor):
                optimizer.state[copy][entry].copy_(value)


def set_random_state(parts: Mapping[str, Part]) -> None:
    """Set torch's generators to states that `random_state` returned."""
    for key, part in parts.items():
        if key == "rng.cpu":
            torch.set_rng_state(part.local[0])
        else:
            torch.cuda.set_rng_state(part.local[0])


def shorten(names: Sequence[str]) -> str:
    """Return the first names, and the number of all."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
