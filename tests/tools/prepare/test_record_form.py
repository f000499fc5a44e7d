"""Tables in Arrow, CSV and parquet files: texts, token ids, and what is refused."""

import gzip
import json
import tracemalloc
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.tools.prepare.test_sources import Read, read, read_all
from torchllm.config import Data, Source
from torchllm.data.corpus import Corpus
from torchllm.data.error import DataError
from torchllm.data.readers import ReaderSettings
from torchllm.data.tokenizer import ByteTokenizer, load_tokenizer
from torchllm.tools.prepare import tables
from torchllm.tools.prepare.build import write_corpus
from torchllm.tools.prepare.cache import plan_corpus
from torchllm.tools.prepare.chosen_files import choose_files
from torchllm.tools.prepare.counts import describe_corpus
from torchllm.tools.prepare.records import Origin

TEXTS = ["one", "two", "three"]


def write_arrow(path: Path, columns: dict[str, Any], compression: str | None = None, is_file: bool = False) -> None:
    table = pyarrow.table(columns)
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    write = pyarrow.ipc.new_file if is_file else pyarrow.ipc.new_stream
    with write(path, table.schema, options=options) as writer:
        writer.write_table(table)


def save_to_disk(folder: Path, texts: list[str]) -> None:
    """Write a folder as `datasets.Dataset.save_to_disk` does, and a cache of `map` beside."""
    folder.mkdir(parents=True)
    write_arrow(folder / "data-00000-of-00001.arrow", {"text": texts})
    write_arrow(folder / "cache-1.arrow", {"text": ["of another set"]})
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


def test_a_folder_of_datasets_is_its_data_files_by_split(tmp_path: Path) -> None:
    import datasets

    for name in ("train", "test", "validation"):
        save_to_disk(tmp_path / "sets" / name, [f"{text} of {name}" for text in TEXTS])
    found = choose_files(Source(kind="arrow", path=str(tmp_path / "sets")))
    assert [[Path(file.path).parent.name for file in files] for files in found] == [["train"], ["validation"]]
    own = datasets.Dataset.from_dict({"text": TEXTS})
    own.save_to_disk(str(tmp_path / "own"))
    for path in (tmp_path / "own", tmp_path / "own" / "data-00000-of-00001.arrow"):
        assert [record.text for record in read(Source(kind="arrow", path=str(path)), shards=3)] == TEXTS
    assert [record.text for record in read(Source(kind="arrow", path=str(tmp_path / "sets" / "test")))] == [
        f"{text} of test" for text in TEXTS
    ]


def test_a_folder_of_datasets_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "set", TEXTS)
    for state, message in (
        ('{"_data_files": [{"filename": "gone.arrow"}]}', r"state.json: names gone.arrow, which is missing"),
        ('{"_data_files": [], "_indices_files": [{}]}', r"state.json: .* flatten_indices"),
        ("[]", r"state.json: is no list of data files"),
    ):
        (tmp_path / "set" / "state.json").write_text(state)
        with pytest.raises(DataError, match=message):
            read(Source(kind="arrow", path=str(tmp_path / "set")))


