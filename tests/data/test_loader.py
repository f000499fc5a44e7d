import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchllm.data.loader
import torchllm.data.verification
from tests import workers
from tests.data.many_shards import Calls, counting, descriptors, write_many_shards
from tests.data.test_corpus import flip_bit, write_two_shards
from tests.launched import ends
from tests.patience import until
from tests.tools.prepare.test_build import BYTES, plan_for, write_corpus_of, write_documents
from torchllm.config import Data, Finetune, MixtureStage, Model, Source, Training
from torchllm.config.errors import DataError
from torchllm.config.system_errors import describe_system_error
from torchllm.data.batch import Batch
from torchllm.data.checked_file import BLOCK
from torchllm.data.corpus import Corpus, SequenceSource, Window
from torchllm.data.loader import DataRanks, TrainLoader, build_loader
from torchllm.data.order import DataOrder, PlannedStage
from torchllm.data.packing import WHOLE_SEQUENCE, SequencePieces
from torchllm.data.readers import ReaderSettings
from torchllm.data.shard import Split
from torchllm.data.synthetic import Synthetic
from torchllm.data.tokenizer import load_tokenizer
from torchllm.tools.prepare.build import write_corpus
from torchllm.tools.prepare.cache import cached_folder, plan_corpus, prepare_cached

CPU = torch.device("cpu")
LENGTH = 3


class Numbered:
    """Sequences whose tokens say which one they are: (source, split, number)."""

    def __init__(self, source: int, train: int, validation: int = 0) -> None:
        self.source = source
        self.sizes = {"train": train, "validation": validation}
        self.fingerprint = f"numbered-{source}-{train}"

    def count(self, split: Split, length: int) -> int:
        return self.sizes[split]

    def describe(self) -> str:
        return "numbered sequences"

    def window(self, split: Split, number: int, length: int, piece: range | None = None) -> Window:
        ids = np.array([self.source, split == "validation", number, 0], dtype=np.uint32)
        return Window(ids, np.zeros(1, dtype=np.int64))


def data_ranks(rank: int = 0, size: int = 1) -> DataRanks:
    return DataRanks(rank, size, prepares=rank == 0)


def numbered_loader(
    sizes: Sequence[int],
    rank: int = 0,
    ranks: int = 1,
    micro_batch: int = 1,
    accumulation: int = 1,
    workers: int = 0,
    seed: int = 0,
    weights: Sequence[float] = (),
    held_out: Sequence[int] = (),
    stages: Sequence[MixtureStage] = (),
    counts_epochs: bool = False,
    max_epochs: Sequence[float] = (),
    steps: int = 10**6,
) -> TrainLoader:
    """The loader of one rank over numbered sources of these sizes; weights are 1 and nothing is held out by default."""
    training = Training(
        micro_batch_size=micro_batch,
        global_batch_size=micro_batch * accumulation * ranks,
        sequence_length=LENGTH,
        steps=steps,
    )
    weights = weights or [1.0] * len(sizes)
    max_epochs = max_epochs or [0.0] * len(sizes)
    held_out = held_out or [0] * len(sizes)
    each = zip(weights, max_epochs, strict=True)
    settings = tuple(Source(kind="synthetic", weight=weight, max_epochs=limit) for weight, limit in each)
    data = Data(sources=settings, workers=workers, stage=tuple(stages))
    sources: list[SequenceSource] = []
    for source, (size, validation) in enumerate(zip(sizes, held_out, strict=True)):
        sources.append(Numbered(source, size, validation))
    return TrainLoader(sources, data, training, seed, data_ranks(rank, ranks), counts_epochs=counts_epochs)


def next_batches(loader: TrainLoader) -> list[Batch]:
    return loader.next_step().unpack(CPU)


def sequences_of(batch: Batch) -> list[tuple[int, ...]]:
    """The tokens of each sequence: (source, split, number)."""
    return [tuple(tokens) for tokens in batch.tokens.tolist()]


class Part(NamedTuple):
    ranks: int
    micro_batch: int
    accumulation: int
    workers: int
    steps: int


parts_strategy = st.builds(
    Part, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), st.integers(0, 3)
)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(
    st.lists(parts_strategy, min_size=1, max_size=3),
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(0, 2**63 - 1),
)
def test_stops_and_changes_of_layout_do_not_change_the_stream(parts: list[Part], sizes: list[int], seed: int) -> None:
    weights = [1.0 + source for source in range(len(sizes))]
    state = numbered_loader(sizes, seed=seed, weights=weights).state()
    stream: list[tuple[int, ...]] = []
    for part in parts:
        loaders = []
        for rank in range(part.ranks):
            loader = numbered_loader(
                sizes,
                rank,
                part.ranks,
                part.micro_batch,
                part.accumulation,
                part.workers if rank == 0 else 0,  # a process costs more than all else here
                seed=seed,
                weights=weights,
            )
            loader.load_state(json.loads(json.dumps(state)))
            loaders.append(loader)
        for _ in range(part.steps):
            steps = [next_batches(loader) for loader in loaders]
            for micro_batch in range(part.accumulation):
                for batches in steps:
                    stream += sequences_of(batches[micro_batch])
        state = loaders[0].state()
        for loader in loaders:
            assert loader.state() == state
            loader.close()
    assert state["sequences"] == len(stream)
    order = DataOrder(seed, sizes, weights)
    locations = [order.locate(n) for n in range(len(stream))]
    assert stream == [(location.source, 0, location.number) for location in locations]


def record_of(*paths: str, tokenizer: str = "bytes") -> dict[str, Any]:
    """The record of a checkpoint that has read text files."""
    sources = [{"kind": "text", "path": path} for path in paths]
    return {"config": {"data": {"sources": sources, "tokenizer": tokenizer}}}


