"""Tokenized corpora: their format on disk, and how they are read.

A corpus is a folder. It holds `corpus.json`, written last and only if everything else is complete, and per shard and
split two files: a `.bin` (token ids, uint16 or uint32, little endian: documents one after another, each <begin> tokens
<end>) and a `.begins` (int64: where each document begins in the .bin). The shards of a split, in order, are one stream
of tokens, and sequence i of length S is stream[i S : i S + S + 1]. Files are memory-mapped: opening takes O(shards),
and what the ranks and workers of a machine read is in memory once.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from torchllm.data.error import DataError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")
HEADER = "corpus.json"
FORMAT = 1
"""version of the format on disk"""

Ids = npt.NDArray[np.unsignedinteger[Any]]
Begins = npt.NDArray[np.int64]


class Window(NamedTuple):
    """A part of a token stream: a training sequence of S tokens and the token that follows it."""

    ids: Ids
    """(S + 1,)"""
    begins: Begins
    """indices in `ids` at which a document begins, ascending"""


class SequenceSource(Protocol):
    """Where training sequences come from."""

    fingerprint: str
    """changes if any sequence does"""

    def count(self, split: Split, length: int) -> int:
        """Return how many sequences of `length` tokens (and the token that follows) there are."""

    def window(self, split: Split, number: int, length: int) -> Window:
        """Return sequence `number` of `length` tokens and the token that follows it."""


def shard_file(folder: Path, number: int, split: Split, suffix: str) -> Path:
    """Return the path of one file of a shard; the suffix is "bin" or "begins"."""
    return folder / f"{number:05d}.{split}.{suffix}"


def corpus_fingerprint(header: dict[str, Any]) -> str:
    """Return a hash of a corpus: its tokens, their order, splits and document boundaries, but not its folder."""
    content = [header["dtype"], header["tokenizer"], [shard["files"] for shard in header["shards"]]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class _Shard(NamedTuple):
    """The memory-mapped files of one shard and split."""

    ids: Ids
    begins: Begins


class Corpus:
    """An open corpus folder; `header` is the content of its corpus.json."""

    def __init__(self, folder: str | Path) -> None:
        """Open a folder. Raises DataError if the corpus is missing, incomplete or damaged."""
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
        if self.fingerprint != corpus_fingerprint(self.header):
            raise DataError(f"{path} was changed after it was written: prepare the corpus again")
        self._shards: dict[Split, list[_Shard]] = {}
        self._starts: dict[Split, npt.NDArray[np.int64]] = {}
        """index in the stream at which each shard starts, and the length of the stream"""
        for split in SPLITS:
            shards = self._open(split)
            self._shards[split] = shards
            self._starts[split] = np.cumsum([0] + [len(shard.ids) for shard in shards])

    def __reduce__(self) -> tuple[Callable[[Path], "Corpus"], tuple[Path]]:
        return Corpus, (self.folder,)  # a pickled memory map would be a copy of the whole file

    def _open(self, split: Split) -> list[_Shard]:
        shards = []
        for number in range(len(self.header["shards"])):
            ids = self._map(number, split, "bin", self.header["dtype"])
            begins = self._map(number, split, "begins", "<i8")
            shards.append(_Shard(ids, begins))
        return shards

    def _map(self, number: int, split: Split, suffix: str, dtype: str) -> npt.NDArray[Any]:
        """Map a file of a shard. DataError if it is missing or has another size than the header says."""
        path = shard_file(self.folder, number, split, suffix)
        stated: int = self.header["shards"][number]["files"][path.name]["bytes"]
        if not path.is_file():
            raise DataError(f"{path} is missing: copy or prepare the corpus again")
        size = path.stat().st_size
        if size != stated:
            raise DataError(
                f"{path} is {size:,} bytes, {HEADER} says {stated:,} bytes: copy or prepare the corpus again"
            )
        if stated == 0:
            return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
        return np.memmap(path, dtype=dtype, mode="r")

    def tokens(self, split: Split) -> int:
        """Return the number of tokens in a split."""
        return int(self._starts[split][-1])

    def count(self, split: Split, length: int) -> int:
        """Return how many sequences of `length` tokens (and the token that follows) a split has."""
        return max(0, self.tokens(split) - 1) // length

    def window(self, split: Split, number: int, length: int) -> Window:
        """Return sequence `number` of `length` tokens and the token that follows it; it may cross shards."""
        starts = self._starts[split]
        first = number * length
        end = first + length + 1
        ids, begins = [], []
        index = int(np.searchsorted(starts, first, side="right")) - 1
        while index < len(starts) - 1 and starts[index] < end:
            offset = int(starts[index])
            shard = self._shards[split][index]
            ids.append(shard.ids[max(0, first - offset) : end - offset])
            low, high = np.searchsorted(shard.begins, [first - offset, end - offset])
            begins.append(shard.begins[low:high] + (offset - first))
            index += 1
        return Window(np.concatenate(ids), np.concatenate(begins))


class Synthetic:
    """Uniformly random tokens 0 <= id < vocab, each sequence one document: for benchmarks. Needs no file."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.fingerprint = f"synthetic-{vocab}"

    def count(self, split: Split, length: int) -> int:
        """Return a number that no run reaches."""
        return 2**40

    def window(self, split: Split, number: int, length: int) -> Window:
        """Return sequence `number`: always the same tokens for the same split, number and length."""
        random = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), number]))
        ids = random.integers(self.vocab, size=length + 1, dtype=np.uint32)
        return Window(ids, np.zeros(1, dtype=np.int64))
