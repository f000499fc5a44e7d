"""Write the weights of a model as Hugging Face does: safetensors files, and an index where there are several.

Tensors are made, written and freed one by one, so that one of them bounds the memory, not a file or the model. All is
written into a hidden folder, which is renamed when it is whole (`new_folder`): nothing is ever overwritten.

    8 bytes     length of the header, little-endian
    header      JSON: name -> dtype, shape, first byte and end of its data; padded with blanks to a multiple of 8
    data        the tensors one after the other, without gaps

torch's HuggingFaceStorageWriter is not used: its files lack {"format": "pt"}, which transformers 4.46 wants, and it
overwrites existing files (torch 2.13).
"""

import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchllm.checkpoint.manifest import CheckpointError, DamagedCheckpoint, sync
from torchllm.config import Model
from torchllm.facts.parameters import rule_of
from torchllm.tools.hub.by_key import ReadWeight
from torchllm.tools.hub.config_json import write_config_json
from torchllm.tools.hub.families.family import HubFamily, StoredPart, StoredTensor
from torchllm.tools.hub.files import CONFIG_JSON, INDEX_JSON, WHOLE_MODEL
from torchllm.tools.hub.hf_reader import DTYPES
from torchllm.tools.hub.text_facts import END, GENERATION_JSON, TextFacts

BYTES_PER_FILE = 5 * 10**9
"""bytes of tensors in a file, unless a single tensor has more: the default of transformers 4"""
SAFETENSORS_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_MULTIPLE = 8
"""bytes that the length of a header is a multiple of, so that tensors are aligned in memory"""


@contextmanager
def new_folder(final: Path, needed: int) -> Iterator[Path]:
    """Yield an empty hidden folder, which becomes `final` at the end of the context; it is removed after an error.

    needed: bytes that will be written. Raises CheckpointError if `final` exists, if the disk has less room than needed,
    or if it fails.
    """
    if os.path.lexists(final):
        raise CheckpointError(f"export.folder: {final} exists, and nothing is overwritten: name another folder")
    parent = final.absolute().parent
    temporary = parent / f".{final.name}.{uuid.uuid4().hex}.tmp"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(parent).free) < needed:
            raise CheckpointError(
                f"export.folder: {final} needs {needed} bytes, {free} are free in {parent}: make room, name a folder "
                "on another disk, or set export.dtype"
            )
        temporary.mkdir()
        yield temporary
        sync(temporary)
        os.rename(temporary, final)
        sync(parent)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(
            f"{error}; nothing was exported: name an older checkpoint, --checkpoint.resume=STEP_FOLDER"
        ) from error
    except OSError as error:
        raise CheckpointError(f"export.folder: {final} cannot be written: {error}; nothing is left of it") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def weight_bytes(tensors: Sequence[StoredTensor], dtype: torch.dtype) -> int:
    """Return the bytes that tensors take in files of a dtype, without headers."""
    return sum(_bytes_of(tensor, dtype) for tensor in tensors)