def test_a_state_of_other_data_is_refused_with_what_differs() -> None:
    state, two = (numbered_loader(sizes, seed=1).state() for sizes in ([10], [10, 5]))
    longer = state | {"fingerprint": state["fingerprint"] | {"sequence_length": 7}}
    first, second = (rf"data\.sources\.{number} \(synthetic\)" for number in range(2))
    for saved, record, now, message in (
        (state, None, {"seed": 2}, r"seed: 1 in the checkpoint, 2 now$"),
        (
            state,
            None,
            {"sizes": [11]},
            f"{first}: its tokens are others: its files have changed, or how they are read$",
        ),
        (state, record_of("a/*.txt"), {"sizes": [11]}, rf"{first}: in the checkpoint it is text 'a/\*\.txt'$"),
        (state, None, {"weights": [2.0]}, rf"{first}: weight 1\.0 in the checkpoint, 2\.0 now$"),
        (state, None, {"sizes": [10, 5]}, rf"sources: 1 in the checkpoint, 2 now\n  only now: {second}$"),
        (two, record_of("a.txt", "b.txt"), {}, r"2 in the checkpoint, 1 now\n  only in the checkpoint: text 'b\.txt'$"),
        (longer, None, {}, "sequence_length: 7 in the checkpoint, 3 now"),
    ):
        arguments: dict[str, Any] = {"sizes": [10], "seed": 1} | now
        with pytest.raises(DataError, match=message):
            numbered_loader(**arguments).load_state(saved, record)
    numbered_loader([10], seed=1).load_state(state, record_of("a/*.txt"))  # the same tokens by another name


ANNEALED = (MixtureStage(3, (1.0, 0.0)), MixtureStage(5, (1.0, 1.0)), MixtureStage(0, (1.0, 3.0)))
"""stages of a run over two sources"""


def stream_of(loaders: Sequence[TrainLoader], steps: int) -> list[tuple[int, ...]]:
    """The sequences of the next steps of the ranks of a run, in their order in the run."""
    stream = []
    for _ in range(steps):
        for batches in zip(*(next_batches(loader) for loader in loaders), strict=True):
            stream += [sequence for batch in batches for sequence in sequences_of(batch)]
    return stream


def test_a_stage_that_began_before_another_global_batch_keeps_its_sequences() -> None:
    before = numbered_loader([50, 50], accumulation=4, stages=ANNEALED)
    stream = stream_of([before], 4)
    resumed = numbered_loader([50, 50], accumulation=2, stages=ANNEALED)
    resumed.load_state(json.loads(json.dumps(before.state())))
    stream += stream_of([resumed], 3)  # 16 sequences in 4 steps, then 2 per step
    order = DataOrder(0, [50, 50], [1.0, 3.0], [PlannedStage(0, 12, (1.0, 0.0)), PlannedStage(0, 18, (1.0, 1.0))])
    assert stream == [(location.source, 0, location.number) for location in map(order.locate, range(22))]
    again = numbered_loader([50, 50], accumulation=8, stages=ANNEALED)
    again.load_state(json.loads(json.dumps(resumed.state())))
    (batch,) = next_batches(again)[:1]
    location = order.locate(22)
    assert sequences_of(batch) == [(location.source, 0, location.number)]


def test_a_run_may_be_given_stages_and_sources_for_its_end() -> None:
    plain = numbered_loader([50])
    take_steps(plain, 3)
    state = json.loads(json.dumps(plain.state()))
    annealed = numbered_loader([50, 20], stages=ANNEALED)
    annealed.load_state(state)
    assert {source for source, _, _ in stream_of([annealed], 4)} == {0, 1}
    past = (MixtureStage(2, (1.0,)), MixtureStage(0, (1.0,)))
    message = r"data\.stage\.0\.until: no stage of the checkpoint, which is at step 3, ended at step 2"
    with pytest.raises(DataError, match=message):
        numbered_loader([50], stages=past).load_state(state)
    other = (MixtureStage(4, (1.0, 0.5)), MixtureStage(0, (1.0, 1.0)))
    with pytest.raises(DataError, match=r"data\.sources: 1 in the checkpoint, 2 now"):
        numbered_loader([50, 20], stages=other).load_state(state)
    annealed_state = json.loads(json.dumps(annealed.state()))
    message = r"data\.stage: up to step 7 .*\[1\.0, 0\.0\] until step 3.* \[1\.0, 3\.0\] to the end now$"
    with pytest.raises(DataError, match=message):
        numbered_loader([50, 20], stages=[MixtureStage(0, (1.0, 3.0))]).load_state(annealed_state)


def test_another_tokenizer_is_refused_by_its_name(tmp_path: Path) -> None:
    loader = real(tmp_path, write_documents(tmp_path, 50))
    state = loader.state()
    other = state | {"fingerprint": state["fingerprint"] | {"tokenizer": ["tiktoken-1f2e"]}}
    with pytest.raises(DataError, match=r"data\.tokenizer: 'a\.json' in the checkpoint, 'bytes' now$"):
        loader.load_state(other, record_of("a.txt", tokenizer="a.json"))
    for record in (record_of("a.txt"), None):
        with pytest.raises(DataError, match=r"data\.tokenizer 'bytes' is another one than in the checkpoint: its file"):
            loader.load_state(other, record)


