"""Corpora of very many, very small shards, and what opening one costs."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchllm.config import Source
from torchllm.data.corpus_header import FORMAT, CorpusHeader, corpus_fingerprint
from torchllm.data.shard import shard_path
from torchllm.tools.prepare.corpus_writer import ShardFileWriter, ShardTableWriter, SplitRecord, file_sums, write_header

TOKENS_PER_SHARD = 256
_DOCUMENTS_PER_SHARD = 4


def write_many_shards(folder: Path, shards: int) -> Source:
    """Write a corpus of bytes in `shards` shards; validation has the first of them only."""
    folder.mkdir(parents=True)
    size = TOKENS_PER_SHARD // _DOCUMENTS_PER_SHARD
    document = np.array([256, *np.random.default_rng(0).integers(97, 123, size=size - 2), 257], dtype=np.uint16)
    first = shard_path(folder, 0, "train")
    with first.open("wb") as file:
        writer = ShardFileWriter(file, "<u2")
        for _ in range(_DOCUMENTS_PER_SHARD):
            writer.add(document)
        writer.finish()
    content, sums = first.read_bytes(), file_sums(first)
    record = SplitRecord(writer.tokens, writer.documents, sums.sha256, sums.blocks)
    empty = SplitRecord(tokens=0, documents=0, sha256="", sums="")
    shard_path(folder, 0, "validation").write_bytes(content)
    table = ShardTableWriter()
    table.add({"train": record, "validation": record})
    for number in range(1, shards):
        shard_path(folder, number, "train").write_bytes(content)
        table.add({"train": record, "validation": empty})
    files = shards + 1
    write_description(
        folder,
        table,
        dtype="<u2",
        tokenizer="bytes",
        documents=_DOCUMENTS_PER_SHARD * files,
        tokens=TOKENS_PER_SHARD * files,
        text_bytes=(size - 2) * _DOCUMENTS_PER_SHARD * files,
        max_token=257,
        shards=shards,
    )
    return Source(kind="tokens", path=str(folder))


def write_description(folder: Path, table: ShardTableWriter, dtype: str, tokenizer: str, **counts: int) -> None:
    """Write the table of a corpus and its header. counts: fields of it."""
    table_sha256, sums_sha256 = table.write(folder)
    fields: dict[str, Any] = {"format": FORMAT, "key": "", "plan": {}, "skipped": {}, "max_token": 0, **counts}
    fields |= {"dtype": dtype, "tokenizer": tokenizer, "table_sha256": table_sha256, "sums_sha256": sums_sha256}
    write_header(folder, CorpusHeader(fingerprint=corpus_fingerprint(dtype, tokenizer, table_sha256), **fields))


class Calls(NamedTuple):
    """Calls to the file system since the counting began; the list grows with them."""

    opened: list[str]


@contextmanager
def counting(folder: Path) -> Iterator[Calls]:
    """Count the files in `folder` that this process opens."""
    calls = Calls([])
    inside = str(folder)
    counts = True

    def hook(event: str, arguments: tuple[object, ...]) -> None:  # hooks cannot be removed
        if counts and event == "open" and str(arguments[0]).startswith(inside):
            calls.opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    yield calls
    counts = False


def descriptors(folder: Path) -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith(str(folder))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return count
