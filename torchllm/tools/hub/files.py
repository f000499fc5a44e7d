"""The files of a published model, and whether they fit a run. No torch, and no tensor is read.

The weights are one file `model.safetensors`, or the files that an index names. Where both are there, the one file is
read, as transformers does. All that is wrong is found at once: a file that is missing or cut short, a tensor that is
missing, superfluous, of another shape or of a dtype that is no weight's.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.config import Model
from torchllm.config.files import open_regular, read_regular
from torchllm.tools.hub.config_json import ReadConfig, check_combination, read_config_json
from torchllm.tools.hub.families.family import HubFamily
from torchllm.tools.hub.quantization import FilePiece, Plain, Quantization
from torchllm.tools.hub.safetensors_header import FileTensor, Header, HubFileError, read_header

CONFIG_JSON = "config.json"
INDEX_JSON = "model.safetensors.index.json"
WHOLE_MODEL = "model.safetensors"
ADAPTER_JSON = "adapter_config.json"
HEAD = "lm_head.weight"
LISTED = 20
"""problems of tensors that an error lists at most"""
LISTED_PARTS = 6
"""of the tensors that are left out, that a note lists at most"""
BYTES_AT_A_TIME = 1 << 24
"""compared at once, of two tensors"""


class HubConfig(NamedTuple):
    """A config.json without faults."""

    path: Path
    read: ReadConfig
    sha256: str

    @property
    def family(self) -> HubFamily:
        assert self.read.family is not None  # else there would be a problem
        return self.read.family

    @property
    def model(self) -> Model:
        """The published model as [model]."""
        return Model(**self.read.values)

    def key_of(self, key: str) -> str | None:
        """Return the key that the family's table has for a key of a file; None if the tensor is left out."""
        of_text = key if self.read.text_part is None else self.read.text_part.key_of(key)
        if of_text is None or self.family.is_of_prediction_block(of_text, self.model.blocks):
            return None
        has_prefix = of_text.startswith(self.family.prefix) or of_text == HEAD
        return of_text if has_prefix else self.family.prefix + of_text


def read_hub_config(folder: Path) -> HubConfig:
    """Return the content of a folder's config.json. Raises HubFileError with all its faults, a line each.

    The path of a config.json itself is taken for its folder.
    """
    path = folder if folder.is_file() else folder / CONFIG_JSON
    content = _read(path)
    table = _parse_table(path, content)
    read = read_config_json(table)
    if not read.problems:
        check_combination(table, read)
    if read.problems:
        raise HubFileError("\n".join(f"{path}: {problem}" for problem in read.problems))
    config = HubConfig(path, read, hashlib.sha256(content).hexdigest())
    if config.model.mtp_depth and not _has_prediction_blocks(config):
        read.values["mtp_depth"] = 0
    return config


def _has_prediction_blocks(config: HubConfig) -> bool:
    """Return whether the weights have blocks that predict further tokens; transformers writes files without them.

    True if no weights can be read.
    """
    folder = config.path.parent
    try:
        places = _places(folder)
        keys = read_header(folder / WHOLE_MODEL).tensors if "" in places else places
    except HubFileError:
        return True
    return any(config.family.is_of_prediction_block(key, config.model.layers) for key in keys)


def _read(path: Path) -> bytes:
    """Return the content of a small file. Raises HubFileError."""
    try:
        return read_regular(path)
    except OSError as error:
        raise HubFileError(f"{path}: cannot be read: {error.strerror}") from error