def test_a_checkpoint_on_an_earlier_corpus_is_refused_with_where_that_corpus_is(tmp_path: Path) -> None:
    loader = real(tmp_path, write_documents(tmp_path, 50))
    state = loader.state()
    earlier = write_two_shards(tmp_path).fingerprint
    state["fingerprint"] = state["fingerprint"] | {"sources": [[earlier, 1.0]]}
    (tmp_path / "cache" / "damaged").mkdir()
    (tmp_path / "cache" / "damaged" / "corpus.json").write_text("{")
    advice = r"go on with that corpus, set kind = \"tokens\" and path = {} in data\.sources\.0"
    with pytest.raises(DataError, match=advice.format(r"its folder \(it is not in the cache, .*/cache\)")):
        loader.load_state(state)
    folder = tmp_path / "cache" / "jsonl-84bbf7219609ea6a"
    shutil.copytree(tmp_path / "c", folder)
    with pytest.raises(DataError, match=advice.format(f'"{folder}"')):
        loader.load_state(state)
    real(tmp_path, Source(kind="tokens", path=str(folder))).load_state(state)


def test_a_cached_corpus_is_found_however_its_path_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's config.toml has absolute paths."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    data = Data(cache="cache", validation_fraction=0.0)
    plans = [
        plan_corpus(Source(kind="text", path=path), ReaderSettings(data, 258, load_tokenizer("bytes")))
        for path in ("data", "./data/", str(tmp_path / "data"))
    ]
    folder = prepare_cached(plans[0], data)
    assert [prepare_cached(plan, data) for plan in plans] == [folder] * 3
    monkeypatch.chdir(tmp_path.parent)
    assert cached_folder(replace(data, cache=str(tmp_path / "cache")), plans[2]) == tmp_path / folder


def test_a_corpus_in_the_cache_keeps_what_it_holds_out(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 60)
    data = Data(sources=(source,), cache=str(tmp_path / "cache"), validation_fraction=0.05)
    plan = plan_corpus(source, ReaderSettings(data, 258, load_tokenizer("bytes")))
    by_text = cached_folder(data, plan)
    assert write_corpus(plan, partial(load_tokenizer, "bytes"), by_text).documents == 60
    assert Corpus(by_text).tokens("validation") > 0
    assert prepare_cached(plan, data) == by_text
    shutil.rmtree(by_text)
    last = prepare_cached(plan, data)
    assert last != by_text
    assert Corpus(last).header.plan["last_tokens"]
    assert prepare_cached(plan, data) == last


@pytest.mark.filterwarnings("error")
def test_the_runs_random_state_is_not_touched_and_nothing_warns() -> None:
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    for count in (0, 1):
        loader = numbered_loader([10], workers=count)
        loader.next_step()
        loader.close()
        assert torch.equal(torch.get_rng_state(), expected)


def test_no_room_for_workers_names_the_place_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")  # of /dev/shm, which Python does not name

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", full)
    loader = numbered_loader([10], workers=1)
    with pytest.raises(OSError, match="No space left") as raised:
        loader.next_step()
    assert "make room in /dev/shm, or set data.workers = 0" in describe_system_error(raised.value)


def test_an_evaluation_says_how_many_of_its_sequences_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Callable[[], str]] = []
    monkeypatch.setattr("torchllm.data.held_out.show_progress", shown.append)
    loader = numbered_loader([5], 1, 2, micro_batch=2, held_out=[9])
    assert len(list(loader.validation_batches(9, CPU))) == 3
    assert [text() for text in shown] == ["0 of 9 sequences", "4 of 9 sequences", "8 of 9 sequences"]


def validation_stream(
    ranks: int, micro_batch: int, seed: int, count: int, held_out: list[int]
) -> list[tuple[int, ...]]:
    """The first `count` held-out sequences that count, by source, in the order of micro batches and ranks."""
    by_rank = []
    for rank in range(ranks):
        loader = numbered_loader([5, 5], rank, ranks, micro_batch, seed=seed, held_out=held_out)
        by_rank.append(list(loader.validation_batches(count, CPU)))
    stream = []
    ignored = set()
    for batches in zip(*by_rank, strict=True):  # every rank has the same number of batches
        assert len({batch.source for batch in batches}) == 1
        for batch in batches:
            for sequence, labels in zip(sequences_of(batch), batch.labels, strict=True):
                if (labels == -100).all():
                    ignored.add(batch.source)
                else:
                    assert batch.source not in ignored  # ignored sequences are at the end of a source
                    stream.append(sequence)
    return stream


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 20), st.integers(0, 9), st.integers(1, 9))
def test_validation_is_the_same_for_every_layout(
    ranks: int, micro_batch: int, count: int, first: int, second: int
) -> None:
    stream = validation_stream(ranks, micro_batch, ranks, count, [first, second])
    assert stream == validation_stream(1, 1, 0, count, [first, second])
    assert len(stream) == len(set(stream)) == min(count, first + second)
    for _, is_held_out, _ in stream:
        assert is_held_out


def real(tmp_path: Path, source: Source, length: int = 32, **changes: Any) -> TrainLoader:
    settings: dict[str, Any] = {"sources": (source,), "cache": str(tmp_path / "cache"), "workers": 0} | changes
    training = Training(micro_batch_size=2, global_batch_size=4, sequence_length=length)
    return build_loader(Data(**settings), training, Model(), 0, data_ranks())


@pytest.mark.parametrize(("sizes", "epochs"), [((10, 90), 1.0), ((7, 30, 3), 2.0), ((40, 40), 1.0), ((12,), 3.0)])
def test_epochs_go_through_each_source_equally_often(sizes: Sequence[int], epochs: float) -> None:
    loader = numbered_loader(sizes, accumulation=4, counts_epochs=True)
    sequences = 4 * loader.steps_of_epochs(epochs)
    seen: Counter[int] = Counter()
    for n in range(round(epochs * sum(sizes))):
        seen[loader._order.locate(n).source] += 1
    assert [seen[source] for source in range(len(sizes))] == [epochs * size for size in sizes]
    assert 0 <= sequences - epochs * sum(sizes) < 4