def test_arrow_files_are_read_in_both_formats_compressed_ones_too(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    texts = pyarrow.array(["one " * 300, "two"]).dictionary_encode()
    for is_file, compression in product((False, True), (None, "zstd")):
        write_arrow(path, {"text": texts, "id": [1, 2]}, compression, is_file)
        assert [record.text for record in read(Source(kind="arrow", path=str(path)))] == ["one " * 300, "two"]


def test_an_arrow_file_that_breaks_off_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    table = pyarrow.table({"text": [f"text {number}" for number in range(12)]})
    cuts = {}  # bytes behind each batch
    for new in (pyarrow.ipc.new_file, pyarrow.ipc.new_stream):
        sink = path.open("wb")
        with sink, new(sink, table.schema) as writer:
            for batch in table.to_batches(4):
                writer.write_batch(batch)
                cuts[sink.tell()] = None
        whole = path.read_bytes()
        for broken in (
            *(whole[:cut] for cut in cuts),
            whole[:-1],
            whole[:-7],
            whole[:-40],
            whole + whole,
            whole + b"\0",
        ):
            path.write_bytes(broken)
            assert read(Source(kind="arrow", path=str(path)))[-1].fault == "unreadable file"
        cuts.clear()


CSV = '\ufefftext,n\r\none,1\r\n"two, ""q""\r\nline",2\r\n,3\r\nNA,4\r\n123,5\r\nx,y,z\r\nb\xe4d,6\r\n"open,7\r\n'


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(CSV.encode().replace("\xe4".encode(), b"\xe4"))
    where = [f"{path} row {row}" for row in range(8)]
    assert read_all(Source(kind="csv", path=str(path))) == [
        Read(where[0], "one"),
        Read(where[1], 'two, "q"\r\nline'),
        Read(where[2], "", "empty document"),
        Read(where[3], "NA"),
        Read(where[4], "123"),
        Read(where[5], "", "another number of cells"),
        Read(where[6], "", "not UTF-8"),
        Read(where[7], "", "a quote without its end"),
    ]


def test_a_column_of_masks_is_not_read_beside_the_texts_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,labels\none,b\xe4d\n")
    assert read_all(Source(kind="csv", path=str(path))) == [Read(f"{path} row 0", "one")]
    path.write_bytes(b"labels\none\n")
    assert read_all(Source(kind="csv", path=str(path), text_key="labels")) == [Read(f"{path} row 0", "one")]


def test_what_follows_an_arrow_stream_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    for is_file in (False, True):
        write_arrow(path, {"text": ["one"]}, is_file=is_file)
        path.write_bytes(path.read_bytes() + bytes(1 << 24))
        tracemalloc.start()
        assert read(Source(kind="arrow", path=str(path)))[-1].fault == "unreadable file"
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
        tracemalloc.stop()


LINES = "a line\n" * 20


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_stray_quote_costs_one_row(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    between = "," if suffix == "csv" else "\t"
    path = tmp_path / f"a.{suffix}"
    rows = [f"{number}{between}text {number}" for number in range(40)]
    for last in (rows[-1], f'39{between}"quoted{between} text"', '39,"text" 39'):
        rows[5] = f'5{between}"text 5'
        rows[-1] = last
        path.write_text("\n".join([f"id{between}text", *rows]) + "\n")
        records = read(Source(kind="csv", path=str(path)))
        faults = {record.origin.row: record.fault for record in records if record.fault}
        assert len(records) == 40
        assert faults.pop(5) == "a quote without its end"
        assert not faults or (last == '39,"text" 39' and list(faults) == [39])
    assert records[5].detail.startswith(": in '5")
    monkeypatch.setattr(tables, "_LONGEST_CELL", 100)
    path.write_text(path.read_text() + f'40{between}"{LINES}"\n')
    assert read(Source(kind="csv", path=str(path)))[:40] == [
        record._replace(detail=record.detail.replace("16,777,216", "100")) for record in records
    ]
    assert read(Source(kind="csv", path=str(path)))[40].fault == "a quote without its end"
    path.write_text(f'id{between}"text\n{rows[0]}\n')
    (record,) = read(Source(kind="csv", path=str(path)))
    assert (record.origin, record.fault) == (Origin(str(path)), "a quote without its end")


def test_csv_with_other_delimiters_and_compressed(tmp_path: Path) -> None:
    (tmp_path / "a.TSV").write_text("text\tn\none, two\t1\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"n,text\n1,three\n"))
    (tmp_path / "c.csv").write_text("text\nfour\n")
    records = read(Source(kind="csv", path=str(tmp_path)))
    assert [record.text for record in records] == ["one, two", "three", "four"]
    (tmp_path / "d.csv").write_text("text;n\nfive;1\n")
    (record,) = read(Source(kind="csv", path=str(tmp_path / "d.csv")))
    assert record.detail == ": no column 'text', it has: text;n (data.sources.text_key, messages_key or delimiter)"
    (tmp_path / "e.csv").write_text("text,text\nfive,six\n")
    (record,) = read(Source(kind="csv", path=str(tmp_path / "e.csv")))
    assert record.detail.startswith(": 2 columns are named 'text', it has: text, text")
    (record,) = read(Source(kind="csv", path=str(tmp_path / "d.csv"), delimiter=";"))
    assert record.text == "five"
    (tmp_path / "e.csv").write_text("text,text\na,b\n")
    (record,) = read(Source(kind="csv", path=str(tmp_path / "e.csv")))
    assert record.fault == "wrong key"


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
    assert header.skipped == {"token id over model.vocab": 1}
    assert (header.documents, header.text_bytes) == (3, 0)
    assert describe_corpus(header) == [
        "documents that were token ids already, and are used as they are: 3; of these, documents that end with "
        "data.tokenizer's end: 0"
    ]
    ids = Corpus(tmp_path / "c").open_shard("train", 0).read_ids(0, header.tokens).tolist()
    assert ids == [1, 2, 3, 5, *range(250)]


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
