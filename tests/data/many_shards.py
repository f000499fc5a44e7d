"""Corpora of very many, very small shards: what opening one costs, and a run on one under a low limit of descriptors.

python -m tests.data.many_shards             # counts at 100 ... 100,000 shards
python -m tests.data.many_shards --train     # debug.toml on 20,000 shards: 2 ranks, 2 workers, ulimit -n 1024
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from tests.tiny_run import DEBUG, ROOT, curve
from torchllm.config import Source
from torchllm.data.checked_file import file_sums
from torchllm.data.corpus import Corpus
from torchllm.data.corpus_header import (
    FORMAT,
    CorpusHeader,
    ShardTableWriter,
    SplitRecord,
    corpus_fingerprint,
    write_header,
)
from torchllm.data.shard import ShardFileWriter, shard_path

TOKENS_PER_SHARD = 256
_DOCUMENTS_PER_SHARD = 4
_LIMIT = 1024
"""descriptors of a process, as most systems set it"""


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
    empty = SplitRecord(tokens=0, documents=0, sha256="", sums=[])
    shard_path(folder, 0, "validation").write_bytes(content)
    table = ShardTableWriter()
    table.add({"train": record, "validation": record})
    for number in range(1, shards):
        shard_path(folder, number, "train").write_bytes(content)
        table.add({"train": record, "validation": empty})
    table_sums = table.write(folder)
    header = CorpusHeader(
        format=FORMAT,
        key="",
        plan={},
        dtype="<u2",
        tokenizer="bytes",
        documents=_DOCUMENTS_PER_SHARD * (shards + 1),
        tokens=TOKENS_PER_SHARD * (shards + 1),
        text_bytes=(size - 2) * _DOCUMENTS_PER_SHARD * (shards + 1),
        max_token=257,
        skipped={},
        shards=shards,
        fingerprint=corpus_fingerprint("<u2", "bytes", table_sums.table),
        table_sha256=table_sums.table,
        sums_sha256=table_sums.sums,
    )
    write_header(folder, header)
    return Source(kind="tokens", path=str(folder))


class Calls(NamedTuple):
    """Calls to the file system since the counting began; the lists grow with them."""

    opened: list[str]
    asked_for_size: list[str]


@contextmanager
def counting(folder: Path) -> Iterator[Calls]:
    """Count the files in `folder` that this process opens, or asks the size of."""
    calls = Calls([], [])
    inside = str(folder)
    counts = True

    def hook(event: str, arguments: tuple[object, ...]) -> None:  # hooks cannot be removed
        if counts and event == "open" and str(arguments[0]).startswith(inside):
            calls.opened.append(str(arguments[0]))

    original = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(inside):
            calls.asked_for_size.append(str(path))
        return original(path, *arguments, **options)

    sys.addaudithook(hook)
    with mock.patch.object(os, "stat", stat):
        yield calls
    counts = False


def descriptors(folder: Path) -> int:
    """Return how many descriptors of this process are of files in `folder`."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith(str(folder))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return count


class OpeningCost(NamedTuple):
    """What it costs a process to open a corpus and read 100 random sequences of it."""

    shards: int
    header_bytes: int
    """size of corpus.json"""
    read_bytes: int
    """read to open the corpus"""
    seconds: float
    resident_mib: float
    """that the process grew by"""
    opened_by_opening: int
    opened_by_reading: int
    """by reading 100 random sequences"""
    descriptors: int
    """held after that"""
    stats_of_check: int
    """by the one process per node that checks the sizes"""


def opening_cost(folder: Path) -> OpeningCost:
    """Open the corpus in `folder` in this process and count."""
    with counting(folder) as calls:
        resident, read = _resident_bytes(), _bytes_read()
        start = time.perf_counter()
        corpus = Corpus(folder)
        seconds = time.perf_counter() - start
        read, resident = _bytes_read() - read, _resident_bytes() - resident
        opened_by_opening = len(calls.opened)
        for number in np.random.default_rng(0).integers(corpus.count("train", 300), size=100):
            corpus.window("train", int(number), 300)
        opened_by_reading = len(calls.opened) - opened_by_opening
        held = descriptors(folder)
        corpus.check()
    return OpeningCost(
        shards=corpus.header.shards,
        header_bytes=(folder / "corpus.json").stat().st_size,
        read_bytes=read,
        seconds=seconds,
        resident_mib=resident / 2**20,
        opened_by_opening=opened_by_opening,
        opened_by_reading=opened_by_reading,
        descriptors=held,
        stats_of_check=len(calls.asked_for_size),
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _bytes_read() -> int:
    """Return the bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if "--train" in sys.argv:
            _train(Path(folder))
        elif "--open" in sys.argv:
            print(json.dumps(opening_cost(Path(sys.argv[-1]))._asdict()))
        else:
            print(" | ".join(OpeningCost._fields))
            for shards in (100, 1000, 10_000, 100_000):
                write_many_shards(Path(folder) / str(shards), shards)
                _print_cost(Path(folder) / str(shards))


def _print_cost(folder: Path) -> None:
    """Print the cost of opening a corpus in a new process."""
    command = [sys.executable, "-m", "tests.data.many_shards", "--open", str(folder)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    print(" | ".join(f"{value:.4g}" for value in json.loads(done.stdout).values()))


def _train(folder: Path) -> None:
    """Run debug.toml on 20,000 shards."""
    source = write_many_shards(folder / "corpus", 20_000)
    settings = [
        "--data.sources.0.kind=tokens",
        f"--data.sources.0.path={source.path}",
        "--data.workers=2",
        "--training.steps=20",
        f"--run.folder={folder / 'run'}",
    ]
    environment = os.environ | {"NPROC": "2"}
    limit = (_LIMIT, _LIMIT)
    subprocess.run(
        ["./run_train.sh", DEBUG, *settings],
        cwd=ROOT,
        env=environment,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
    )
    print(f"trained {len(curve(folder / 'run'))} logged steps on 20,000 shards with {_LIMIT:,} descriptors per process")


if __name__ == "__main__":
    main()