def test_a_source_leaves_the_mixture_after_its_epochs() -> None:
    sizes, weights, limits = (10, 40, 7), (2.0, 1.0, 1.0), (2.5, 0.0, 1.0)
    unlimited = [numbered_loader(sizes, weights=weights)._order.locate(n) for n in range(200)]
    order = numbered_loader(sizes, weights=weights, max_epochs=limits)._order
    found = [order.locate(n) for n in range(200)]
    last = [max(n for n in range(200) if found[n].source == source) for source in (0, 2)]
    assert found[: min(last) + 1] == unlimited[: min(last) + 1]
    assert Counter(location.source for location in found) == {0: 25, 1: 168, 2: 7}
    passes = [(location.epoch, location.number) for location in found if location.source == 1]
    assert len(set(passes)) == 168  # its own order goes on
    between = Counter(location.source for location in found[min(last) + 1 : max(last) + 1])
    assert set(between) == {0, 1}
    assert abs(between[0] - 2 * between[1]) <= 2  # by their weights

    stages = [MixtureStage(until=3, weights=(1.0, 0.0)), MixtureStage(weights=(1.0, 1.0))]
    staged = numbered_loader((10, 10), stages=stages, max_epochs=(0.5, 0.0), accumulation=1)
    assert [staged._order.locate(n).source for n in range(12)] == [0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1]


def test_a_run_ends_where_all_sources_have_had_their_epochs() -> None:
    loader = numbered_loader((10, 5), max_epochs=(2.0, 1.0), accumulation=4, steps=7)
    with pytest.raises(DataError, match=r"after step 6 of 7: raise max_epochs, or train 6 steps"):
        loader.next_step()
    loader = numbered_loader((10, 5), max_epochs=(2.0, 1.0), accumulation=4, steps=6)
    lines = loader.describe_sources(6)
    assert lines[2] == "data.sources.1 (synthetic): leaves in step 3, after 1 epochs"
    seen = Counter(sequence[0] for _ in range(6) for batch in next_batches(loader) for sequence in sequences_of(batch))
    assert seen == {0: 19, 1: 5}
    with pytest.raises(DataError, match="after step 6 of 7"):
        loader.next_step()
    with pytest.raises(DataError, match=r"after step 0 of 9: raise max_epochs$"):
        numbered_loader((2,), max_epochs=(1.0,), accumulation=4, steps=9).next_step()
    by_epochs = numbered_loader((10, 5), max_epochs=(2.0, 2.0), accumulation=5, counts_epochs=True)
    assert by_epochs.steps_of_epochs(2.0) == 6
    with pytest.raises(DataError, match="after step 6 of 9"):
        by_epochs.steps_of_epochs(3.0)


def test_a_resumed_run_may_change_epochs_that_no_source_has_reached() -> None:
    loader = numbered_loader((10, 5), max_epochs=(0.0, 2.0))
    for _ in range(12):
        loader.next_step()
    state = json.loads(json.dumps(loader.state()))
    ahead = [sequences_of(batch) for _ in range(20) for batch in next_batches(loader)]
    resumed = numbered_loader((10, 5), max_epochs=(0.0, 2.0))
    resumed.load_state(state)
    assert [sequences_of(batch) for _ in range(20) for batch in next_batches(resumed)] == ahead
    numbered_loader((10, 5), max_epochs=(0.0, 3.0)).load_state(state)
    for limits in ((0.0, 1.0), (0.5, 2.0)):
        with pytest.raises(DataError, match=r"max_epochs \[0.0, 2.0\] in the checkpoint, .* now: one was reached"):
            numbered_loader((10, 5), max_epochs=limits).load_state(state)


def test_a_loader_that_is_told_of_epochs_mixes_by_size(tmp_path: Path) -> None:
    sources = []
    for name, documents in (("small", 20), ("large", 90)):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "seven"}\n' * documents)
        sources.append(Source(kind="jsonl", path=str(tmp_path / f"{name}.jsonl")))
    data = Data(sources=tuple(sources), cache=str(tmp_path / "cache"), validation_fraction=0.0, workers=0)
    training = Training(sequence_length=7, global_batch_size=1, micro_batch_size=1)
    loader = build_loader(data, training, Model(vocab=258), 0, DataRanks(), Finetune(epochs=1.0))
    lines = loader.describe_sources(loader.steps_of_epochs(1.0))
    assert [line.partition("; ")[2].partition(" in ")[0] for line in lines] == ["1 epochs", "1 epochs"]
    synthetic = numbered_loader((1,))
    synthetic._sources = [Synthetic(258)]
    with pytest.raises(DataError, match=r"finetune\.epochs: random tokens"):
        synthetic.steps_of_epochs(1.0)


def test_weights_that_are_chosen_decide_how_often_a_source_comes() -> None:
    loader = numbered_loader((10, 90), weights=(2.0, 1.0), counts_epochs=True)
    assert [loader._order.locate(n).source for n in range(6)].count(0) == 4
    stages = (MixtureStage(until=5, weights=(1.0, 0.0)), MixtureStage(weights=(1.0, 1.0)))
    loader = numbered_loader((10, 90), stages=stages, counts_epochs=True)
    assert [loader._order.locate(n).source for n in range(5)] == [0] * 5


