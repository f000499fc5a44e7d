"""Best-fit packing: every token once per epoch, and whole documents. On any ranks: test_stages.py."""

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchllm.config import Data, Model, Source, Training
from torchllm.config.errors import DataError
from torchllm.data import best_fit as best_fit_module
from torchllm.data.batch import Batch
from torchllm.data.best_fit import BestFitCorpus, Ints, PackedGroup, best_fit, pack_group
from torchllm.data.corpus import close_shards
from torchllm.data.loader import DataRanks, TrainLoader, build_loader
from torchllm.data.shard import OpenShard
from torchllm.data.tokenizer import load_tokenizer

CPU = torch.device("cpu")
LENGTH = 32


class Counted(int):
    """A number of tokens that counts how often it is compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int(self) == other

    def __hash__(self) -> int:
        return int(self)

    def __sub__(self, other: int) -> "Counted":
        return Counted(int(self) - other)


def test_packing_fills_sequences_and_takes_log_n_comparisons_per_example() -> None:
    random = np.random.default_rng(0)
    per_example = []
    for count in (64, 1024):
        lengths = random.integers(1, 600, count).tolist()
        Counted.comparisons = 0
        sequences = best_fit(lengths, Counted(1000))
        per_example.append(Counted.comparisons / count)
        assert sorted(index for sequence in sequences for index in sequence) == list(range(count))
        assert all(sum(lengths[index] for index in sequence) <= 1000 for sequence in sequences)
        assert len(sequences) <= 1.1 * sum(lengths) / 1000 + 1
    assert 0 < per_example[1] < 3 * per_example[0]
    assert best_fit([5, 3, 2, 5], 5) == [[0], [3], [1, 2]]
    assert best_fit([6, 5, 4], 10) == [[0, 2], [1]]  # the fullest with room, not the emptiest


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 16))
def test_a_group_has_each_token_once_and_cuts_only_what_does_not_fit(sizes: list[int], length: int) -> None:
    borders = np.cumsum([5, *sizes])
    packed = pack_group(borders, length)
    tokens = [token for start, end in zip(packed.starts, packed.ends, strict=True) for token in range(start, end)]
    assert sorted(tokens) == list(range(5, borders[-1]))
    pieces = packed.ends - packed.starts
    for first, end in zip(packed.first[:-1], packed.first[1:], strict=True):
        assert 0 < pieces[first:end].sum() <= length
    documents = np.searchsorted(borders, packed.starts, side="right") - 1
    assert np.array_equal(packed.limits, borders[documents + 1])
    cuts = Counter(documents.tolist())
    assert [cuts[index] for index in range(len(sizes))] == [-(-size // length) for size in sizes]
    fewest_possible = -(-sum(sizes) // length)
    assert len(packed.first) - 1 <= 1.5 * fewest_possible + 1  # of best fit decreasing: 11 / 9


def packed_piece_by_piece(borders: Ints, length: int) -> PackedGroup:
    """The sequences of a group, of which every piece goes through best fit."""
    pieces = [
        (start, min(start + length, end), end)
        for begin, end in pairwise(borders.tolist())
        for start in range(begin, end, length)
    ]
    sequences = best_fit([end - start for start, end, _ in pieces], length)
    columns = np.array([pieces[index] for sequence in sequences for index in sequence], dtype=np.int64).reshape(-1, 3)
    return PackedGroup(*columns.T, np.cumsum([0, *map(len, sequences)]))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 99) | st.sampled_from([8, 16, 24, 400]), max_size=30), st.sampled_from([1, 7, 8, 100]))
def test_pieces_of_a_whole_sequence_are_not_fitted_and_stay_where_they_were(sizes: list[int], length: int) -> None:
    borders = np.cumsum([5, *sizes])
    expected = packed_piece_by_piece(borders, length)
    with mock.patch.object(best_fit_module, "best_fit", side_effect=best_fit) as fit:
        packed = pack_group(borders, length)
    assert [column.tolist() for column in packed] == [column.tolist() for column in expected]
    assert {column.dtype for column in packed} == {np.dtype(np.int64)}
    (lengths, _), _ = fit.call_args
    assert sorted(lengths) == sorted(size % length for size in sizes if size % length)  # one at most for a document


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """Some groups in each of some shards; some documents are longer than a sequence or two."""
    monkeypatch.setattr(best_fit_module, "PACKED_TOGETHER", 16)
    random = np.random.default_rng(0)
    texts = [f"{index} " + "x" * int(size) for index, size in enumerate(random.lognormal(2.5, 0.8, 150))]
    texts += [f"{index} " + "y" * size for index, size in enumerate((28, 29, 30, 61, 62, 63, 90))]  # 2 + 2 more tokens
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return Source(kind="jsonl", path=str(tmp_path / "a.jsonl"))


def loader_of(
    source: Source, rank: int = 0, ranks: int = 1, batch: int = 4, length: int = LENGTH, depth: int = 0, **changes: Any
) -> TrainLoader:
    values: dict[str, Any] = {"workers": 0, "document_mask": True, "packing": "best_fit", "validation_fraction": 0.1}
    data = Data(sources=(source,), cache=str(Path(source.path).parent / "cache"), **values | changes)
    training = Training(micro_batch_size=1, global_batch_size=batch, sequence_length=length)
    return build_loader(data, training, Model(), 3, DataRanks(rank, ranks))


def pieces_of(batch: Batch) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield tokens and labels of each document or piece of one, without padding; no text has a token 0."""
    assert batch.document_ids is not None
    for tokens, labels, positions, ids in zip(*(x.tolist() for x in batch[:4]), strict=True):
        starts = [index for index in range(len(ids)) if index == 0 or ids[index] != ids[index - 1]]
        assert [ids[index] for index in starts] == list(range(len(starts)))
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            assert positions[start:end] == list(range(end - start))
            size = sum(token > 0 for token in tokens[start:end])
            assert size == end - start or (end == len(ids) and not any(tokens[start + size : end]))
            assert set(labels[start + size : end]) <= {-100}
            yield tuple(tokens[start : start + size]), tuple(labels[start : start + size])


