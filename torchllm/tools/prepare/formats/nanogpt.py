"""nanoGPT's token files: ids one after another, without a header.

Written by `data/openwebtext/prepare.py` of karpathy/nanoGPT (commit 3adf61e): a memory map of uint16 with the ids of
GPT-2, <|endoftext|> (50256) after each document. Many programs write such files, with other types and tokenizers, so
both are said by the config (data.dtype, data.separator).
"""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchllm.data.checked_file import CorpusFile
from torchllm.tools.prepare.formats.token_file import FlatIds, InPlaceSettings, TokenFormat, TokenShard, WrongFormat

_LOOKED_AT = 2**12
"""ids that decide whether the type of a file is the one that the config says"""


_HEADERS = {
    b"\x93NUMPY": "is of numpy.save, whose header is no ids: write the ids alone, numpy.load(FILE).tofile(NAME.bin)",
    struct.pack("<2i", 20240520, 1): 'has a header of llm.c: set kind = "llmc"',
    struct.pack("<2i", 20240801, 7): 'has a header of llm.c: set kind = "llmc"',
    b"MMIDIDX": 'is an index of Megatron-LM: set kind = "megatron"',
    b"PK\x03\x04": "is a zip archive, as numpy.savez and torch.save write: write the ids alone, array.tofile(NAME.bin)",
}
"""first bytes of files that hold more than ids -> advice"""


def _refuse_header(path: Path) -> None:
    """Raise WrongFormat if a file begins with more than ids."""
    with path.open("rb") as file:
        head = file.read(8)
    for begin, advice in _HEADERS.items():
        if head.startswith(begin):
            raise WrongFormat(path, advice)


def _list_shards(path: Path, settings: InPlaceSettings) -> Sequence[TokenShard]:
    """Return the shard that a file is. Raises WrongFormat if it does not have the ids of data.dtype."""
    size = path.stat().st_size
    id_bytes = np.dtype(settings.dtype).itemsize
    if size == 0 or size % id_bytes:
        raise WrongFormat(path, f"has {size:,} bytes, no whole number of ids of data.dtype {settings.dtype!r}")
    shard = TokenShard([CorpusFile(path, size)], size // id_bytes)
    if id_bytes == 2:
        opened = _open_shard(shard, settings)
        ids = opened.read_ids(0, min(shard.tokens, _LOOKED_AT))
        opened.close()
        if len(ids) > 1 and ids.any() and not ids[1::2].any():
            raise WrongFormat(path, 'has 0 in every second id of 16 bits: its ids have 32, set data.dtype = "uint32"')
    return [shard]


def _open_shard(shard: TokenShard, settings: InPlaceSettings) -> FlatIds:
    """Open a file."""
    return FlatIds(shard, settings.dtype, 0, settings.separator)


NANOGPT = TokenFormat("*.bin", _list_shards, _open_shard, _refuse_header)
