"""Columns of token ids, and arrays of JSON."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.tools.prepare.test_sources import Read, read, read_all
from torchllm.config import Data, Source
from torchllm.config.errors import DataError
from torchllm.data.corpus import Corpus
from torchllm.data.readers import ReaderSettings
from torchllm.data.tokenizer import ByteTokenizer, load_tokenizer
from torchllm.tools.prepare.build import write_corpus
from torchllm.tools.prepare.cache import plan_corpus
from torchllm.tools.prepare.counts import describe_corpus


def write_ids(path: Path, columns: dict[str, Any]) -> Source:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return Source(kind="parquet", path=str(path), text_key="input_ids")


def test_token_ids_are_used_as_they_are(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [300, 4], [5], list(range(250))]
    source = write_ids(
        tmp_path / "a.parquet", {"input_ids": rows, "labels": rows, "attention_mask": [[1] * len(r) for r in rows]}
    )
    data = Data(cache=str(tmp_path), validation_fraction=0.0, on_bad_record="skip")
    header = write_corpus(
        plan_corpus(source, ReaderSettings(data, 258, ByteTokenizer())),
        partial(load_tokenizer, "bytes"),
        tmp_path / "c",
        max_bad_share=1.0,
    )
    assert header.skipped == {"token id that data.tokenizer does not have": 1}
    assert (header.documents, header.text_bytes) == (3, 0)
    assert describe_corpus(header) == [
        "documents that were token ids already, and are used as they are: 3; of these, documents that end with "
        "data.tokenizer's end: 0"
    ]
    ids = Corpus(tmp_path / "c").open_shard("train", 0).read_ids(0, header.tokens).tolist()
    assert ids == [1, 2, 3, 5, *range(250)]


def test_ids_of_another_tokenizer_are_not_laid_to_the_model(tmp_path: Path) -> None:
    source = write_ids(tmp_path / "a.parquet", {"input_ids": [[1, 2], [47872]]})
    lacks = r"a\.parquet row 1: token id that data\.tokenizer does not have \(47872; 'bytes' has 258 ids\); set it to "
    for vocab in (258, 50304):
        plan = plan_corpus(source, ReaderSettings(Data(), vocab, ByteTokenizer()))
        with pytest.raises(DataError, match=rf"{lacks}the one that the ids were made with$"):
            write_corpus(plan, partial(load_tokenizer, "bytes"), tmp_path / "c")


def test_rows_that_are_not_token_ids_are_refused(tmp_path: Path) -> None:
    ids = pyarrow.list_(pyarrow.int64())
    for columns, fault in (
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 0]]}, "masked token ids"),
        ({"input_ids": [[1, 2]], "labels": [[-100, 2]]}, "masked token ids"),
        ({"input_ids": [[1, -2]]}, "not token ids"),
        ({"input_ids": [[1, None]]}, "not token ids"),
        ({"input_ids": pyarrow.array([[]], ids)}, "empty document"),
        ({"input_ids": pyarrow.array([None], ids)}, "not text"),
        ({"input_ids": [[1.0]]}, "wrong key"),
        ({"other": [[1]]}, "wrong key"),
    ):
        (record,) = read(write_ids(tmp_path / "a.parquet", columns))
        assert record.fault == fault, columns


def test_a_json_array_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "one"}, 2, {"body": 3}], indent=1))
    assert read_all(Source(kind="jsonl", path=str(path)), shards=3) == [
        Read(f"{path} row 0", "one"),
        Read(f"{path} row 1", "", "not a JSON object"),
        Read(f"{path} row 2", "", "wrong key"),
    ]
    path.write_text('[{"text": "one"},\n]')
    (record,) = read_all(Source(kind="jsonl", path=str(path)))
    assert record.fault == "broken JSON"