def expected_pieces(source: Source, kept: set[tuple[int, ...]]) -> Counter[Any]:
    """Return the pieces of all documents of the source of which a piece is in `kept`."""
    tokenizer, pieces = load_tokenizer("bytes"), Counter[Any]()
    texts = [json.loads(line)["text"] for line in Path(source.path).read_text().splitlines()]
    for ids in tokenizer.encode_documents(texts):
        document = [256, *ids.tolist(), 257]
        if tuple(document[:LENGTH]) in kept:
            for start in range(0, len(document), LENGTH):
                tokens, labels = document[start : start + LENGTH], document[start + 1 : start + LENGTH + 1]
                pieces[tuple(tokens), tuple(labels + [-100] * (len(tokens) - len(labels)))] += 1
    return pieces


def test_an_epoch_has_every_document_whole_or_in_its_pieces(source: Source) -> None:
    loader = loader_of(source, batch=1)
    (size,) = loader._sizes[0]
    assert size < 157
    seen: Counter[Any] = Counter()
    for _ in range(size):
        for batch in loader.next_step().unpack(CPU):
            seen.update(pieces_of(batch))
    held_out: Counter[Any] = Counter()
    for batch in loader.validation_batches(10**6, CPU):
        held_out.update(pieces_of(batch))
    for pieces in (seen, held_out):
        assert pieces == expected_pieces(source, {tokens for tokens, _ in pieces})
    begun = sum(count for (tokens, _), count in (seen + held_out).items() if tokens[0] == 256)
    assert begun == 157


def corpus_of(source: Source) -> BestFitCorpus:
    (corpus,) = loader_of(source)._sources
    assert isinstance(corpus, BestFitCorpus)
    return corpus


