"""Batches of a run from a Python iterable of token lists, in place of the corpora of `loader.py`.

The examples, one after another, are one stream of tokens, which is cut into sequences as a corpus of documents is. Each
rank iterates over the same examples and keeps its own sequences, and its pieces of them.
"""

import base64
import io
import logging
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchllm.config import Data, Model, Training, gradient_accumulation
from torchllm.config.applied_keys import applied
from torchllm.config.errors import DataError
from torchllm.data.batch import Batch
from torchllm.data.corpus import Window
from torchllm.data.corpus_header import CorpusHeader
from torchllm.data.loader import DataRanks
from torchllm.data.packing import IGNORED, PackedBatches, pack_windows
from torchllm.runtime.signs_of_life import show_progress

log = logging.getLogger(__name__)

_END = object()


class _Tokens(NamedTuple):
    """An example, or the rest of one."""

    ids: npt.NDArray[np.uint32]
    targets: npt.NDArray[np.bool_]
    """which of `ids` are trained"""


class _Snapshot(NamedTuple):
    """The state of the iterable after a number of examples."""

    examples: int = 0
    state: Any = None
    """from its state_dict; None: it is at its begin"""


class _Stream:
    """The examples of an iterable, one after another, as one stream of tokens."""

    def __init__(self, iterable: Iterable[Any], vocab: int) -> None:
        self.iterable, self.vocab = iterable, vocab
        self.examples = 0
        """number of examples read"""
        self.checksum = 0
        """of the ids taken since the start"""
        self.snapshot = _Snapshot()
        """before the last example was read, or some examples earlier"""
        self._read_state: Callable[[], Any] | None = None
        """takes the snapshot that `mark` has asked for"""
        self._iterator: Iterator[Any] | None = None
        self._has_ended = False
        self._last: npt.NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        """ids of the last example"""
        self._offset = 0
        """where `_parts` begins in its example"""
        self._parts: list[_Tokens] = []
        """examples that were read and not taken; between two calls of `take` the rest of the last one"""
        self._size = 0
        """number of tokens in `_parts`"""

    def take(self, length: int) -> Window | None:
        """Return the next `length` tokens and the one that follows; None if the stream ends before."""
        while self._size <= length:
            if not self._read():
                return None
        starts = np.cumsum([0, *(len(part.ids) for part in self._parts[:-1])])
        if len(self._parts) > 1:  # else nothing is copied: an example may be long
            self._parts = [_Tokens(*map(np.concatenate, zip(*self._parts, strict=True)))]
        ((ids, targets),) = self._parts
        self._offset = length - int(starts[-1]) + (self._offset if len(starts) == 1 else 0)
        self._parts = [_Tokens(ids[length:], targets[length:])]
        self._size -= length
        self.checksum = zlib.crc32(ids[:length].tobytes(), self.checksum)
        return Window(ids[: length + 1], starts[starts <= length], targets=targets[: length + 1])

    def mark(self) -> None:
        """Take a snapshot of the iterable, if it has a state, before the next example is read."""
        self._read_state = getattr(self.iterable, "state_dict", None)

    def _next(self) -> Any:
        """Return the next example, `_END` behind the last one."""
        if self._iterator is None:
            self._iterator = iter(self.iterable)
        if self._read_state is not None:
            self.snapshot = _Snapshot(self.examples, self._read_state())
            self._read_state = None
        return next(self._iterator, _END)

    def _read(self) -> bool:
        """Append an example, or after the last one a single token that is no target. Return whether there was one."""
        if self._has_ended:
            return False
        example = self._next()
        if example is _END:
            self._has_ended = True
            tokens = _Tokens(np.zeros(1, dtype=np.uint32), np.zeros(1, dtype=np.bool_))
        else:
            self.examples += 1
            tokens = _tokens_of(example, self.examples, self.vocab)
            self._last = tokens.ids
        if len(tokens.ids):
            self._parts.append(tokens)
            self._size += len(tokens.ids)
        return True

    def position(self) -> dict[str, Any]:
        """Return where the next token is, as JSON."""
        return {
            "examples": self.examples,
            "offset": len(self._last) if self._has_ended else self._offset,
            "checksum": zlib.crc32(self._last.tobytes()),
            "snapshot": [self.snapshot.examples, _encode(self.snapshot.state)],
        }

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Go on from a position, in a stream that is still unread. Raises DataError if it has another example."""
        examples, text = position["snapshot"]
        state = _decode(text)
        if state is not None and hasattr(self.iterable, "load_state_dict"):
            self.iterable.load_state_dict(state)
            self.snapshot = _Snapshot(examples, state)
            self.examples = examples
        skipped = position["examples"] - 1 - self.examples
        if self.snapshot.state is None and skipped > 0:
            log.info("data: the iterable restores no state: %s examples are read again and skipped", f"{skipped:,}")
        show_progress(lambda: f"{self.examples:,} of {position['examples']:,} examples skipped")
        for _ in range(skipped):
            self._next()
            self.examples += 1
        self._read()
        if self.examples < position["examples"] or zlib.crc32(self._last.tobytes()) != position["checksum"]:
            raise DataError(
                f"the checkpoint was trained on other data: example {position['examples']:,} of the iterable is "
                "another one now; the iterable must yield the same examples in the same order after each start"
            )
        self.take(position["offset"])


def _tokens_of(example: Any, number: int, vocab: int) -> _Tokens:
    """Return the tokens of an example. Raises DataError."""
    name = f"example {number:,} of the iterable"
    tokens, labels = example, None
    if isinstance(example, Mapping):
        tokens, labels = example.get("input_ids"), example.get("labels")
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise DataError(
            f"{name}: must be a list of token ids, or a mapping with such lists as input_ids and (optional) labels, "
            f"not {str(example)[:80]}"
        )
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if wrong.size:
        raise DataError(f"{name}: {wrong[0]} is no token id, which are from 0 to model.vocab - 1 = {vocab - 1}")
    expected = ids if labels is None else np.asarray(labels)
    if expected.shape != ids.shape or not np.all((expected == ids) | (expected == IGNORED)):
        raise DataError(f"{name}: labels must be as long as input_ids, each the same id or {IGNORED}")
    return _Tokens(ids.astype(np.uint32), expected != IGNORED)


def _encode(state: Any) -> str:
    """Return the state of an iterable as text. Raises DataError if `_decode` could not read it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    text = base64.b64encode(buffer.getvalue()).decode()
    try:
        _decode(text)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"the iterable's state_dict may hold numbers, texts, tensors, lists and dicts: {error}"
        ) from None
    return text


