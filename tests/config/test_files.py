"""Files that users name: no FIFO, no device, no endless one."""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchllm.checkpoint.index import INDEX
from torchllm.checkpoint.manifest import FileRecord, Manifest
from torchllm.checkpoint.tensors import read_index
from torchllm.config import Source
from torchllm.config.errors import UserError
from torchllm.config.files import check_regular, open_regular, read_regular, sha256_of
from torchllm.data.corpus_header import read_description
from torchllm.data.tokenizer import load_tokenizer
from torchllm.tools.config.toml_files import read_files
from torchllm.tools.prepare.chat.template import read_template
from torchllm.tools.prepare.chosen_files import source_files
from torchllm.tools.prepare.formats.in_place import token_files

pytestmark = pytest.mark.quick


def read_config(path: Path) -> None:
    errors: list[str] = []
    read_files(str(path), errors)
    raise OSError(errors[0])


def read_index_of_checkpoint(path: Path) -> None:
    read_index(path, Manifest(1, {}, {}, 2, {}, {INDEX: FileRecord(0, "")}))


READERS: dict[str, Callable[[Path], Any]] = {
    "check_regular": check_regular,
    "open_regular": open_regular,
    "read_regular": read_regular,
    "x.toml": read_config,
    "index.json": read_index_of_checkpoint,
    "template.jinja": lambda path: read_template(Path("tokenizer.json"), str(path)),
    "corpus.json": lambda path: read_description(path.parent),
    "tokens": sha256_of,
    "tokenizer.json": lambda path: load_tokenizer(str(path)),
    "train.bin": lambda path: token_files(Source(kind="nanogpt", path=str(path))),
    "text.jsonl": lambda path: source_files(Source(kind="jsonl", path=str(path))),
    "text.txt": lambda path: source_files(Source(kind="text", path=str(path))),
}
"""name of a file -> what reads it"""


def test_each_reader_refuses_a_fifo_and_a_device(tmp_path: Path) -> None:
    for kind in ("fifo", "device"):
        (tmp_path / kind).mkdir()
        for name, read in READERS.items():
            path = tmp_path / kind / name
            if kind == "fifo":
                os.mkfifo(path)
            else:
                path.symlink_to("/dev/zero")
            with pytest.raises((OSError, UserError), match=r"regular file|not a file|there is no file"):
                read(path)
            if kind == "fifo":
                with pytest.raises(OSError, match="No such device"):  # it has no reader: nothing is left open
                    os.open(path, os.O_WRONLY | os.O_NONBLOCK)


def test_a_file_is_read_through_a_link_and_only_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", at_most=7) == b"content"
    assert check_regular(tmp_path / "link") == 7
    with pytest.raises(OSError, match=r"has over 0 MiB, more than such a file can have: .*link"):
        read_regular(tmp_path / "link", at_most=6)


def test_a_small_file_needs_little_memory_whatever_it_may_have(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    tracemalloc.start()
    read_regular(tmp_path / "file", at_most=1 << 30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
