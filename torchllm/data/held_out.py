"""The sequences that evaluations read: never trained on, and the same for every seed and layout.

They come from `data.validation` or, without it, from the held-out part of each of `data.sources`. A batch holds
sequences of one source, so that an evaluation also has the loss of each source.
"""

import heapq
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import PurePath
from typing import NamedTuple

import torch

from torchllm.config import IN_PLACE_KINDS, Data, Source, Training
from torchllm.data.batch import Batch
from torchllm.data.corpus import SequenceSource
from torchllm.data.order import DataOrder, Location, Mixture
from torchllm.data.packing import IGNORED, DataRanks
from torchllm.data.readers import name_source
from torchllm.data.sequence_reader import SequenceReader
from torchllm.data.shard import SPLITS, Split
from torchllm.data.tokenizer import load_tokenizer
from torchllm.runtime.signs_of_life import show_progress


class HeldOutPart(NamedTuple):
    """A split of a source that is evaluated on."""

    source: int
    split: Split
    sequences: int
    weight: float
    """share of the sequences, relative to the other parts"""


class HeldOut:
    """Reads this rank's share of the held-out sequences."""

    def __init__(
        self,
        sources: Sequence[SequenceSource],
        data: Data,
        training: Training,
        ranks: DataRanks,
        reader: SequenceReader,
    ) -> None:
        """sources: opened, of data.validation if there is any, else of data.sources. reader: reads them."""
        self.data = data
        self.batch_size = training.micro_batch_size
        self.ranks = ranks
        self.reader = reader
        self.tables = data.validation or data.sources
        self.names = names_of_sources(self.tables)
        self.parts: list[HeldOutPart] = []
        for index, (table, source) in enumerate(zip(self.tables, sources, strict=True)):
            splits: Sequence[Split] = SPLITS if data.validation else ("validation",)
            counts = {split: source.count(split, training.sequence_length) for split in splits}
            for split, count in counts.items():
                if count:
                    self.parts.append(HeldOutPart(index, split, count, table.weight * count / sum(counts.values())))
        self._first: list[Location] = []
        """cache of the first sequences, which never change; grows with the requests of evaluations"""
        self._byte_lengths: torch.Tensor | None = None
        """bytes of each id, on the device of the batches; None: not needed so far, or there is no text"""

    @property
    def sequences(self) -> int:
        return sum(part.sequences for part in self.parts)

    def describe(self) -> list[str]:
        """Return a line per source of data.validation."""
        lines = []
        for index, source in enumerate(self.data.validation):
            sequences = sum(part.sequences for part in self.parts if part.source == index)
            lines.append(f"{name_source(f'data.validation.{index}', source)}: {sequences:,} sequences to evaluate on")
        return lines

    def first(self, count: int) -> list[Location]:
        """Return the first `count` sequences, mixed by weight; `Location.source` is an index of `parts`."""
        if count > len(self._first):
            sizes = [part.sequences for part in self.parts]
            weights = [part.weight for part in self.parts]
            self._first = first_epoch(DataOrder("validation", sizes, weights), sizes, weights, count)
        return self._first[:count]

    def batches(self, count: int, device: torch.device) -> Iterator[Batch]:
        """Yield this rank's share of the first `count` sequences, source by source.

        Every rank gets the same number of batches, so that all take part in each collective: the last batches of a part
        are filled up with ignored labels.
        """
        read = 0
        by_part = sorted(self.first(count), key=lambda location: location.source)
        for index, group in groupby(by_part, key=lambda location: location.source):
            part = self.parts[index]
            locations = [location._replace(source=part.source) for location in group]
            for batch_of_rank_0 in range(0, len(locations), self.batch_size * self.ranks.size):
                start = batch_of_rank_0 + self.ranks.rank * self.batch_size
                share = locations[start : start + self.batch_size]
                show_progress(f"{read + batch_of_rank_0:,} of {count:,} sequences".format)
                yield self._batch(part, share, padding=locations[:1] * (self.batch_size - len(share)), device=device)
            read += len(locations)

    def _batch(self, part: HeldOutPart, share: list[Location], padding: list[Location], device: torch.device) -> Batch:
        values = torch.from_numpy(self.reader.read(part.split, share + padding))
        (batch,) = self.reader.packed_batches(values, 1, self.batch_size).unpack(device)
        batch.labels[len(share) :] = IGNORED
        label_bytes = self._bytes_of(batch.labels, self.tables[part.source].kind)
        return batch._replace(label_bytes=label_bytes, source=self.names[part.source])

    def _bytes_of(self, labels: torch.Tensor, kind: str) -> torch.Tensor | None:
        """Return `Batch.label_bytes`; None without text, or with ids of a tokenizer that the config does not name."""
        if kind == "synthetic" or (kind in IN_PLACE_KINDS and self.data.tokenizer == "bytes"):
            return None
        if self._byte_lengths is None:
            self._byte_lengths = torch.from_numpy(load_tokenizer(self.data.tokenizer).byte_lengths).to(labels.device)
        known = labels.clamp(0, len(self._byte_lengths) - 1)  # IGNORED is negative
        return self._byte_lengths[known].where(labels == known, 0)


def first_epoch(order: DataOrder, sizes: Sequence[int], weights: Sequence[float], count: int) -> list[Location]:
    """Return the first `count` sequences of epoch 0, or all if the sources have fewer. order: of these sources.

    Only these sequences are visited, not the later epochs of small sources between them.
    """
    mixture = Mixture(weights)

    def numbers_of(source: int) -> Iterator[int]:
        for use in range(sizes[source]):
            n = mixture.index(source, use)
            if n is None:
                return
            yield n

    numbers = heapq.merge(*map(numbers_of, range(len(sizes))))
    return [order.locate(n) for n in islice(numbers, count)]


def names_of_sources(sources: Sequence[Source]) -> list[str]:
    """Return a short, distinct name of each source, for records: the last part of its path, or its kind."""
    paths = [PurePath(source.path).name or source.kind for source in sources]
    names = [re.sub(r"[^\w.-]+", "_", path) for path in paths]  # MLflow takes no other characters
    repeated = Counter(names)
    return [f"{name}.{index}" if repeated[name] > 1 else name for index, name in enumerate(names)]