def test_a_run_that_drew_its_sources_equally_often_goes_on_so() -> None:
    """A checkpoint of an earlier version counts epochs, but knows nothing of sizes."""
    earlier, later = numbered_loader((10, 90)), numbered_loader((10, 90), counts_epochs=True)
    for _ in range(6):
        earlier.next_step()
    later.load_state(json.loads(json.dumps(earlier.state())))
    for _ in range(20):
        assert sequences_of(*next_batches(later)) == sequences_of(*next_batches(earlier))
    resumed = numbered_loader((10, 90), counts_epochs=True)
    resumed.load_state(json.loads(json.dumps(later.state())))
    assert sequences_of(*next_batches(resumed)) == sequences_of(*next_batches(later))


def test_a_run_by_size_resumes_by_size() -> None:
    whole, part, rest = (numbered_loader((10, 90), counts_epochs=True) for _ in range(3))
    for _ in range(6):
        part.next_step()
        whole.next_step()
    rest.load_state(json.loads(json.dumps(part.state())))
    without_epochs = numbered_loader((10, 90))  # for steps that the command line names
    without_epochs.load_state(json.loads(json.dumps(part.state())))
    for _ in range(50):
        expected = sequences_of(*next_batches(whole))
        assert sequences_of(*next_batches(rest)) == expected
        assert sequences_of(*next_batches(without_epochs)) == expected
    with pytest.raises(DataError, match=r"weight 1\.0 in the checkpoint, 2\.0 now"):
        numbered_loader((10, 90), weights=(2.0, 1.0), counts_epochs=True).load_state(part.state())