def plan_files(
    tensors: Sequence[StoredTensor], dtype: torch.dtype, bytes_per_file: int = BYTES_PER_FILE
) -> dict[str, list[StoredTensor]]:
    """Return the tensors of each file, in their order: each has `bytes_per_file` at most, or one tensor."""
    groups: list[list[StoredTensor]] = []
    size = 0
    for tensor in tensors:
        size += _bytes_of(tensor, dtype)
        if not groups or size > bytes_per_file:
            groups.append([])
            size = _bytes_of(tensor, dtype)
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {WHOLE_MODEL: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


def write_weights(
    folder: Path,
    tensors: Sequence[StoredTensor],
    weights: ReadWeight,
    dtype: torch.dtype,
    bytes_per_file: int = BYTES_PER_FILE,
) -> None:
    """Write tensors into the files of a model, each made of the weights that it holds, and the index if there are
    several files. Raises as `weights` does, and OSError."""
    files = plan_files(tensors, dtype, bytes_per_file)
    parts = PartReader(weights)
    for name, group in files.items():
        write_safetensors(folder / name, group, lambda tensor: stored_form(tensor, parts), dtype)
    if len(files) > 1:
        file_of_key = {tensor.key: name for name, group in files.items() for tensor in group}
        index = {"metadata": {"total_size": weight_bytes(tensors, dtype)}, "weight_map": file_of_key}
        write_json(folder / INDEX_JSON, index)


class PartReader:
    """Reads the parts of tensors from weights. A weight of several parts, such as a stack, which has one for each
    expert, is kept until another is read."""

    def __init__(self, weights: ReadWeight) -> None:
        self.weights = weights
        self._kept: Tensor | None = None
        self._name = ""

    def read(self, part: StoredPart) -> Tensor:
        """Return a weight, or the matrix of an expert in it; of a vocabulary that was padded only the first rows.

        Raises CheckpointError if there is another number of experts, and the errors of the weights.
        """
        if not part.experts and part.groups == 1:
            self._kept = None
            weight = self.weights(part.name)
            is_padded = len(weight) > part.rows and rule_of(part.name).cut == "vocab"
            return weight[: part.rows] if is_padded else weight
        if self._kept is None or self._name != part.name:
            self._kept = None  # before the next one is read
            self._kept, self._name = self.weights(part.name), part.name
        if not part.experts:
            is_whole = len(self._kept) == part.rows * part.groups
            return self._kept[part.first_own_row :][: part.rows] if is_whole else self._kept
        if len(self._kept) != part.experts:
            raise CheckpointError(
                f"{part.name}: has {part.experts} experts by the config, {len(self._kept)} in the checkpoint: use "
                "the config of the checkpoint"
            )
        return self._kept[part.expert]


def stored_form(tensor: StoredTensor, reader: PartReader) -> Tensor:
    """Return a tensor as the file holds it, in the dtype of the weights that it is made of.

    Raises CheckpointError if the weights have other shapes than the config says, and the errors of the reader.
    """
    if len(tensor.parts) > 1:
        return _form_of_parts(tensor, reader)
    whole = reader.read(tensor.parts[0])
    if tensor.is_transposed:
        whole = whole.t()
    if tuple(size for size in tensor.shape if size > 1) == tuple(size for size in whole.shape if size > 1):
        whole = whole.reshape(tensor.shape)  # a convolution, or a row
    _check_shape(tensor, tensor.shape, whole)
    return whole


def _form_of_parts(tensor: StoredTensor, reader: PartReader) -> Tensor:
    """Return a tensor that holds several parameters, or the matrices, or the vectors, of all experts."""
    whole: Tensor | None = None
    for part in sorted(tensor.parts, key=lambda part: part.name):  # the reader keeps one weight
        matrix = reader.read(part)
        if matrix.dim() == 1:
            matrix = matrix.unsqueeze(1)
        if whole is None:
            whole = matrix.new_empty(tensor.shape)
        rows = slice(part.first_row, part.first_row + (part.rows - 1) * part.step + 1, part.step)
        place = whole.view(-1, tensor.columns)
        if tensor.is_transposed:
            columns = tensor.shape[-2]
            place = place[part.first_column : part.first_column + columns, rows].t()
        else:
            place = place[rows]
        _check_shape(tensor, place.shape, matrix)
        place.copy_(matrix)
    assert whole is not None
    return whole


def _check_shape(tensor: StoredTensor, expected: Sequence[int], found: Tensor) -> None:
    if tuple(found.shape) != tuple(expected):
        names = ", ".join(dict.fromkeys(part.name for part in tensor.parts))
        raise CheckpointError(
            f"{tensor.key}: is {tuple(expected)} by the config, {tuple(found.shape)} in the checkpoint ({names}): use "
            "the config of the checkpoint"
        )


def write_safetensors(
    path: Path, tensors: Sequence[StoredTensor], make: Callable[[StoredTensor], Tensor], dtype: torch.dtype
) -> None:
    """Write a new safetensors file and force it to disk. `make` returns each tensor when its turn comes.

    A tensor is rounded here, and nowhere else: to `dtype`, or to float32 if it is stored so in any model.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + _bytes_of(tensor, dtype)
        header[tensor.key] = {
            "dtype": SAFETENSORS_DTYPES[_dtype_of(tensor, dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % HEADER_MULTIPLE)
    with path.open("xb") as file:
        file.write(len(content).to_bytes(8, "little"))
        file.write(content)
        for tensor in tensors:
            data = make(tensor).detach().to(device="cpu", dtype=_dtype_of(tensor, dtype)).contiguous()
            file.write(data.flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def write_configs(folder: Path, model: Model, family: HubFamily, dtype: str, texts: TextFacts | None) -> None:
    """Write config.json and generation_config.json. texts: their begin and end ids; None: unknown.

    Raises NoFamily if the family's models cannot be like this one.
    """
    spellings = {"dtype": dtype, "torch_dtype": dtype}  # of transformers 5, and of 4
    padding = {
        "pad_token_id": None
    }  # else the default of the class: SmolLM3's may be over the vocabulary, and is refused then
    write_json(folder / CONFIG_JSON, write_config_json(model, family) | spellings | padding | _special_ids(texts))
    write_generation_config(folder, texts)


def write_generation_config(folder: Path, texts: TextFacts | None) -> None:
    """Write generation_config.json. texts: as in `write_configs`."""
    write_json(folder / GENERATION_JSON, {"_from_model_config": True, **_special_ids(texts)})


def _special_ids(texts: TextFacts | None) -> dict[str, int | list[int] | None]:
    if texts is None:
        return {"bos_token_id": None, END: None}
    return {"bos_token_id": texts.begin, END: texts.end}


def _dtype_of(tensor: StoredTensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in a file of a dtype."""
    return torch.float32 if tensor.is_float32 else dtype


def _bytes_of(tensor: StoredTensor, dtype: torch.dtype) -> int:
    return math.prod(tensor.shape) * _dtype_of(tensor, dtype).itemsize


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a new JSON file as transformers does, and force it to disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
