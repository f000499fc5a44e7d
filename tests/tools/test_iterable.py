"""An iterable of token lists is the same data as a corpus of these documents, and a run on it resumes where it was."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import IterableWrapper, Loader
from torchdata.stateful_dataloader import StatefulDataLoader

import torchllm.data.loader
from tests.tools.prepare.test_build import write_corpus_of, write_documents
from torchllm.config import Data, Model, Source, Training
from torchllm.config.errors import DataError
from torchllm.data.batch import Batch
from torchllm.data.loader import DataRanks, TrainLoader
from torchllm.data.order import Location
from torchllm.data.packing import SequencePieces
from torchllm.tools.iterable import IterableLoader

CPU = torch.device("cpu")
LENGTH = 16
TRAINING = Training(steps=3, micro_batch_size=2, global_batch_size=8, sequence_length=LENGTH)
MODEL = Model(vocab=258)
ALONE = DataRanks()


def loader(examples: Iterable[Any], ranks: DataRanks = ALONE, mask: bool = True, **held_out: Any) -> IterableLoader:
    return IterableLoader(examples, Data(document_mask=mask), TRAINING, MODEL, ranks, **held_out)


def steps(data: IterableLoader | TrainLoader, count: int) -> list[Batch]:
    return [batch for _ in range(count) for batch in data.next_step().unpack(CPU)]


def are_equal(batches: list[Batch], others: list[Batch]) -> bool:
    pairs = zip(batches, others, strict=True)
    fields = [pair for batch, other in pairs for pair in zip(batch, other, strict=True)]
    return all(torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two for one, two in fields)


class InOrder:
    """The order of a corpus as it lies on the disk."""

    def locate(self, number: int) -> Location:
        return Location(0, 0, number)


def documents_of(seed: int, count: int = 60) -> list[list[int]]:
    """Documents of 1 to 69 tokens: many in a sequence, and one in several."""
    random = np.random.default_rng(seed)
    return [random.integers(258, size=random.integers(1, 70)).tolist() for _ in range(count)]


def test_batches_are_those_of_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchllm.data.loader, "DataOrder", lambda *_: InOrder())
    corpus = write_corpus_of(write_documents(tmp_path, 60), tmp_path / "corpus", validation_fraction=0.0)
    stream = corpus.window("train", 0, corpus.tokens("train") - 1)
    documents = np.split(stream.ids.astype(np.int64), stream.begins[1:])
    several_ranks = (ALONE, DataRanks(1, 2), DataRanks(0, 1, pieces=SequencePieces(4, (1, 2))))
    for mask, ranks in itertools.product((False, True), several_ranks):
        settings = Data((Source("tokens", str(tmp_path / "corpus")),), workers=0, document_mask=mask)
        expected = steps(TrainLoader([corpus], settings, TRAINING, 0, ranks), 3)
        assert are_equal(steps(loader(documents, ranks, mask), 3), expected), (mask, ranks)


def test_a_token_without_a_label_is_not_trained() -> None:
    labeled = [{"input_ids": list(range(24)), "labels": [-100] * 10 + list(range(10, 24))} for _ in range(20)]
    (batch, *_) = steps(loader(labeled), 1)
    trained = batch.labels[0] != -100
    assert trained.tolist() == [number >= 10 for number in range(1, 17)]
    assert batch.labels[0, trained].tolist() == list(range(10, 17))
    assert batch.labels[1].tolist() == [*range(17, 24), -100, *[-100] * 8]  # token 24 begins another example


class Endless:
    """Documents over and over, without a state."""

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.cycle(documents_of(0))


class Shuffled(torch.utils.data.Dataset[Any]):
    documents = documents_of(0, 200)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor(self.documents[number])


def shuffled() -> StatefulDataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return StatefulDataLoader(Shuffled(), batch_size=None, sampler=Sampled(generator))


class Sampled(torch.utils.data.RandomSampler):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(Shuffled(), generator=generator)


ITERABLES = {
    "list": lambda: documents_of(0, 200),
    "generator": lambda: iter(Endless()),
    "endless": Endless,
    "node": lambda: Loader(IterableWrapper(Endless())),
    "dataloader": shuffled,
    "long": lambda: [list(range(250)) * 20],
}


@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("name", ITERABLES)
def test_a_run_resumes_with_the_next_token(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    make = ITERABLES[name]
    expected = steps(loader(make()), 6)
    data, resumed = loader(make()), []
    for _ in range(3):  # and on from there, and again
        resumed += steps(data, 2)
        state = json.loads(json.dumps(data.state()))
        data = loader(make())
        data.load_state(state)
        assert data.state() == state
    assert are_equal(resumed, expected)
    assert state["sequences"] == 6 * TRAINING.global_batch_size
    assert ("examples are read again and skipped" in caplog.text) == (name in ("list", "generator", "endless"))


def test_the_last_token_of_a_finite_iterable_is_trained() -> None:
    windows = [list(range(LENGTH))] * (2 * TRAINING.global_batch_size)
    data = loader(windows)
    batches = steps(data, 2)
    assert all(batch.tokens.tolist() == [list(range(LENGTH))] * 2 for batch in batches)
    assert batches[-1].labels[-1].tolist() == [*range(1, LENGTH), -100]
    state = data.state()
    message = (
        "has ended after 16 examples, in step 3 of training.steps = 3: have it begin again, or lower training.steps"
    )
    with pytest.raises(DataError, match=message):
        data.next_step()
    longer = loader([*windows, [7] * 200])
    longer.load_state(state)
    assert longer.next_step().unpack(CPU)[0].tokens.eq(7).all()


def test_what_is_no_example_is_refused() -> None:
    no_list = "example 1 of the iterable: must be a list"
    unlike = "labels must be as long as input_ids, each the same id or -100"
    wrong: list[tuple[Any, str]] = [
        ("some text", f"{no_list} of token ids, or a mapping with"),
        ([0.5], no_list),
        ([[1, 2]], no_list),
        ({"text": [1]}, no_list),
        ([1, 258], "example 1 of the iterable: 258 is no token id, which are from 0 to model.vocab - 1 = 257"),
        ([-100], "example 1 of the iterable: -100 is no token id"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, unlike),
        ({"input_ids": [1, 2], "labels": [1]}, unlike),
    ]
    for example, message in wrong:
        with pytest.raises(DataError) as error:
            loader([example]).next_step()
        assert message in str(error.value)
    with pytest.raises(DataError, match="state_dict may hold numbers, texts, tensors, lists and dicts"):
        loader(Opaque()).next_step()


def test_other_data_than_that_of_the_checkpoint_is_refused() -> None:
    data = loader(documents_of(0, 200))
    data.next_step()
    state = data.state()
    for examples in (documents_of(1, 200), documents_of(0, 3)):
        with pytest.raises(DataError, match=r"other data: example \d+ of the iterable is another one now"):
            loader(examples).load_state(state)
    state["fingerprint"]["sequence_length"] = 8
    with pytest.raises(DataError, match="sequence_length: 8 in the checkpoint, 16 now"):
        loader(documents_of(0, 200)).load_state(state)
    with pytest.raises(DataError, match=r"was trained on data.sources, and this recipe reads an iterable"):
        data.load_state({"sequences": 8, "steps": 1, "stages": []})
    corpus_loader = TrainLoader([], Data(sources=()), TRAINING, 0, ALONE)
    with pytest.raises(DataError, match="was trained on an iterable"):
        corpus_loader.load_state(state)


def test_ranks_that_read_other_tokens_are_an_error_in_the_first_step() -> None:
    texts: list[str | None] = []

    def gather(text: str | None) -> list[str | None]:
        texts.append(text)
        return texts

    ranks = DataRanks(gather_texts=gather)
    for _ in range(2):
        loader(documents_of(0), ranks).next_step()
    with pytest.raises(DataError, match="the ranks have read different tokens"):
        loader(documents_of(1), ranks).next_step()


class Opaque:
    """A state that only a program could read."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(documents_of(0))

    def state_dict(self) -> dict[str, Any]:
        return {"random": np.random.default_rng}


def test_held_out_sequences_are_those_of_all_ranks() -> None:
    held_out = [[number] * (LENGTH + 1) for number in range(10)]
    seen = []
    for rank in range(2):
        data = loader([], DataRanks(rank, 2), held_out=iter(held_out))
        assert data.validation_sequences(5) == 5
        for _ in range(2):  # each evaluation has the same
            batches = list(data.validation_batches(5, CPU))
        assert len(batches) == 2
        seen += [labels for batch in batches for labels in batch.labels.tolist() if set(labels) != {-100}]
    assert len(seen) == 5
    assert sorted({label for labels in seen for label in labels} - {-100}) == [0, 1, 2, 3, 4]
    assert loader([], held_out=held_out).validation_sequences(100) == 10
    with pytest.raises(
        DataError, match=r"evaluate.interval: give IterableLoader\(..., held_out=...\) examples, or set"
    ):
        loader([]).validation_sequences(5)
    with pytest.raises(DataError, match="held_out has not a single sequence"):
        loader([], held_out=[[1]]).validation_sequences(5)