def context_ranks(ranks: int, method: str) -> list[SequencePieces]:
    """The pieces of ranks that share each sequence, as `parallel.mesh.sequence_pieces` deals them."""
    if method == "ring":
        return [SequencePieces(2 * ranks, (rank, 2 * ranks - 1 - rank)) for rank in range(ranks)]
    return [SequencePieces(ranks, (rank,), attends_whole=True) for rank in range(ranks)]


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Yield a list that grows by the bytes of each read of a shard."""
    original = os.pread
    sizes: list[int] = []

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return original(descriptor, size, offset)

    with mock.patch.object(os, "pread", pread):
        yield sizes


@pytest.mark.parametrize(("method", "mask", "depth"), [("ring", True, 2), ("ulysses", False, 1), ("ulysses", True, 0)])
def test_ranks_that_share_a_sequence_read_only_their_pieces(
    tmp_path: Path, method: str, mask: bool, depth: int
) -> None:
    corpus = write_corpus_of(write_documents(tmp_path, 600, size=2000), tmp_path / "c", shard_mib=0.25)
    training = Training(micro_batch_size=1, global_batch_size=2, sequence_length=2**17)
    data = Data(sources=(Source(kind="tokens"),), workers=0, document_mask=mask)

    def read(pieces: SequencePieces) -> tuple[list[Batch], int]:
        """A step, and the bytes read for it."""
        loader = TrainLoader([corpus], data, training, 0, DataRanks(pieces=pieces), depth=depth)
        with counted_reads() as sizes:
            return next_batches(loader), sum(sizes)

    whole, _ = read(WHOLE_SEQUENCE)
    for ranks in (4, 16):
        for pieces in context_ranks(ranks, method):
            batches, bytes_read = read(pieces)
            for batch, expected in zip(batches, whole, strict=True):
                for field, expected_field in zip(batch, expected, strict=True):
                    assert (field is None) == (expected_field is None)
                    if isinstance(field, Tensor) and isinstance(expected_field, Tensor):
                        chunks = expected_field.chunk(pieces.total, dim=-1)
                        assert torch.equal(field, torch.cat([chunks[index] for index in pieces.indices], dim=-1))
                if mask:
                    assert expected.document_ids is not None
                    assert batch.document_ids is not None
                    seen = expected.document_ids if pieces.attends_whole else batch.document_ids
                    assert seen.unique().numel() <= batch.document_limit <= expected.document_limit
            reads = 2 * (len(pieces.indices) + (mask and pieces.attends_whole))
            tokens = 2 * 2**17 // ranks + reads * (1 + depth)  # after each piece those that follow it
            assert 0 < bytes_read - 2 * tokens < reads * 12_000  # the boundaries of documents in it and next to it


def test_sources_are_described() -> None:
    name = "data.sources.{} (synthetic): numbered sequences; {} epochs in 5 steps"
    lines = numbered_loader([10, 40], accumulation=8).describe_sources(steps=5)
    assert lines == [name.format(0, 2), name.format(1, 0.5)]
    assert numbered_loader([10] * 8).describe_sources(steps=5)[5:] == ["and 3 other sources"]


def test_rounded_shares_are_described() -> None:
    assert not numbered_loader([10, 10], weights=[0.7, 0.3]).describe_rounded_shares()
    described = numbered_loader([10, 10], weights=[1 - 1e-6, 1e-6]).describe_rounded_shares()
    assert described == "data.sources.1 (synthetic): 1e-06 asked, 0.0001 used"
    weights = [1.0] + [1e-7] * 7
    assert numbered_loader([10] * 8, weights=weights).describe_rounded_shares().endswith("; and 2 other sources")


def test_the_standard_library_in_bytes_is_tokenized_once(tmp_path: Path) -> None:
    first = real(tmp_path, Source(), length=256)
    with mock.patch("torchllm.tools.prepare.fill_cache.write_corpus", side_effect=AssertionError):
        second = real(tmp_path, Source(), length=256)
    assert first.state() == second.state()
    assert first._order._sizes[0] * 256 > 5e6
    assert first.validation_sequences(64) > 30  # Debian's library has fewer files: 36 sequences of them are held out


def test_too_little_and_too_much_data_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_documents(tmp_path, 50)
    with pytest.raises(DataError, match=r"shorter than one sequence of training\.sequence_length = 100000"):
        real(tmp_path, source, length=100_000)
    monkeypatch.setattr(sys, "argv", ["recipes/pretrain.py", "my run.toml", "--run.seed=1"])
    command = r"python recipes/prepare\.py 'my run\.toml' --run\.seed=1 --prepare\.folder=tokens"
    with pytest.raises(DataError, match=command):
        real(tmp_path, replace(source, text_key="t"), max_raw_mib=0.001)
    (tmp_path / "hub").mkdir()
    write_documents(tmp_path / "hub", 5)
    with pytest.raises(DataError, match=r"is of unknown size; only 256 MiB .*\n.*recipes/prepare\.py"):
        real(tmp_path, Source(kind="hub", path=str(tmp_path / "hub")))
    loader = real(tmp_path, source, validation_fraction=0.0)
    with pytest.raises(DataError, match=r"nothing is held out .* data\.validation_fraction"):
        loader.validation_batches(1, CPU)


def test_held_out_labels_have_the_bytes_of_their_text(tmp_path: Path) -> None:
    loader = real(tmp_path, write_documents(tmp_path, 50), length=16, validation_fraction=0.2)
    last, rest = 0, loader.validation_sequences(1000) % 2
    assert rest == 1
    for batch in loader.validation_batches(1000, CPU):
        assert batch.label_bytes is not None
        assert torch.equal(batch.label_bytes, ((batch.labels >= 0) & (batch.labels < 256)).int())
        last = int(batch.label_bytes[1].sum())
    assert last == 0  # a row that fills up the batch
    (batch,) = real(tmp_path, Source(kind="synthetic")).validation_batches(2, CPU)
    assert batch.label_bytes is None


def test_labels_of_a_tokenizer_that_the_config_does_not_name_have_no_bytes(tmp_path: Path) -> None:
    """Files of another program, read with data.tokenizer = "bytes", its default."""
    np.tile(np.arange(1000, 1200, dtype=np.uint16), 20).tofile(tmp_path / "a.bin")
    data = Data((Source(kind="nanogpt", path=str(tmp_path / "a.bin")),), dtype="uint16", separator=1199, workers=0)
    training = Training(micro_batch_size=1, global_batch_size=1, sequence_length=16)
    loader = build_loader(replace(data, validation_fraction=0.3), training, Model(vocab=2000), 0, DataRanks(0, 1))
    assert all(batch.label_bytes is None for batch in loader.validation_batches(2, CPU))


def test_sources_to_evaluate_on_are_read_whole_in_place_of_what_is_held_out(tmp_path: Path) -> None:
    for letter in "ab":
        (tmp_path / f"{letter} b.jsonl").write_text(f'{{"text": "{letter * 30}"}}\n' * 20)
    (tmp_path / "short.jsonl").write_text('{"text": "a"}\n')
    a, b, short = (Source(kind="jsonl", path=str(tmp_path / f"{name}.jsonl")) for name in ("a b", "b b", "short"))
    source = write_documents(tmp_path, 50)
    loader = real(tmp_path, source, length=16, validation=(a, b), validation_fraction=0.2)
    assert loader.state() == real(tmp_path, source, length=16, validation_fraction=0.2).state()  # a run may change them
    assert loader.describe_sources(1)[1] == f"data.validation.0 (jsonl {a.path!r}): 38 sequences to evaluate on"
    seen: dict[str, Counter[int]] = {"a_b.jsonl": Counter(), "b_b.jsonl": Counter()}
    for batch in loader.validation_batches(10**6, CPU):
        seen[batch.source].update(batch.tokens[(batch.labels != -100).any(1)].flatten().tolist())
    for letter, tokens in zip("ab", seen.values(), strict=True):
        assert 20 * 32 - 2 * 17 <= tokens.total() <= 20 * 32  # each split ends with a part of a sequence
        assert set(tokens) == {ord(letter), 256, 257}
    with pytest.raises(DataError, match=r"data\.validation: '.*short.jsonl' is shorter than one sequence"):
        real(tmp_path, source, length=16, validation=(a, short))


def test_tokens_must_fit_the_model(tmp_path: Path) -> None:
    real(tmp_path, write_documents(tmp_path, 50))
    (folder,) = (tmp_path / "cache").glob("jsonl-*")
    source = Source(kind="tokens", path=str(folder))
    assert real(tmp_path, source).next_step()
    header = folder / "corpus.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"max_token": 264}))
    with pytest.raises(DataError, match=r"token id 264 >= model\.vocab = 264: raise model\.vocab"):
        real(tmp_path, source)


def _state_of_a_run(folder: Path, source: Source) -> dict[str, Any]:
    """Prepare a corpus as a process that no other one waits for."""
    return real(folder, source).state()


def test_runs_that_prepare_the_same_corpus_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    first, second = workers.POOL.run(_state_of_a_run, 2, tmp_path, write_documents(tmp_path, 2000, size=500))
    assert first == second
    assert not list((tmp_path / "cache").glob("*/raw*"))
    assert not list((tmp_path / "cache").glob("*/*.tmp"))


def test_synthetic_needs_no_file_and_no_tokenizer(tmp_path: Path) -> None:
    loader = real(tmp_path, Source(kind="synthetic"), tokenizer="no such file")
    batch = next_batches(loader)[0]
    assert int(batch.tokens.max()) < Model().vocab
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert not (tmp_path / "cache").exists()


SCRIPT = """
import os, signal, sys, time
from tests.data.test_loader import next_batches, numbered_loader, sequences_of
loader = numbered_loader([100], workers=2)
first = [sequences_of(next_batches(loader)[0]) for _ in range(3)]
{body}
"""


DISTURBANCES = """
import multiprocessing
from torchllm.runtime.error_report import report_errors
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: print('signalled'))
    os.killpg(0, number)
