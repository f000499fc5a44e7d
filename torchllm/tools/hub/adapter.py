"""Low-rank updates (LoRA) outside of a run: as the package peft reads them, or merged into the weights.

peft finds an update by the name of the module that it changes. A name that it does not find is no error there, only a
warning, and the update is left out: so names come from the table that the weights are exported by.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchllm.checkpoint.initial import check_same_source
from torchllm.checkpoint.manifest import CheckpointError, Manifest, step_folder
from torchllm.checkpoint.state import parts_of
from torchllm.config import Config, Model
from torchllm.facts.parameters import is_low_rank_factor
from torchllm.facts.shapes import parameter_shapes
from torchllm.models.lora import merge_update
from torchllm.parallel.initialize import fill
from torchllm.tools.config.compare import check_frozen_weights
from torchllm.tools.hub.by_key import ReadWeight, WeightReader
from torchllm.tools.hub.families.family import HubFamily, StoredPart, StoredTensor, UnmappedParameter
from torchllm.tools.hub.hf_reader import fill_part
from torchllm.tools.hub.hf_writer import write_json, write_safetensors
from torchllm.tools.hub.hub import find_hub_model, is_hub_id
from torchllm.tools.hub.published_weights import HubWeights

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_KIND = "An adapter (LoRA) of a language model"
PEFT_PREFIX = "base_model.model."
"""peft's prefix of transformers' names; with another prefix it leaves an update out, without an exception"""


def seeded_weights(model: Model, seed: int) -> ReadWeight:
    """Return the reader of the weights, float32, that a run with random initial weights freezes: the seed's."""
    shapes = parameter_shapes(model)

    def read(name: str) -> Tensor:
        weight = torch.empty(shapes[name])
        fill(weight, name, model, seed)
        return weight

    return read


def published_weights(model: Model, seed: int, recorded: Mapping[str, Any] | None) -> ReadWeight:
    """Return the reader of the weights, float32, that a run of a published model freezes.

    Rows that the files of `model.from_hf` lack are random. recorded: their record in a checkpoint of the run. Raises
    HubFileError if they are not there, CheckpointError if they do not fit or are not the recorded ones.
    """
    folder = find_hub_model(model.from_hf, weights=True, may_download=False).folder
    weights = HubWeights(model)
    config, files = weights.open(folder)
    check_same_source(weights.key, weights.record(config, files), recorded)
    published = replace(config.model, tied_embeddings=False)
    shapes, published_shapes = parameter_shapes(model), parameter_shapes(published)
    read_seeded = seeded_weights(model, seed)

    def read(name: str) -> Tensor:
        tensors = files.family.tensors_of(name, published_shapes, published)
        # Random numbers take longer than reading, so they are drawn only where some of them stay.
        is_padded = shapes[name] != published_shapes[name]
        weight = read_seeded(name) if is_padded else torch.empty(shapes[name])
        fill_part(files, tensors, name, parts_of({name: weight})[name])
        return weight

    return read


def frozen_weights(config: Config, manifest: Manifest) -> ReadWeight:
    """Return the weights that LoRA freezes in a run, by name: published ones, another run's, or random ones.

    manifest: of a checkpoint of the run, which says the step of that other run. Raises CheckpointError if it is gone,
    and CheckpointError or UserError if the frozen weights differ from the checkpoint's.
    """
    check_frozen_weights(manifest.record, config)
    if config.checkpoint.initial:
        folder = Path(config.checkpoint.initial)
        in_run = step_folder(folder / "checkpoints", manifest.record["initial"]["step"])
        return WeightReader(in_run if in_run.exists() else folder).read
    if config.model.from_hf:
        return published_weights(config.model, config.run.seed, manifest.record.get("initial"))
    return seeded_weights(config.model, config.run.seed)


def read_merged(frozen: ReadWeight, updates: dict[str, Tensor], scale: float, name: str) -> Tensor:
    """Return a weight of the model that was trained, W + alpha / r * B A, in the type of the frozen one.

    updates: by `read_updates`. scale: alpha / r.
    """
    weight = frozen(name)
    layer = name.removesuffix(".weight")
    a = updates.get(f"{layer}.lora_A.weight")
    return weight if a is None else merge_update(weight, a, updates[f"{layer}.lora_B.weight"], scale)


def model_weights(config: Config, checkpoint: WeightReader) -> ReadWeight:
    """Return the weights of the model that a checkpoint of a run is of; with LoRA, its updates are merged in.

    Raises as `frozen_weights` and `read_updates` do.
    """
    if not config.lora.is_on:
        return checkpoint.read
    frozen, updates = frozen_weights(config, checkpoint.manifest), read_updates(checkpoint)
    return partial(read_merged, frozen, updates, config.lora.scale)


def read_updates(checkpoint: WeightReader) -> dict[str, Tensor]:
    """Return the factors of all low-rank updates of a checkpoint, by canonical name, verified.

    They are held whole: a hundredth of the model. Raises DamagedCheckpoint if a bit of them has changed,
    CheckpointError if it holds none.
    """
    names = [name for name in checkpoint.entries if is_low_rank_factor(name)]
    if not names:
        raise CheckpointError(
            f"{checkpoint.folder}: holds no low-rank updates: it is of a run without LoRA (lora.rank), or it has no "
            "moving average"
        )
    return {name: checkpoint.read(name) for name in names}


def write_adapter(
    folder: Path,
    config: Config,
    family: HubFamily,
    updates: Mapping[str, Tensor],
    base: str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write low-rank updates into a folder that exists, as `peft.PeftModel.from_pretrained` reads them.

    family: of the model that they belong to. base: its folder or hub id; may be empty, because a user of the adapter
    names the model too. Raises UnmappedParameter if the family has no matrix for one of them alone, and OSError.
    """
    shapes = parameter_shapes(config.model)
    tensors = []
    modules = set()
    for name, factor in updates.items():
        layer, letter = name.removesuffix(".weight").rsplit(".", 1)
        (stored,) = family.tensors_of(f"{layer}.weight", shapes, config.model)
        if len(stored.parts) > 1:
            raise UnmappedParameter(
                f"{layer}: files of type {family.model_type!r} have it in one matrix with others, {stored.key}, so "
                "that no adapter can have its updates: export the merged weights, without export.adapter"
            )
        matrix = stored.key.removesuffix(".weight")
        modules.add(matrix.rpartition(".")[2])
        part = StoredPart(name, first_row=0, rows=len(factor))
        tensors.append(StoredTensor(f"{PEFT_PREFIX}{matrix}.{letter}.weight", tuple(factor.shape), False, (part,)))
    write_safetensors(folder / ADAPTER_WEIGHTS, tensors, lambda tensor: updates[tensor.parts[0].name], dtype)
    write_json(folder / ADAPTER_CONFIG, adapter_config(config, base, modules))


def adapter_config(config: Config, base: str, modules: Iterable[str]) -> dict[str, Any]:
    """Return the file that peft reads. modules: names of the matrices with updates, as files of the family have them.

    FOOTGUN: peft drops the updates of a module that is not named, without a word.
    """
    lora = config.lora
    name, _, revision = base.partition("@") if is_hub_id(base) else (base, "", "")
    return {
        "base_model_name_or_path": name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "revision": revision or None,
        "target_modules": sorted(modules),
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