def _parse_table(path: Path, content: bytes) -> dict[str, Any]:
    """Return the table that a JSON file holds. Raises HubFileError."""
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise HubFileError(f"{path}: is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise HubFileError(f"{path}: must hold a table")
    return table


@dataclass
class HubFiles:
    """The files with the weights of a published model."""

    folder: Path
    family: HubFamily
    """of the model, with the table of keys that these files follow"""
    quantization: Quantization = field(default_factory=Plain)
    headers: dict[str, Header] = field(default_factory=dict)
    """by name of the file"""
    tensors: dict[str, FileTensor] = field(default_factory=dict)
    """by key as the family's table has it: with its prefix, which some files lack"""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """parts of the files that are not read"""

    def record(self) -> dict[str, Any]:
        """Return a record of the files that a run has started from; its checkpoints store it."""
        return {
            name: {"size": header.size, "header_sha256": header.sha256} for name, header in sorted(self.headers.items())
        }


def find_hub_files(folder: Path, config: HubConfig) -> HubFiles:
    """Return the files with the weights, with all that is wrong with the index and the headers."""
    files = HubFiles(folder, config.family, config.read.quantization)
    try:
        places = _places(folder)
    except HubFileError as error:
        files.problems.append(str(error))
        return files
    if "" in places and (folder / INDEX_JSON).exists():
        files.notes.append(
            f"{folder / WHOLE_MODEL} is read, as transformers does; {INDEX_JSON} and the files that it names are not"
        )
    if (folder / ADAPTER_JSON).exists():
        files.problems.append(
            f"{folder}: holds {ADAPTER_JSON} next to the weights: transformers would read the model that the adapter "
            "names, and add it; move the adapter away to read these weights"
        )
    for name in sorted(set(places.values())):
        try:
            files.headers[name] = read_header(folder / name)
        except HubFileError as error:
            files.problems.append(str(error))
    left_out: list[str] = []
    for name, header in files.headers.items():
        left_out += _collect_tensors(files, config, name, header, places)
    if left_out:
        files.notes.append(f"{folder}: {_said_of_left_out(left_out)}")
    files.family = config.family.with_table_of(files.tensors)
    for key, name in places.items():
        if key and name in files.headers and key not in files.headers[name].tensors:
            files.problems.append(f"{folder / name}: {key}: is missing, but {INDEX_JSON} says that it is there")
    return files


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files with the weights. Raises HubFileError if there are none, or the index is wrong."""
    return sorted(set(_places(folder).values()))


def _places(folder: Path) -> dict[str, str]:
    """Return the file of each key in the index; a single file has the key ""."""
    path = folder / INDEX_JSON
    if (folder / WHOLE_MODEL).exists():
        return {"": WHOLE_MODEL}
    if not path.exists():
        raise HubFileError(f"{folder}: holds neither {INDEX_JSON} nor {WHOLE_MODEL}{_what_is_there(folder)}")
    places = _parse_table(path, _read(path)).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise HubFileError(f"{path}: weight_map: must be a table of file names")
    for key, name in places.items():
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise HubFileError(f"{path}: weight_map: {key}: {name!r} is not the plain name of a .safetensors file")
    return places


def _what_is_there(folder: Path) -> str:
    """Return the part of a message on other files in a folder without the right ones."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return (
            "; its .bin files are pickles, which can run code when they are read, and are refused: convert them with "
            "transformers' save_pretrained"
        )
    if ADAPTER_JSON in names:
        return "; it is an adapter: name the model that it belongs to"
    tensors = [name for name in names if name.endswith(".safetensors")]
    return f", but {', '.join(tensors)}" if tensors else ""


def _collect_tensors(
    files: HubFiles, config: HubConfig, name: str, header: Header, places: dict[str, str]
) -> Iterator[str]:
    """Add the tensors of one file, by the keys of the family's table; yield the keys of those that are left out."""
    for key, tensor in header.tensors.items():
        if "" not in places and places.get(key) != name:
            files.problems.append(f"{files.folder / name}: {key}: is not in {INDEX_JSON}")
            continue
        full_key = config.key_of(key)
        if full_key is None:
            yield key
            continue
        if full_key in files.tensors:
            files.problems.append(f"{files.folder / name}: {key}: is in {files.tensors[full_key].file} too")
        files.tensors[full_key] = tensor