rest = [sequences_of(next_batches(loader)[0]) for _ in range(20)]
whole = numbered_loader([100])
assert first + rest == [sequences_of(next_batches(whole)[0]) for _ in range(23)]
print('continued', flush=True)
report_errors()
worker, _ = multiprocessing.active_children()
worker.kill()
while True: next_batches(loader)
"""


@pytest.fixture(scope="module")
def disturbed() -> subprocess.CompletedProcess[str]:
    """A trainer whose whole process group is signalled, and of which a worker is killed later."""
    command = [sys.executable, "-c", SCRIPT.format(body=DISTURBANCES)]
    return subprocess.run(command, capture_output=True, text=True, start_new_session=True)


def test_a_signal_to_the_whole_group_leaves_the_workers_to_the_trainer(
    disturbed: subprocess.CompletedProcess[str],
) -> None:
    """Slurm, torchrun and Ctrl-C signal every process; the trainer still needs batches until it has saved."""
    assert disturbed.stdout == "signalled\n" * 5 + "continued\n", disturbed.stderr


def test_workers_end_with_a_killed_trainer_even_if_they_are_stuck() -> None:
    body = (
        "import multiprocessing; print(*(w.pid for w in multiprocessing.active_children()), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(body=body)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # torch's workers look for their parent every 5 s: these cannot
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(pids) == 2
    assert all(ends(pid) for pid in pids)


def test_a_killed_worker_is_one_line(disturbed: subprocess.CompletedProcess[str]) -> None:
    assert disturbed.returncode == 1
    ending = "(is killed by signal: Killed|exited unexpectedly)"  # torch has two ways to notice it
    line = rf"error: DataLoader worker \(pid\S* \d+\) {ending}: most likely the machine has run out of .*\n"
    assert re.fullmatch(line, disturbed.stderr)


def _gather_texts(text: str | None) -> list[str | None]:
    gathered: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, text)
    return gathered


def _on_a_rank(folder: str, changes: dict[str, Any], of_rank_1: dict[str, Any]) -> tuple[str, list[Any]]:
    """Build a loader on this live rank: its error, or else a step."""
    rank = dist.get_rank()
    ranks = DataRanks(rank, dist.get_world_size(), rank == 0, _gather_texts)
    settings = {"cache": f"{folder}/cache", **changes, **(of_rank_1 if rank else {})}
    training = Training(micro_batch_size=1, global_batch_size=2, sequence_length=32)
    try:
        loader = build_loader(Data(**settings), training, Model(), 0, ranks)
    except DataError as error:
        return str(error), []
    sequences = sequences_of(next_batches(loader)[0])
    loader.close()
    return "", sequences


def _files_looked_at(folder: str, source: Source) -> set[str]:
    """Open a corpus as if this rank were a node of its own, and return the files of shards that it opened."""
    rank = dist.get_rank()
    ranks = DataRanks(rank, dist.get_world_size(), True, _gather_texts, preparing_rank=rank)
    training = Training(micro_batch_size=1, global_batch_size=2, sequence_length=32)
    with counting(Path(folder)) as calls:
        build_loader(Data(sources=(source,)), training, Model(), 0, ranks)
    return {path for path in calls.opened if "train" in Path(path).name or "validation" in Path(path).name}


def test_nodes_share_out_the_check_of_a_corpus(tmp_path: Path) -> None:
    source = write_many_shards(tmp_path / "c", 101)
    first, second = workers.POOL.run(_files_looked_at, 2, source.path, source)
    assert (len(first), len(second)) == (52, 50)  # the first shard has a file of held-out documents, too
    assert len(first | second) == 102


class CountedCorpus(Corpus):
    """A corpus whose tokens say how many descriptors this process holds, and how many files it has opened."""

    calls: Calls

    def window(self, split: Split, number: int, length: int, piece: range | None = None) -> Window:
        """Read the sequence, then count."""
        begins = super().window(split, number, length, piece).begins
        counts = [descriptors(self.folder), len(self.calls.opened), 0, 0]
        return Window(np.array(counts, dtype=np.uint32), begins)


def test_a_worker_holds_few_descriptors_and_opens_nothing_again(tmp_path: Path) -> None:
    write_many_shards(tmp_path / "c", 200)
    source = CountedCorpus(tmp_path / "c")
    data = Data(sources=(Source(kind="synthetic"),), workers=1)
    training = Training(micro_batch_size=1, global_batch_size=1, sequence_length=LENGTH)
    with counting(tmp_path) as source.calls:
        loader = TrainLoader([source], data, training, 0, data_ranks())
        order = DataOrder(0, [source.count("train", LENGTH)], [1.0])
        for step in range(8):  # the files that the worker will need first
            source.window("train", order.locate(step).number, LENGTH)
        opened = len(source.calls.opened)
        counts = [sequences_of(next_batches(loader)[0])[0] for _ in range(60)]
        loader.close()
    assert [opened_in_worker for _, opened_in_worker, _ in counts[:8]] == [opened] * 8
    assert counts[-1][1] > opened + 30
    assert max(held for held, _, _ in counts) == 16


def _tokens(folder: Path, count: int) -> Source:
    folder.mkdir()
    write_corpus(plan_for(write_documents(folder, count)), BYTES, folder / "corpus")
    return Source(kind="tokens", path=str(folder / "corpus"))


def test_ranks_agree_or_all_stop(tmp_path: Path) -> None:
    texts = write_documents(tmp_path, 50)
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\nnonsense')
    bad = Source(kind="jsonl", path=str(tmp_path / "bad.jsonl"))
    gone = Source(kind="tokens", path=str(tmp_path / "gone"))
    good, different = (_tokens(tmp_path / str(count), count) for count in (50, 60))
    for source, of_rank_1, message in (
        (texts, texts, ""),
        (bad, bad, "bad.jsonl:2: broken JSON"),
        (good, gone, "holds no token shards"),
        (good, different, "not all ranks read the same data"),
    ):
        sources = {"sources": (source,)}, {"sources": (of_rank_1,)}
        (error, sequences), (error_1, sequences_1) = workers.POOL.run(_on_a_rank, 2, str(tmp_path), *sources)
        assert error == error_1
        assert message in error
        assert bool(error) == bool(message)
        assert error or sequences != sequences_1


def damaged_run(tmp_path: Path, source: Source, workers: int = 0) -> "tuple[TrainLoader, list[tuple[int, str]]]":
    """A loader with sequences of 1,000 tokens, and the list of what it marks."""
    marks: list[tuple[int, str]] = []
    data = Data(sources=(source,), cache=str(tmp_path / "cache"), workers=workers)
    training = Training(micro_batch_size=2, global_batch_size=4, sequence_length=1000)
    loader = build_loader(data, training, Model(), 0, data_ranks())
    loader.on_damage = lambda step, reason: marks.append((step, reason))
    return loader, marks


def take_steps(loader: TrainLoader, steps: int) -> None:
    for _ in range(steps):
        loader.next_step()


def test_a_late_find_names_shard_and_steps_and_marks_them(tmp_path: Path) -> None:
    folder = write_two_shards(tmp_path).folder
    loader, marks = damaged_run(tmp_path, Source(kind="tokens", path=str(folder)))
    verification = loader._verification
    assert verification is not None
    verification.seconds_between_checks = 0.01
    loader.load_state(loader.state() | {"sequences": 400, "steps": 1000})  # of a run that had another batch size
    take_steps(loader, 60)
    flip_bit(folder / "00000.train.bin", BLOCK + 77)
    until(lambda: verification.problem)
    message = (
        r"00000\.train\.bin is damaged: its bytes 1,048,576 to 2,097,151 do not .* Steps 1001 to 1060 may have been "
        r"trained on it: if there are checkpoints of them, they are marked as suspect"
    )
    for read in (loader.next_step, loader.state, loader.close):  # neither trains on it any more nor saves it
        with pytest.raises(DataError, match=message):
            read()
    step, reason = marks[0]
    assert step == 1001
    assert re.fullmatch(r"it may have been trained on damaged data: .*00000\.train\.bin is damaged: its .*", reason)


@pytest.mark.parametrize("find", ["state", "close"])
def test_damage_is_found_before_a_save_and_at_the_end_and_earlier_steps_are_right(tmp_path: Path, find: str) -> None:
    folder = write_two_shards(tmp_path).folder
    loader, marks = damaged_run(tmp_path, Source(kind="tokens", path=str(folder)))
    take_steps(loader, 60)
    loader.state()
    path = folder / "00000.train.bin"
    time = path.stat().st_mtime_ns
    flip_bit(path, BLOCK + 77)
    os.utime(path, ns=(time, time))
    if find == "state":
        with pytest.raises(DataError, match=r"00000\.train\.bin is damaged.*again$"):
            loader.state()
        assert not marks
        loader.close()  # nothing was read since; its thread would look on during other tests
    else:
        take_steps(loader, 60)
        with pytest.raises(DataError, match=r"00000\.train\.bin is damaged.* Steps 61 to 120 may have"):
            loader.close()
        assert [step for step, _ in marks] == [61]


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_is_one_line_before_it_is_trained_on(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchllm.data.verification, "_BYTES_AT_ONCE", 0)
    monkeypatch.setattr(torchllm.data.verification, "_BYTES_PER_SECOND", 1)
    folder = write_two_shards(tmp_path).folder
    path = folder / "00001.train.bin"
    for block in range(4):
        flip_bit(path, block * BLOCK)
    loader, marks = damaged_run(tmp_path, Source(kind="tokens", path=str(folder)), workers)
    with pytest.raises(DataError) as raised:
        take_steps(loader, 20)
    assert loader._steps == 0
    assert re.fullmatch(rf"{path} is damaged: .*: copy or prepare the corpus again", str(raised.value))
    assert not marks
    loader.close()


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: flip_bit(folder / "00000.train.bin", 0), r"00000\.train\.bin is damaged: its bytes 0 to"),
    (lambda folder: os.truncate(folder / "00000.train.bin", 100), r"00000\.train\.bin is 100 bytes"),
    (lambda folder: (folder / "00000.train.bin").unlink(), r"00000\.train\.bin is missing"),
    (lambda folder: (folder / "corpus.json").write_text("{"), r"corpus\.json is damaged"),
    (lambda folder: (folder / "shards.bin").unlink(), r"shards\.bin cannot be read"),
    (lambda folder: os.truncate(folder / "sums.bin", 1), r"sums\.bin was changed"),
]


def test_a_damaged_cache_is_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_documents(tmp_path, 200)
    state = real(tmp_path, source).state()
    (folder,) = (tmp_path / "cache").glob("jsonl-*")
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    for damage, message in DAMAGES:
        caplog.clear()
        damage(folder)
        assert real(tmp_path, source).state() == state
        assert re.search(message + ".*; its source is tokenized again", caplog.text)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == content
