"""Reads a rank's pieces of sequences of the sources, and packs them."""

from collections.abc import Sequence

import torch

from torchllm.data.corpus import Corpus, SequenceSource
from torchllm.data.order import Location
from torchllm.data.packing import Packed, PackedBatches, SequencePieces, pack_windows
from torchllm.data.shard import Split


class SequenceReader:
    """Reads this rank's pieces of sequences of the sources and packs them.

    depth: tokens further ahead that each piece has behind the one that follows it (model.mtp_depth).
    """

    def __init__(
        self, sources: Sequence[SequenceSource], length: int, document_mask: bool, pieces: SequencePieces, depth: int
    ) -> None:
        self.sources = sources
        self.length = length
        self.document_mask = document_mask
        self.attends_whole = pieces.attends_whole
        self.pieces = pieces.positions(length)
        self.depth = depth
        self.read_pieces = [range(piece.start, piece.stop + depth) for piece in self.pieces]
        self.has_targets = any(isinstance(source, Corpus) and source.is_packed for source in sources)

    def read(self, split: Split, locations: Sequence[Location]) -> Packed:
        """Return this rank's pieces of these sequences, in order, in one array."""
        numbers: dict[int, list[int]] = {}
        for location in locations:
            numbers.setdefault(location.source, []).append(location.number)
        for index, drawn in numbers.items():
            if isinstance(source := self.sources[index], Corpus):
                source.read_ahead(split, drawn, self.length)
        windows, documents = [], []
        for location in locations:
            source = self.sources[location.source]
            windows += [source.window(split, location.number, self.length, piece) for piece in self.read_pieces]
            if self.attends_whole and self.document_mask:
                last_token = range(self.length - 1, self.length)
                documents.append(1 + source.window(split, location.number, self.length, last_token).document)
        return pack_windows(windows, self.document_mask, documents)

    def packed_batches(self, values: torch.Tensor, micro_batches: int, micro_batch_size: int) -> PackedBatches:
        """Return the sequences of `values`, a result of `read`, as `micro_batches` micro batches."""
        settings = self.pieces, self.document_mask, self.has_targets, self.depth
        return PackedBatches(values, micro_batches, micro_batch_size, *settings)