def _decode(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


def piece_of(window: Window, piece: range) -> Window:
    """Return a piece of a sequence, and the token that follows."""
    begins = window.begins
    before = begins[(begins > 0) & (begins <= piece.start)]
    part = slice(piece.start, piece.stop + 1)
    return Window(
        window.ids[part],
        begins[(begins >= part.start) & (begins < part.stop)] - piece.start,
        document=len(before),
        position=piece.start - int(before[-1] if len(before) else 0),
        targets=None if window.targets is None else window.targets[part],
    )


class IterableLoader:
    """The run's training batches from an iterable, and its held-out ones from another; in place of a `TrainLoader`."""

    def __init__(
        self,
        iterable: Iterable[Any],
        data: Data,
        training: Training,
        model: Model,
        ranks: DataRanks,
        *,
        held_out: Iterable[Any] | None = None,
    ) -> None:
        """Start at the first example. Of [data] only `document_mask` is used.

        iterable, held_out: yield the same examples in the same order on every rank. An example is a list of token ids,
        or a mapping with "input_ids" and "labels" as for Hugging Face's models: labels are the ids, -100 where a token
        is not trained. A resumed run restores the state of `iterable` if it has state_dict and load_state_dict; else it
        reads the trained examples again and skips them.
        """
        applied("data.document_mask", data.document_mask)
        if data.changes_size:
            raise DataError("data.stage: an iterable gives steps of one size: remove its batch sizes and lengths")
        self.skipped: dict[str, int] = {}
        self._training, self._ranks, self._document_mask = training, ranks, data.document_mask
        self._pieces = ranks.pieces.positions(training.sequence_length)
        self._stream = _Stream(iterable, model.vocab)
        self._held_out_stream = None if held_out is None else _Stream(held_out, model.vocab)
        self._held_out: list[Window] = []
        self._steps = self._sequences = 0
        self._is_checked = False

    def next_step(self) -> PackedBatches:
        """Return the micro batches of this rank in the next optimizer step. Raises DataError if the iterable ends."""
        training, ranks = self._training, self._ranks
        self._stream.mark()
        windows = []
        for _ in range(training.global_batch_size):
            window = self._stream.take(training.sequence_length)
            if window is None:
                raise DataError(
                    f"the iterable has ended after {self._stream.examples:,} examples, in step {self._steps + 1} of "
                    f"training.steps = {training.steps}: have it begin again, or lower training.steps"
                )
            windows.append(window)
        self._steps += 1
        self._sequences += len(windows)
        if not self._is_checked:
            self._is_checked = True
            self.state()  # refuse now, not at the first checkpoint
        size, accumulation = training.micro_batch_size, gradient_accumulation(training, ranks.size)
        starts = [(index * ranks.size + ranks.rank) * size for index in range(accumulation)]
        return self._pack([window for start in starts for window in windows[start : start + size]], accumulation)

    def _pack(self, windows: Sequence[Window], micro_batches: int) -> PackedBatches:
        pieces = [piece_of(window, piece) for window in windows for piece in self._pieces]
        last_token = range(self._training.sequence_length - 1, self._training.sequence_length)
        attends_whole = self._ranks.pieces.attends_whole
        documents = [1 + piece_of(window, last_token).document for window in windows] if attends_whole else None
        values = torch.from_numpy(pack_windows(pieces, self._document_mask, documents))
        size = self._training.micro_batch_size
        return PackedBatches(values, micro_batches, size, self._pieces, self._document_mask, has_targets=True)

    def state(self) -> dict[str, Any]:
        """Return how far the run is in its data, as JSON. Call it on all ranks.

        Raises DataError if they have not read the same tokens.
        """
        if len(set(self._ranks.gather_texts(str(self._stream.checksum)))) > 1:
            raise DataError(
                "the ranks have read different tokens: the iterable must yield the same examples in the same order on "
                "every rank (the loader gives each rank its part), so shuffle it with the same seed"
            )
        return {
            "sequences": self._sequences,
            "steps": self._steps,
            "fingerprint": {"sources": [], "tokenizer": [], "sequence_length": self._training.sequence_length},
            "iterable": self._stream.position(),
        }

    def load_state(self, state: Mapping[str, Any], record: Mapping[str, Any] | None = None) -> None:
        """Continue from a saved state. Raises DataError if the tokens would differ from the saved run's."""
        if "iterable" not in state:
            raise DataError("the checkpoint was trained on data.sources, and this recipe reads an iterable")
        length, now = state["fingerprint"]["sequence_length"], self._training.sequence_length
        if length != now:
            raise DataError(f"training.sequence_length: {length} in the checkpoint, {now} now")
        self._steps, self._sequences = state["steps"], state["sequences"]
        self._stream.go_to(state["iterable"])

    def validation_sequences(self, sequences: int) -> int:
        """Return how many of `sequences` held-out sequences exist. Raises DataError if there is none."""
        applied("evaluate.interval")
        if self._held_out_stream is None:
            raise DataError("evaluate.interval: give IterableLoader(..., held_out=...) examples, or set it to 0")
        while len(self._held_out) < sequences:
            window = self._held_out_stream.take(self._training.sequence_length)
            if window is None:
                break
            self._held_out.append(window)
        if not self._held_out:
            raise DataError("evaluate.interval: held_out has not a single sequence of training.sequence_length tokens")
        return min(sequences, len(self._held_out))

    def validation_batches(self, sequences: int, device: torch.device) -> Iterator[Batch]:
        """Yield this rank's share of the first `sequences` held-out sequences; an equal number of batches per rank."""
        windows = self._held_out[: self.validation_sequences(sequences)]
        size = self._training.micro_batch_size
        for start_of_rank_0 in range(0, len(windows), size * self._ranks.size):
            start = start_of_rank_0 + self._ranks.rank * size
            share = windows[start : start + size]
            (batch,) = self._pack(share + windows[:1] * (size - len(share)), 1).unpack(device)
            batch.labels[len(share) :] = IGNORED
            yield batch

    def describe_sources(self, steps: int) -> list[str]:
        """Return a line on the data."""
        return [f"an iterable, whose examples are packed into sequences of {self._training.sequence_length} tokens"]

    def describe_rounded_shares(self) -> str:
        """Return "": nothing is mixed."""
        return ""

    def corpora(self) -> dict[str, CorpusHeader]:
        """Return {}: there is none."""
        return {}

    def close(self) -> None:
        """Do nothing: the iterable ends with the process."""
