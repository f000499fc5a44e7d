"""Random tokens, for benchmarks: the source of kind "synthetic"."""

import numpy as np

from torchllm.data.corpus import Window
from torchllm.data.shard import SPLITS, Split


class Synthetic:
    """Uniformly random tokens 0 <= id < vocab, each sequence one document: for benchmarks. Needs no file."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.fingerprint = f"synthetic-{vocab}"

    def count(self, split: Split, length: int) -> int:
        """Return a number larger than any run needs."""
        return 2**40

    def describe(self) -> str:
        return "random tokens"

    def window(self, split: Split, number: int, length: int, piece: range | None = None) -> Window:
        """Return sequence `number` or a piece of it: always the same tokens for the same split, number and length."""
        piece = piece or range(length)
        random = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), number]))
        size = max(length, piece.stop) + 1  # the first ones do not depend on it
        ids = random.integers(self.vocab, size=size, dtype=np.uint32)[piece.start : piece.stop + 1]
        begins = np.zeros(1 if piece.start == 0 else 0, dtype=np.int64)
        return Window(ids, begins, position=piece.start)
