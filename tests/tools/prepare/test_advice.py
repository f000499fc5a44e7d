"""The advice of an error about a source is tried: it cures it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from torchllm.config import Data, Source
from torchllm.config.errors import DataError
from torchllm.data.readers import ReaderSettings, reader_of
from torchllm.data.tokenizer import load_tokenizer

TEXT = "some words of a text. "
ROWS = "".join(f"{json.dumps({'text': TEXT})}\n" for _ in range(30))


def write_files(folder: Path) -> None:
    files = {
        "book.txt": TEXT * 90,
        "texts/a.txt": TEXT,
        "programs/a.py": TEXT,
        "tests/a.txt": TEXT,
        "test/a.txt": TEXT,
        "rows.jsonl": ROWS,
        "rows.txt": ROWS,
        "folder/rows.jsonl": ROWS,
        "body.jsonl": ROWS.replace('"text"', '"body"'),
        "one_bad.jsonl": f"no json\n{ROWS}",
        "many_bad.jsonl": ROWS + "no json\n" * 15,
        "windows.txt": f"{TEXT}\r\n\r\n" * 30,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "texts" / "b.txt").symlink_to("/nowhere")
    pyarrow.parquet.write_table(pyarrow.table({"body": [TEXT] * 9}), folder / "rows.parquet")
    np.arange(200, dtype="<u4").tofile(folder / "ids.bin")


class Advised(NamedTuple):
    wrong: dict[str, Any]
    """keys of the source, and of [data]"""
    says: str
    cure: dict[str, Any]
    """keys that are changed"""


SKIP = {"on_bad_record": "skip"}
ADVISED = [
    Advised({"kind": "parquet", "path": "rows.jsonl"}, 'file is for kind = "jsonl"', {"kind": "jsonl"}),
    Advised({"kind": "text", "path": "rows.parquet"}, 'kind = "parquet"', {"kind": "parquet", "text_key": "body"}),
    Advised({"kind": "text", "path": "rows.txt"}, 'set kind = "jsonl"', {"kind": "jsonl"}),
    Advised({"kind": "text", "path": "folder"}, 'set kind = "jsonl"', {"kind": "jsonl"}),
    Advised({"kind": "parquet", "path": "texts"}, 'set kind = "text"', {"kind": "text", "path": "texts/a.txt"}),
    Advised({"kind": "text", "path": "programs"}, 'path = "programs/**/*.py"', {"path": "programs/**/*.py"}),
    Advised({"kind": "jsonl", "path": "body.jsonl"}, "set that key to a name that the file has", {"text_key": "body"}),
    Advised({"kind": "parquet", "path": "rows.parquet"}, "set that key to a name that", {"text_key": "body"}),
    Advised(
        {"kind": "text", "path": "windows.txt", "delimiter": "\n\n"},
        r'set it to "\\r\\n\\r\\n", which is there',
        {"delimiter": "\r\n\r\n"},
    ),
    Advised({"kind": "text", "path": "book.txt", "delimiter": "<s>"}, "or to nothing$", {"delimiter": ""}),
    Advised({"kind": "jsonl", "path": "one_bad.jsonl", "max_bad_share": 0.05}, 'on_bad_record = "skip"', SKIP),
    Advised({"kind": "jsonl", "path": "many_bad.jsonl"} | SKIP, "at least 0.34", {"max_bad_share": 0.34}),
    Advised({"kind": "text", "path": "texts"}, "b.txt: unreadable .* take it out", {"path": "texts/a.txt"}),
    Advised({"kind": "text", "path": "texts"} | SKIP, "max_bad_share to at least 1$", {"max_bad_share": 1.0}),
    Advised({"kind": "text", "path": "*st/*.txt"}, "by the file's name", {"path": "test/a.txt"}),
    Advised({"kind": "nanogpt", "path": "ids.bin", "dtype": "uint16"}, 'dtype = "uint32"', {"dtype": "uint32"}),
    Advised({"kind": "text", "path": "book.txt", "max_raw_mib": 0.001}, "data.max_raw_mib", {"max_raw_mib": 1.0}),
]
OF_SOURCE = ("kind", "path", "text_key", "delimiter")


def read(keys: dict[str, Any], folder: Path) -> None:
    source = Source(**{key: value for key, value in keys.items() if key in OF_SOURCE})
    others = {key: value for key, value in keys.items() if key not in OF_SOURCE}
    data = Data(sources=(source,), cache=str(folder / "cache"), separator=0, **others)
    settings = ReaderSettings(data, 300, load_tokenizer("bytes"))
    reader = reader_of(source.kind)
    assert reader.open(source, reader.prepare(source, settings), settings).count("train", 16)


@pytest.mark.parametrize("case", ADVISED, ids=lambda case: f"{case.wrong['kind']} {case.wrong['path']}")
def test_the_advice_of_an_error_cures_it(case: Advised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=case.says.replace("**", r"\*\*").replace("/*.", r"/\*.")):
        read(case.wrong, tmp_path)
    read(case.wrong | case.cure, tmp_path)
