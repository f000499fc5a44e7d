"""llm.c's token files: a header of 256 int32, then the ids.

Written by `write_datafile` of `dev/data/data_common.py` of karpathy/llm.c (commit f1e2ace) and read by
`llmc/dataloader.h`. The header is, little endian:

    [0] magic    20240520 (ids of GPT-2, uint16) or 20240801 (ids of Llama 3, uint32)
    [1] version  1 or 7
    [2] number of ids
    the rest is 0

`dev/data/fineweb.py` writes <|endoftext|> (50256), with Llama 3's tokenizer <|begin_of_text|> (128000), before each
document, and cuts a document at the end of a file. Here that token is taken as the end of the document before it, so
that the model is trained to write it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchllm.data.checked_file import CorpusFile
from torchllm.tools.prepare.formats.token_file import FlatIds, InPlaceSettings, TokenFormat, TokenShard, WrongFormat

_HEADER_BYTES = 256 * 4
_EVALUATION = 20240522
"""magic of a file with questions of a benchmark"""


class _Variant(NamedTuple):
    version: int
    dtype: str
    separator: int


_VARIANTS = {20240520: _Variant(1, "<u2", 50256), 20240801: _Variant(7, "<u4", 128000)}


def _variant_of(path: Path) -> _Variant:
    """Return which ids a file has. Raises WrongFormat if it has no header of llm.c."""
    header = np.fromfile(path, "<i4", 3)
    magic, version = (int(header[0]), int(header[1])) if len(header) == 3 else (0, 0)
    if magic == _EVALUATION:
        raise WrongFormat(path, "is an evaluation file of llm.c (magic 20240522), which has no text to train on")
    variant = _VARIANTS.get(magic)
    if variant is None:
        raise WrongFormat(
            path, f'is no token file of llm.c: its magic is {magic}; a file without a header is of kind "nanogpt"'
        )
    if version != variant.version:
        raise WrongFormat(path, f"has version {version}: of llm.c's magic {magic}, version {variant.version} is read")
    return variant


def _list_shards(path: Path, settings: InPlaceSettings) -> Sequence[TokenShard]:
    """Return the shard that a file is. Raises WrongFormat if it is not whole or not llm.c's."""
    variant = _variant_of(path)
    tokens = int(np.fromfile(path, "<i4", 3)[2])
    needed = _HEADER_BYTES + tokens * np.dtype(variant.dtype).itemsize
    size = path.stat().st_size
    if size != needed or tokens < 1:
        raise WrongFormat(path, f"has {size:,} bytes, but its header says {tokens:,} ids, which are {needed:,} bytes")
    return [TokenShard([CorpusFile(path, size)], tokens)]


def _open_shard(shard: TokenShard, settings: InPlaceSettings) -> FlatIds:
    variant = _variant_of(shard.files[0].path)
    separator = variant.separator if settings.separator < 0 else settings.separator
    return FlatIds(shard, variant.dtype, _HEADER_BYTES, separator)


LLMC = TokenFormat("*.bin", _list_shards, _open_shard)
