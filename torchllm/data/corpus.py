"""Tokenized corpora: how they lie on disk, and reading them.

A corpus is a folder: `corpus.json`, written last and only when everything else is there, and per shard and split a
`.bin` (token ids, uint16 or uint32, little endian: documents one after another, each <begin> tokens <end>) and a
`.begins` (int64: where each document begins in the .bin). The shards of a split in order are one stream of tokens, and
sequence i of length S is stream[i S : i S + S + 1]. Files are memory-mapped: opening is O(shards), and what ranks and
workers of a machine read is in memory once.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from torchllm.data.error import DataError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")
HEADER = "corpus.json"
FORMAT = 1

Ids = npt.NDArray[np.unsignedinteger[Any]]
Begins = npt.NDArray[np.int64]


class Sequences(Protocol):
    """Where training sequences come from."""

    fingerprint: str
    """changes when any sequence does"""

    def count(self, split: Split, length: int) -> int:
        """Sequences of `length` tokens (and one more, the last target)."""

    def window(self, split: Split, number: int, length: int) -> tuple[Ids, Begins]:
        """The (length + 1) ids of a sequence, and the places among them at which a document begins."""


def shard_file(folder: Path, number: int, split: Split, suffix: str) -> Path:
    """The path of one file of a shard; suffix "bin" or "begins"."""
    return folder / f"{number:05d}.{split}.{suffix}"


def fingerprint_of(header: dict[str, Any]) -> str:
    """A hash of all that a corpus says: its tokens, their order, split and document boundaries; not where it lies."""
    said = [header["dtype"], header["tokenizer"], [shard["files"] for shard in header["shards"]]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


class Corpus:
    """An open corpus folder; `header` is its corpus.json. DataError when it is missing, incomplete or damaged."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        path = self.folder / HEADER
        try:
            self.header: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise DataError(
                f"{self.folder} holds no token shards: there is no {HEADER} (recipes/prepare.py writes it last; "
                "if it was stopped, run it again)"
            ) from None
        except ValueError as error:
            raise DataError(f"{path} is damaged ({error}): prepare the corpus again") from error
        if self.header.get("format") != FORMAT:
            raise DataError(f"{path}: format {self.header.get('format')!r} is not {FORMAT}: prepare the corpus again")
        self.fingerprint: str = self.header["fingerprint"]
        if self.fingerprint != fingerprint_of(self.header):
            raise DataError(f"{path} was changed after it was written: prepare the corpus again")
        self._shards = {split: self._open(split) for split in SPLITS}
        self._starts = {
            split: np.cumsum([0] + [len(tokens) for tokens, _ in shards]) for split, shards in self._shards.items()
        }

    def __reduce__(self) -> tuple[Callable[[Path], "Corpus"], tuple[Path]]:
        return Corpus, (self.folder,)  # a pickled memory map would be a copy of the whole file

    def _open(self, split: Split) -> list[tuple[Ids, Begins]]:
        return [
            (self._map(number, split, "bin", self.header["dtype"]), self._map(number, split, "begins", "<i8"))
            for number in range(len(self.header["shards"]))
        ]

    def _map(self, number: int, split: Split, suffix: str, dtype: str) -> npt.NDArray[Any]:
        path = shard_file(self.folder, number, split, suffix)
        stated: int = self.header["shards"][number]["files"][path.name]["bytes"]
        if not path.is_file() or path.stat().st_size != stated:
            there = f"{path.stat().st_size:,} bytes" if path.is_file() else "missing"
            raise DataError(f"{path} is {there}, {HEADER} says {stated:,} bytes: copy or prepare the corpus again")
        return np.memmap(path, dtype=dtype, mode="r") if stated else np.empty(0, dtype=dtype)

    def tokens(self, split: Split) -> int:
        """Tokens of a split."""
        return int(self._starts[split][-1])

    def count(self, split: Split, length: int) -> int:
        return max(0, self.tokens(split) - 1) // length

    def window(self, split: Split, number: int, length: int) -> tuple[Ids, Begins]:
        starts, first = self._starts[split], number * length
        last = first + length + 1
        ids, begins = [], []
        shard = int(np.searchsorted(starts, first, side="right")) - 1
        while shard < len(starts) - 1 and starts[shard] < last:  # mostly one; a window may cross shards
            offset = int(starts[shard])
            tokens, documents = self._shards[split][shard]
            ids.append(tokens[max(0, first - offset) : last - offset])
            low, high = np.searchsorted(documents, [first - offset, last - offset])
            begins.append(documents[low:high] + (offset - first))
            shard += 1
        return np.concatenate(ids), np.concatenate(begins)


class Synthetic:
    """Uniformly random tokens 0 <= id < vocab, each sequence one document: for benchmarks. Needs no file."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.fingerprint = f"synthetic-{vocab}"

    def count(self, split: Split, length: int) -> int:
        return 2**40

    def window(self, split: Split, number: int, length: int) -> tuple[Ids, Begins]:
        random = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), number]))
        return random.integers(self.vocab, size=length + 1, dtype=np.uint32), np.zeros(1, dtype=np.int64)
