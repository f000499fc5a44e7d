"""The header of a .safetensors file: which tensors it holds, and where. No torch.

The file is 8 bytes (the length of the header, little endian), a header in JSON that gives dtype, shape and byte range
of each tensor, and the tensors without gaps. Nothing in it can be unpickled.

The library `safetensors` does not say where the bytes of a tensor begin, which a rank needs to read only its shards,
and it waits for ever on a FIFO.
"""

import hashlib
import json
import math
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.config.errors import UserError
from torchllm.config.files import open_regular, why_pointer

ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1}
"""dtypes that can be read -> bytes per element"""
LARGEST_HEADER = 16 << 20
"""bytes, some 170,000 tensors in one file; the safetensors library reads six times as much"""


class HubFileError(UserError):
    """A published model that cannot be read as it is. The message names file, tensor or key."""


class FileTensor(NamedTuple):
    file: str
    """name"""
    dtype: str
    """as safetensors names it: "BF16" """
    shape: tuple[int, ...]
    begin: int
    """of its bytes in the file"""
    end: int


class Header(NamedTuple):
    """The contents of a file by its header."""

    tensors: dict[str, FileTensor]
    """by key"""
    size: int
    """of the file, in bytes"""
    sha256: str
    """of the header"""


def read_header(path: Path) -> Header:
    """Return the header of a .safetensors file.

    Raises HubFileError if the file cannot be read, is cut short, or does not match its header.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if reason := why_pointer(path, size):
                raise HubFileError(f"{path}: {reason}")
            length = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))[0]
            if size < 8 or length > size - 8:
                raise HubFileError(f"{path}: is cut short, or no safetensors file: its header is not whole")
            if length > LARGEST_HEADER:
                raise HubFileError(f"{path}: its header has {length} bytes, over the {LARGEST_HEADER} of any model")
            content = file.read(length)
    except OSError as error:
        raise HubFileError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        table = json.loads(content)
        tensors = {}
        for key, entry in table.items():
            if key != "__metadata__":
                tensors[key] = _parse_entry(path.name, entry, 8 + length)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise HubFileError(f"{path}: is no safetensors file: its header is damaged") from error
    _check_places(path, tensors, 8 + length, size)
    return Header(tensors, size, hashlib.sha256(content).hexdigest())


def _parse_entry(file: str, entry: dict[str, Any], begin_of_data: int) -> FileTensor:
    """Return a tensor from its entry in a header. Raises ValueError, TypeError or KeyError if it is damaged."""
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError("numbers must be whole")
    return FileTensor(file, str(entry["dtype"]), shape, begin_of_data + begin, begin_of_data + end)


def _check_places(path: Path, tensors: dict[str, FileTensor], begin_of_data: int, size: int) -> None:
    """Raise HubFileError if the tensors do not lie one after the other to the end of the file."""
    place = begin_of_data
    for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        item_size = ITEM_SIZES.get(tensor.dtype)
        length = tensor.end - tensor.begin
        if tensor.begin != place or (item_size is not None and length != math.prod(tensor.shape) * item_size):
            raise HubFileError(f"{path}: {key}: the header is damaged: {length} bytes for {list(tensor.shape)}")
        place = tensor.end
        if place > size:
            raise HubFileError(f"{path}: {key}: is cut short: the file has {size} bytes, the tensor ends at {place}")
    if place != size:
        raise HubFileError(f"{path}: has {size} bytes, but its tensors end at {place}")
