import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_build import BYTES, plan_for, write_documents
from torchllm.data.cache import tokenize_source
from torchllm.data.corpus import Corpus, Synthetic
from torchllm.data.error import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenize_source(plan_for(write_documents(tmp_path, 100), validation_fraction=0.2), BYTES, tmp_path / "c")
    return tmp_path / "c"


def test_a_pickled_corpus_is_its_folder(folder: Path) -> None:
    corpus = Corpus(folder)
    pickled = pickle.dumps(corpus)
    assert len(pickled) < 1000
    copy = pickle.loads(pickled)
    assert np.array_equal(copy.window("train", 3, 50).ids, corpus.window("train", 3, 50).ids)


def test_the_fingerprint_is_of_the_content_not_the_place(folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "moved")
    fingerprint = Corpus(moved).fingerprint

    def fingerprint_of(count: int, validation_fraction: float) -> str:
        target = tmp_path / f"{count}-{validation_fraction}"
        plan = plan_for(write_documents(tmp_path, count), validation_fraction=validation_fraction)
        tokenize_source(plan, BYTES, target)
        return Corpus(target).fingerprint

    assert fingerprint_of(100, 0.2) == fingerprint
    assert len({fingerprint, fingerprint_of(100, 0.3), fingerprint_of(101, 0.2)}) == 3


def test_a_damaged_corpus_is_not_opened(folder: Path) -> None:
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
    assert ids.shape == (513,)
    assert begins.tolist() == [0]
    assert np.array_equal(ids, Synthetic(1000).window("train", 2**39, 512).ids)
    assert ids.max() < 1000
    for different in (source.window("train", 1, 512), source.window("validation", 2**39, 512)):
        assert (ids == different.ids).mean() < 0.05