def _said_of_left_out(keys: Sequence[str]) -> str:
    """Return how many tensors are not read, and their parts: "model.vision_tower", "model.layers.61"."""
    parts = Counter(re.sub(r"((?:model\.)?(?:layers\.)?[^.]+)\..*", r"\1", key) for key in keys)
    listed = ", ".join(f"{part} ({count})" for part, count in parts.most_common(LISTED_PARTS))
    more = f", and {len(parts) - LISTED_PARTS} parts more" if len(parts) > LISTED_PARTS else ""
    return f"{len(keys)} tensors are not read, because the model here has no such part: {listed}{more}"


def check_tensors(files: HubFiles, config: HubConfig, model: Model, *, is_tying_chosen: bool) -> list[str]:
    """Return the faults of the tensors of a published model for a run with `model`, a line each.

    `model` may have more rows of the embedding. is_tying_chosen: the run's own config says whether embeddings are tied.
    """
    family = files.family
    problems = list(files.problems)
    if problems:  # the set of missing tensors is not known then
        return problems
    expected = set()
    stored_model = replace(config.model, tied_embeddings=model.tied_embeddings, mtp_depth=model.mtp_depth)
    for stored in family.stored_tensors(stored_model):
        for piece in files.quantization.storage_of(stored, files.tensors).pieces:
            expected.add(piece.key)
            problems += _check_piece(files, piece)
    for key, tensor in files.tensors.items():
        is_unused = family.ignores(key) or family.is_of_prediction_block(key, stored_model.blocks)
        if key not in expected and key != HEAD and not is_unused:
            problems.append(f"{files.folder / tensor.file}: {key}: no part of a model of type {family.model_type!r}")
    if model.tied_embeddings and not is_tying_chosen and not problems:
        problems += _check_superfluous_head(files, family, stored_model)
    if len(problems) > LISTED:
        problems[LISTED:] = [f"and {len(problems) - LISTED} problems of other tensors"]
    return problems


def _check_piece(files: HubFiles, piece: FilePiece) -> Iterator[str]:
    """Yield the faults of a tensor of the files."""
    if piece.key not in files.tensors:
        yield f"{files.folder}: {piece.key}: is missing; it must be {list(piece.shape)}"
        return
    tensor = files.tensors[piece.key]
    place = f"{files.folder / tensor.file}: {piece.key}"
    if tensor.shape != piece.shape:
        yield f"{place}: is {list(tensor.shape)}, but by {CONFIG_JSON} it must be {list(piece.shape)}"
    if tensor.dtype not in piece.dtypes:
        yield f"{place}: is {tensor.dtype}; weights can be read that are {', '.join(piece.dtypes)}"


def _check_superfluous_head(files: HubFiles, family: HubFamily, model: Model) -> Iterator[str]:
    """Yield the fault of a head in the file of a model with tied embeddings."""
    embedding = next(iter(family.stored_tensors(model))).key
    head = files.tensors.get(HEAD)
    if head is not None and not _are_equal(files.folder, files.tensors[embedding], head):
        yield (
            f"{files.folder / head.file}: {HEAD}: differs from {embedding}, but {CONFIG_JSON} says that they are tied; "
            "transformers 4 uses one tensor for both, transformers 5 uses both: set model.tied_embeddings = true for "
            "the one, false for the other"
        )


def _are_equal(folder: Path, first: FileTensor, second: FileTensor) -> bool:
    """Return whether two tensors have the same bytes, dtype and shape."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    one_file, two_file = open_regular(folder / first.file), open_regular(folder / second.file)
    with os.fdopen(one_file, "rb") as one, os.fdopen(two_file, "rb") as two:
        one.seek(first.begin)
        two.seek(second.begin)
        remaining = first.end - first.begin
        while remaining:
            length = min(remaining, BYTES_AT_A_TIME)
            if one.read(length) != two.read(length):
                return False
            remaining -= length
    return True
