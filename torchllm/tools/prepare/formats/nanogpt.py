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
from torchllm.data.shard import Ids
from torchllm.tools.prepare.formats.token_file import FlatIds, InPlaceSettings, TokenFormat, TokenShard, WrongFormat

_BLOCKS, _BLOCK = 64, 2**12
"""blocks of a file, and ids of a block, that decide whether its type is the one that the config says"""
_DOUBLE = {2: "uint32", 4: "int64"}
"""bytes of an id -> the type of twice the bytes"""

_HEADERS = {
    b"\x93NUMPY": "is of numpy.save, whose header is no ids: write the ids alone, numpy.load(FILE).tofile(NAME.bin)",
    struct.pack("<2i", 20240520, 1): 'has a header of llm.c: set kind = "llmc"',
    struct.pack("<2i", 20240801, 7): 'has a header of llm.c: set kind = "llmc"',
    b"MMIDIDX": 'is an index of Megatron-LM: set kind = "megatron"',
    b"PK\x03\x04": "is a zip archive, as numpy.savez and torch.save write: write the ids alone, array.tofile(NAME.bin)",
}
"""first bytes of files that hold more than ids -> advice"""


def _refuse(path: Path, settings: InPlaceSettings, vocab: int) -> None:
    """Raise WrongFormat if a file begins with more than ids, or its ids have twice the bits of data.dtype.

    In the latter case every second id is the upper half of one, at most the upper half of the vocabulary's last id.
    """
    with path.open("rb") as file:
        head = file.read(8)
    for begin, advice in _HEADERS.items():
        if head.startswith(begin):
            raise WrongFormat(path, advice)
    ids = _sampled_ids(path, settings)
    if ids.itemsize not in _DOUBLE or len(ids) < 2:
        return
    bits = 8 * ids.itemsize
    largest = (vocab - 1) >> bits
    lower = ids[::2]
    upper = ids[1::2]
    if upper.max() <= largest < lower.max():
        advice = f'so its ids have twice as many: set data.dtype = "{_DOUBLE[ids.itemsize]}"'
        raise WrongFormat(path, f"has at most {largest} in every second id of {bits} bits, {advice}")


def _sampled_ids(path: Path, settings: InPlaceSettings) -> Ids:
    """Return the ids of blocks of a file, at even distances; each block begins at an even place."""
    (shard,) = _list_shards(path, settings)
    last_begin = max(0, shard.tokens - _BLOCK)
    begins = np.linspace(0, last_begin, _BLOCKS).astype(int)
    even_begins = np.unique(begins // 2 * 2)
    opened = _open_shard(shard, settings)
    blocks = []
    for begin in even_begins.tolist():
        end = min(begin + _BLOCK, shard.tokens)
        blocks.append(opened.read_ids(begin, end))
    opened.close()
    return np.concatenate(blocks)


def _list_shards(path: Path, settings: InPlaceSettings) -> Sequence[TokenShard]:
    """Return the shard that a file is. Raises WrongFormat if it does not have the ids of data.dtype."""
    size = path.stat().st_size
    id_bytes = np.dtype(settings.dtype).itemsize
    if size == 0 or size % id_bytes:
        raise WrongFormat(path, f"has {size:,} bytes, no whole number of ids of data.dtype {settings.dtype!r}")
    return [TokenShard([CorpusFile(path, size)], size // id_bytes)]


def _open_shard(shard: TokenShard, settings: InPlaceSettings) -> FlatIds:
    return FlatIds(shard, settings.dtype, 0, settings.separator)


NANOGPT = TokenFormat("*.bin", _list_shards, _open_shard, _refuse)
