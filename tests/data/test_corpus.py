import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_build import ENCODER, plan_for, write_documents
from torchllm.data.cache import tokenize_source
from torchllm.data.corpus import Corpus, Synthetic
from torchllm.data.error import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenize_source(plan_for(write_documents(tmp_path, 100), validation_fraction=0.2), ENCODER, tmp_path / "c")
    return tmp_path / "c"


def test_a_pickled_corpus_is_its_folder(folder: Path) -> None:
    corpus = Corpus(folder)
    pickled = pickle.dumps(corpus)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    assert np.array_equal(again.window("train", 3, 50)[0], corpus.window("train", 3, 50)[0])


def test_the_fingerprint_is_of_the_content_not_the_place(folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "moved")
    fingerprint = Corpus(moved).fingerprint
    tokenize_source(plan_for(write_documents(tmp_path, 100), validation_fraction=0.2), ENCODER, tmp_path / "again")
    tokenize_source(plan_for(write_documents(tmp_path, 100), validation_fraction=0.3), ENCODER, tmp_path / "split")
    tokenize_source(plan_for(write_documents(tmp_path, 101), validation_fraction=0.2), ENCODER, tmp_path / "more")
    assert Corpus(tmp_path / "again").fingerprint == fingerprint
    assert len({fingerprint, Corpus(tmp_path / "split").fingerprint, Corpus(tmp_path / "more").fingerprint}) == 3


def test_what_is_damaged_is_not_opened(folder: Path) -> None:
    header, tokens = folder / "corpus.json", folder / "00000.train.bin"
    good, content = header.read_text(), tokens.read_bytes()
    tokens.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"00000\.train\.bin is .* bytes, corpus\.json says"):
        Corpus(folder)
    tokens.unlink()
    with pytest.raises(DataError, match=r"00000\.train\.bin is missing"):
        Corpus(folder)
    tokens.write_bytes(content)
    changed = json.loads(good)
    changed["dtype"] = "<u4"
    for text, message in (
        (good[:-10], "damaged"),
        ("{}", "format None"),
        (json.dumps(changed), "was changed"),
    ):
        header.write_text(text)
        with pytest.raises(DataError, match=message):
            Corpus(folder)
    header.write_text(good)
    Corpus(folder)


def test_synthetic_is_a_function_of_split_and_number() -> None:
    source = Synthetic(1000)
    ids, begins = source.window("train", 2**39, 512)
    assert (ids.shape, begins.tolist()) == ((513,), [0])
    assert np.array_equal(ids, Synthetic(1000).window("train", 2**39, 512)[0])
    assert ids.max() < 1000
    for other in (source.window("train", 1, 512)[0], source.window("validation", 2**39, 512)[0]):
        assert (ids == other).mean() < 0.05