@pytest.mark.parametrize("depth", [0, 3])
def test_a_part_of_a_sequence_is_that_part_of_it(source: Source, depth: int) -> None:
    """As context parallelism reads it; with depth, so many tokens behind the one that follows it too."""
    corpus = corpus_of(source)
    goes_on = 0
    for number in range(corpus.count("train", LENGTH)):
        whole = corpus.window("train", number, LENGTH, range(LENGTH + depth))
        assert whole.targets is not None
        assert len(whole.ids) == len(whole.targets) == LENGTH + 1 + depth
        goes_on += LENGTH not in whole.begins
        for start in range(0, LENGTH, 8):
            part = corpus.window("train", number, LENGTH, range(start, start + 8 + depth))
            assert part.targets is not None
            here = slice(start, start + 9 + depth)
            assert part.ids.tolist() == whole.ids[here].tolist()
            assert part.targets.tolist() == whole.targets[here].tolist()
            begins = whole.begins - start
            assert part.begins.tolist() == begins[(begins >= 0) & (begins < 9 + depth)].tolist()
            before = whole.begins[whole.begins <= start]
            assert (part.document, part.position) == (len(before) - 1, start - before[-1])
    assert goes_on >= 6  # a document that is longer than the sequence has its next token behind it


def test_few_long_documents_are_held_out_and_none_of_their_tokens_is_lost(tmp_path: Path) -> None:
    """The last tokens of all are held out: they begin within a document, and may be a part of one."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(chr(ord("a") + number) * 5000)
    corpus = corpus_of(Source(kind="text", path=f"{tmp_path}/*.txt"))
    assert isinstance(corpus, BestFitCorpus)
    held_out = corpus.count("validation", LENGTH)
    assert held_out == -(-corpus.tokens("validation") // LENGTH) > 0
    ids = [token for number in range(held_out) for token in corpus.window("validation", number, LENGTH).ids[:LENGTH]]
    assert sum(token > 0 for token in ids) == corpus.tokens("validation")


def test_groups_are_counted_once_without_a_token_being_read(source: Source) -> None:
    loader_of(source, packing="concatenate")  # tokenizes
    close_shards()
    with mock.patch.object(OpenShard, "read_ids", side_effect=AssertionError):
        corpus = corpus_of(source)
    (file,) = (Path(source.path).parent / "cache/best_fit").iterdir()
    with mock.patch.object(BestFitCorpus, "_pack", side_effect=AssertionError):
        known = corpus_of(source)
    assert known.count("train", LENGTH) == corpus.count("train", LENGTH)
    np.save(file, np.load(file)[1:])  # of another version
    assert corpus_of(source).count("train", LENGTH) == corpus.count("train", LENGTH)
    copy = pickle.loads(pickle.dumps(corpus))
    assert copy.window("train", 3, LENGTH).ids.tolist() == corpus.window("train", 3, LENGTH).ids.tolist()


def test_many_groups_are_counted_by_several_processes(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_fit_module, "PACKED_TOGETHER", 4096)  # as in the other processes
    corpus = corpus_of(source)
    (file,) = (Path(source.path).parent / "cache/best_fit").iterdir()
    counts = np.load(file)
    file.unlink()
    with (
        mock.patch.object(best_fit_module, "IN_ONE_PROCESS", 0),
        mock.patch.object(BestFitCorpus, "_pack", side_effect=AssertionError),  # in this process
    ):
        assert corpus_of(source).count("train", LENGTH) == corpus.count("train", LENGTH)
    assert np.array_equal(np.load(file), counts)


def test_a_run_that_resumes_keeps_its_packing(source: Source) -> None:
    packed, concatenated = loader_of(source), loader_of(source, packing="concatenate")
    with pytest.raises(DataError, match=r'data\.packing: "best_fit" in the checkpoint, "concatenate" now'):
        concatenated.load_state(packed.state())
    with pytest.raises(DataError, match=r'data\.packing: "concatenate" in the checkpoint, "best_fit" now'):
        packed.load_state(concatenated.state())


def test_files_that_cut_documents_are_refused(tmp_path: Path) -> None:
    np.arange(1, 200, dtype=np.uint16).tofile(tmp_path / "a.bin")
    source = Source(kind="nanogpt", path=str(tmp_path / "a.bin"))
    with pytest.raises(DataError, match=r'"best_fit" needs whole documents, which nanogpt .* recipes/prepare\.py'):
        loader_of(source, dtype="uint16", separator=1)
