"""Token files of other programs, read in place: each written as the original's own code does, or by it."""

import io
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pyarrow
import pytest

from torchllm.config import Data, Source
from torchllm.config.errors import DataError
from torchllm.data.checked_file import DamagedFile
from torchllm.data.corpus import close_shards
from torchllm.data.shard import SPLITS, Split
from torchllm.data.verification import Verification
from torchllm.tools.prepare.formats import mds, megatron
from torchllm.tools.prepare.formats.in_place import InPlaceCorpus, describe_in_place, in_place_settings

MDS = Path(__file__).parents[3] / "fixtures" / "mds"
END = 99
"""id that separates the documents of these tests"""
VOCAB = 1000

Documents = Sequence[Sequence[int]]
DOCUMENTS = [[1, 2, 3, END], [4, END], [5, 6, END], [*range(20, 40), END], [8, 9, END], [10, 11, 12, 13, END]]


def write_nanogpt(path: Path, documents: Documents, dtype: str = "<u2") -> None:
    """As data/openwebtext/prepare.py of karpathy/nanoGPT: the ids of all documents, one after another."""
    np.concatenate([np.array(document, dtype) for document in documents]).tofile(path)


def write_llmc(path: Path, documents: Documents, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> None:
    """As write_datafile in dev/data/data_common.py of karpathy/llm.c."""
    ids = [token for document in documents for token in document]
    header = [magic, version, len(ids), *[0] * 253]
    path.write_bytes(struct.pack("<256i", *header) + np.array(ids, dtype).tobytes())


def write_megatron(
    path: Path, documents: Documents, code: int = 8, dtype: str = "<u2", sentences: int = 1, version: int = 1
) -> None:
    """As IndexedDatasetBuilder of megatron/core/datasets/indexed_dataset.py, `sentences` sequences per document.

    path: NAME.idx. code: of the type of an id.
    """
    lengths: list[int] = []
    entries = [0]
    for document in documents:
        parts = np.array_split(np.array(document), sentences) if document else []
        lengths += [len(part) for part in parts]
        entries.append(len(lengths))
    sizes = np.array(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    pointers = np.cumsum([0, *sizes])[:-1]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(lengths), len(entries))
    arrays = [np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(entries, "<i8")]
    path.write_bytes(header + b"".join(array.tobytes() for array in arrays))
    write_nanogpt(path.with_suffix(".bin"), [document for document in documents if document], dtype)


def write_mds(folder: Path, documents: Documents, encoding: str = "ndarray:uint16") -> None:
    """As MDSWriter of mosaicml-streaming, one shard with a sample per document, of one dimension."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = []
    for document in documents:
        array = bytes([4, len(document)]) + np.array(document, "<u2").tobytes()
        samples.append(struct.pack("<I", len(array)) + array)
    record: dict[str, Any] = {
        "column_encodings": [encoding],
        "column_names": ["tokens"],
        "column_sizes": [None],
        "compression": None,
        "format": "mds",
        "samples": len(samples),
        "version": 2,
        "zip_data": None,
    }
    config = json.dumps(record).encode()
    start = 4 + 4 * (len(samples) + 1) + len(config)
    offsets = np.cumsum([start, *map(len, samples)])
    content = struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes() + config + b"".join(samples)
    (folder / "shard.00000.mds").write_bytes(content)
    record["raw_data"] = {"basename": "shard.00000.mds", "bytes": len(content), "hashes": {}}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [record]}))


def settings_of(folder: Path, **keys: Any) -> Data:
    return Data(**{"cache": str(folder / "cache"), "validation_fraction": 0.0} | keys)


def open_in_place(kind: Any, path: Path, data: Data, vocab: int = VOCAB, **keys: str) -> InPlaceCorpus:
    source = Source(kind=kind, path=str(path), **keys)
    return InPlaceCorpus(describe_in_place(source, data, vocab), in_place_settings(source, data), vocab)


def documents_of(corpus: InPlaceCorpus, split: Split = "train") -> list[list[int]]:
    window = corpus.window(split, 0, corpus.tokens(split) - 1)
    return [document.tolist() for document in np.split(window.ids, window.begins[1:])]


def written(kind: str, folder: Path) -> Data:
    """Write DOCUMENTS into two files of a folder, one after another, and return how to read them."""
    folder.mkdir(parents=True)
    first, second = DOCUMENTS[:4], DOCUMENTS[4:]
    if kind == "nanogpt":
        write_nanogpt(folder / "0.bin", first)
        write_nanogpt(folder / "1.bin", second)
        return settings_of(folder.parent, dtype="uint16", separator=END)
    if kind == "llmc":  # which cuts documents at the end of a file
        write_llmc(folder / "0.bin", [*DOCUMENTS[:3], DOCUMENTS[3][:7]])
        write_llmc(folder / "1.bin", [DOCUMENTS[3][7:], *second])
        return settings_of(folder.parent, separator=END)
    if kind == "megatron":
        write_megatron(folder / "0.idx", [first[0], [], *first[1:], []])
        write_megatron(folder / "1.idx", second, 4, "<i4", sentences=2)
    if kind == "mds":
        write_mds(folder / "0", first)
        write_mds(folder / "1", second)
    return settings_of(folder.parent)


KINDS = ["nanogpt", "llmc", "megatron", "mds"]


def test_documents_are_read_as_they_were_written(tmp_path: Path) -> None:
    for kind in KINDS:
        folder = tmp_path / kind
        data = written(kind, folder / "tokens")
        corpus = open_in_place(kind, folder / "tokens", data)
        assert documents_of(corpus) == DOCUMENTS, kind
        assert "files, 38 tokens to train on, 0 held out" in corpus.describe(), kind
        assert documents_of(pickle.loads(pickle.dumps(corpus))) == DOCUMENTS, kind
        length = 5
        for number in range(corpus.count("train", length)):
            whole = corpus.window("train", number, length)
            for piece in (range(2), range(1, 4), range(3, 5)):
                part = corpus.window("train", number, length, piece)
                assert part.ids.tolist() == whole.ids[piece.start : piece.stop + 1].tolist(), kind
                inside = whole.begins[(whole.begins >= piece.start) & (whole.begins <= piece.stop)]
                assert part.begins.tolist() == (inside - piece.start).tolist(), kind
                before = [begin for begin in whole.begins.tolist() if 0 < begin <= piece.start]
                assert part.document == (len(before) if piece.start else 0), kind
                assert part.position == (piece.start - max([0, *before]) if piece.start else 0), kind


def test_a_fingerprint_is_of_the_content_not_the_place(tmp_path: Path) -> None:
    for kind in KINDS:
        folder = tmp_path / kind
        data = written(kind, folder / "tokens")
        corpus = open_in_place(kind, folder / "tokens", data)
        (folder / "tokens").rename(folder / "moved")
        assert open_in_place(kind, folder / "moved", data).fingerprint == corpus.fingerprint, kind
        *_, file = sorted(path for path in (folder / "moved").rglob("*") if path.suffix in (".bin", ".mds"))
        content = bytearray(file.read_bytes())
        content[-4] ^= 1
        file.write_bytes(content)
        os.utime(file, (1, 1))
        changed = open_in_place(kind, folder / "moved", data)
        assert changed.fingerprint != corpus.fingerprint, kind
        close_shards()
        os.truncate(file, len(content) - 2)
        with pytest.raises(DataError, match=rf"{file} .*bytes"):
            changed.window("train", 0, corpus.tokens("train") - 1)


def flip_in_place(file: Path, byte: int) -> None:
    """Flip a bit of a file in place; its size and time of change stay."""
    time = file.stat().st_mtime_ns
    with file.open("r+b") as content:
        content.seek(byte)
        (old,) = content.read(1)
        content.seek(byte)
        content.write(bytes([old ^ 1]))
    os.utime(file, ns=(time, time))


def test_a_file_that_is_rewritten_with_its_size_and_time_is_another_one(tmp_path: Path) -> None:
    """For a new start, and for a run that reads it meanwhile."""
    for kind in KINDS:
        data = written(kind, tmp_path / kind / "tokens")
        corpus = open_in_place(kind, tmp_path / kind / "tokens", data)
        verification = Verification([corpus], 0, 1)
        verification.begin()
        *_, file = sorted(path for path in (tmp_path / kind).rglob("*") if path.suffix in (".bin", ".mds"))
        file.chmod(0o600)
        assert verification.look(), kind
        assert open_in_place(kind, tmp_path / kind / "tokens", data).fingerprint == corpus.fingerprint, kind
        flip_in_place(file, file.stat().st_size - 4)
        with pytest.raises(DamagedFile, match=rf"{file} has another content than when the run began"):
            verification.look()
        assert open_in_place(kind, tmp_path / kind / "tokens", data).fingerprint != corpus.fingerprint, kind


def test_a_compressed_shard_that_is_rewritten_is_decompressed_again(tmp_path: Path) -> None:
    data = settings_of(tmp_path)
    shutil.copytree(MDS / "zstd", tmp_path / "zstd")
    documents_of(open_in_place("mds", tmp_path / "zstd", data))
    file = tmp_path / "zstd" / "shard.00001.mds.zstd"
    flip_in_place(file, 0)
    close_shards()
    with pytest.raises(DataError, match=rf"{file} cannot be decompressed"):
        open_in_place("mds", tmp_path / "zstd", data)


def test_the_last_documents_are_held_out_where_no_file_is(tmp_path: Path) -> None:
    for kind in KINDS:
        place = tmp_path / kind
        data = written(kind, place / "tokens")
        held_out = replace(data, validation_fraction=0.4)
        corpus = open_in_place(kind, place / "tokens", held_out)
        assert documents_of(corpus) + documents_of(corpus, "validation") == DOCUMENTS, kind
        assert documents_of(corpus, "validation") == DOCUMENTS[4:], kind  # the first document after 60 % of the ids
        folder = place / "tokens"
        for path in sorted(folder.glob("1*")):
            path.rename(folder / f"fineweb_val_{path.name}")
        named = open_in_place(kind, folder, held_out)
        tokens = [named.tokens(split) for split in SPLITS]
        assert tokens == ([16, 22] if kind == "llmc" else [30, 8]), kind


def mds_arrays() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, 250, size=size).tolist() for size in (5, 1, 300, 17)]


def test_shards_of_mosaicmls_own_writer(tmp_path: Path) -> None:
    data = settings_of(tmp_path)
    for name in ("raw", "zstd", "columns"):
        shutil.copytree(MDS / name, tmp_path / name)
        corpus = open_in_place("mds", tmp_path / name, data)
        assert documents_of(corpus) == mds_arrays(), name
    assert len(list((tmp_path / "cache").glob("mds-*.mds"))) == 3
    static = open_in_place("mds", MDS / "static", data)
    assert documents_of(static) == np.arange(20).reshape(5, 4).tolist()
    separated = open_in_place("mds", MDS / "static", settings_of(tmp_path, separator=9))
    assert documents_of(separated) == [list(range(10)), list(range(10, 20))]


@pytest.mark.parametrize(
    ("change", "words"), [(5_000_000, "unpacks to more than the 78 bytes"), (-1, "unpacks to 1 bytes less than the 78")]
)
def test_a_shard_of_mds_that_unpacks_to_another_size_is_not_kept(
    tmp_path: Path, change: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mds, "_BLOCK", 1000)
    read = []

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            read.append(super().read(size))
            return read[-1]

    def open_counted(path: str, compression: str) -> Counted:
        with open_stream(path, compression=compression) as stream:
            return Counted(stream.read())

    open_stream = pyarrow.input_stream
    monkeypatch.setattr(pyarrow, "input_stream", open_counted)
    write_mds(tmp_path / "tokens", [[1, 2, 3]])
    shard = tmp_path / "tokens" / "shard.00000.mds"
    content = shard.read_bytes()
    size = len(content)
    shard.unlink()
    longer = content[:change] if change < 0 else content + bytes(change)
    with pyarrow.output_stream(f"{shard}.zstd", compression="zstd") as stream:
        stream.write(longer)
    packed = {"basename": f"{shard.name}.zstd", "bytes": Path(f"{shard}.zstd").stat().st_size}
    set_index(compression="zstd", zip_data=packed)(tmp_path / "tokens" / "index.json")
    with pytest.raises(DataError, match=words.replace("78", str(size))):
        open_in_place("mds", tmp_path / "tokens", settings_of(tmp_path))
    assert not list((tmp_path / "cache").glob("*.mds"))
    assert sum(map(len, read)) <= size + 1000


def test_the_ids_of_llama_3_in_llmc_are_of_32_bits(tmp_path: Path) -> None:
    write_llmc(tmp_path / "a.bin", [[1, 2, 128_000], [70_000, 3]], 20240801, 7, "<u4")
    corpus = open_in_place("llmc", tmp_path / "a.bin", settings_of(tmp_path), vocab=128_256)
    assert documents_of(corpus) == [[1, 2, 128_000], [70_000, 3]]


def test_megatrons_prefix_glob_and_file_are_found(tmp_path: Path) -> None:
    write_megatron(tmp_path / "wiki_text_document.idx", DOCUMENTS)
    for path in ("wiki_text_document", "wiki_text_document.bin", "wiki_text_document.idx", "wiki*", ""):
        assert documents_of(open_in_place("megatron", tmp_path / path, settings_of(tmp_path))) == DOCUMENTS


def test_a_sequence_of_megatrons_costs_a_search_of_the_index(tmp_path: Path) -> None:
    calls = []
    for count in (64, 4096):
        write_megatron(tmp_path / f"{count}.idx", [[1] * 9 + [END]] * count)
        corpus = open_in_place("megatron", tmp_path / f"{count}.idx", settings_of(tmp_path))
        corpus.window("train", 0, 20)
        with mock.patch.object(os, "pread", wraps=os.pread) as pread:
            corpus.window("train", count // 3, 20)
        calls.append(pread.call_count)
    assert calls[1] <= 1 + 2 * 12 + 2  # ids, two reads for each halving of 4096 documents, their begins
    assert calls[1] - calls[0] <= 2 * 6


Damage = Callable[[Path], None]


def rewrite(change: Callable[[bytes], bytes]) -> Damage:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def set_index(**keys: Any) -> Damage:

    def damage(path: Path) -> None:
        content = json.loads(path.read_text())
        content["shards"][0].update(keys)
        path.write_text(json.dumps(content))

    return damage


def set_entries(*entries: int) -> Damage:
    """Write other entries of the documents into an index of Megatron-LM."""
    written = np.array(entries, "<i8").tobytes()
    return rewrite(lambda content: content[: -len(written)] + written)


def swap_pointers(content: bytes) -> bytes:
    """Swap the offsets of two of the four sequences in an index of Megatron-LM."""
    return content[:58] + content[66:74] + content[58:66] + content[74:]


ONE_DIMENSION, TWO_DIMENSIONS = bytes([4, 4, 1, 0]), bytes([8, 4, 1, 0])
"""the first bytes of the first array of MDS"""
WRONG: list[tuple[str, str, Damage, str]] = [
    ("nanogpt", "0.bin", rewrite(lambda content: content[:-1]), "bytes, no whole number of ids of data.dtype 'uint16'"),
    ("nanogpt", "0.bin", lambda path: write_nanogpt(path, DOCUMENTS, "<u4"), 'set data.dtype = "uint32"'),
    ("nanogpt", "0.bin", lambda path: write_nanogpt(path, DOCUMENTS, "<i8"), 'set data.dtype = "uint32"'),
    ("nanogpt", "0.bin", lambda path: write_nanogpt(path, [[5, 1000]]), "its token 1 has the id 1000 >= model.vocab"),
    ("llmc", "0.bin", lambda path: write_nanogpt(path, DOCUMENTS), 'of kind "nanogpt"'),
    ("llmc", "0.bin", lambda path: write_llmc(path, DOCUMENTS, magic=20240522), "is an evaluation file of llm.c"),
    ("llmc", "0.bin", lambda path: write_llmc(path, DOCUMENTS, version=2), "has version 2"),
    ("llmc", "0.bin", rewrite(lambda content: content[:-2]), "but its header says"),
    ("megatron", "0.idx", rewrite(lambda content: b"?" + content[1:]), "is no index of Megatron-LM"),
    ("megatron", "0.idx", lambda path: write_megatron(path, DOCUMENTS, version=2), "has version 2 of Megatron-LM"),
    ("megatron", "0.idx", lambda path: write_megatron(path, DOCUMENTS, 5, "<i8"), "has ids of type int64"),
    ("megatron", "0.idx", rewrite(lambda content: content[:-8]), "but its header says"),
    ("megatron", "0.idx", rewrite(lambda content: content + bytes(4)), "is the index of a multimodal data set"),
    ("megatron", "0.idx", set_entries(0, 1, 1, 2, 3, 3, 3), "has 4 sequences, 3 of them in documents: write it again"),
    ("megatron", "0.idx", set_entries(1, 1, 1, 2, 3, 4, 4), "has document 0 out of order: write it again"),
    ("megatron", "0.idx", set_entries(0, 3, 1, 2, 3, 4, 4), "has document 2 out of order: write it again"),
    ("megatron", "0.idx", rewrite(swap_pointers), "has sequence 1 not behind the one before it: write it again"),
    ("megatron", "0.bin", rewrite(lambda content: content[:-2]), "0.idx says 60 bytes of 30 ids"),
    ("megatron", "0.bin", Path.unlink, "has no 0.bin with its ids in the same folder"),
    ("mds", "0/index.json", rewrite(lambda content: content[:9]), "is no index of mosaicml-streaming"),
    ("mds", "0/index.json", rewrite(lambda content: b"[" * 200_000), "is no index of mosaicml-streaming"),
    ("mds", "0/index.json", set_index(version=1), "version [1, 2]"),
    ("mds", "0/index.json", set_index(column_encodings=["str"]), "has the columns tokens (str)"),
    ("mds", "0/index.json", set_index(column_encodings=["ndarray:float32"]), "arrays of one integer type are read"),
    ("mds", "0/index.json", set_index(raw_data={"basename": "../a.mds", "bytes": 1}), "outside of its folder"),
    ("mds", "0/shard.00000.mds", Path.unlink, "there is no shard.00000.mds"),
    ("mds", "0/shard.00000.mds", rewrite(lambda content: content[:-2]), "the corpus says"),
    (
        "mds",
        "0/shard.00000.mds",
        rewrite(lambda content: content.replace(ONE_DIMENSION, TWO_DIMENSIONS)),
        "has an array of more dimensions than one in sample 0",
    ),
]


@mock.patch.object(megatron, "_ENTRIES_PER_READ", 2)
def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    for number, (kind, name, damage, message) in enumerate(WRONG):
        folder = tmp_path / str(number) / "tokens"
        folder.parent.mkdir()
        data = written(kind, folder)
        damage(folder / name)
        with pytest.raises(DataError) as error:
            open_in_place(kind, folder, data)
        assert message in str(error.value)
        assert str(folder / Path(name).parent) in str(error.value)


@pytest.mark.parametrize("vocab", [1000, 128_256, 1_000_000])
@pytest.mark.parametrize("share", [0.0, 0.001, 1.0])
def test_ids_of_twice_the_bits_are_found_whatever_their_size(vocab: int, share: float, tmp_path: Path) -> None:
    """share: of the ids that may be over 16 bits."""
    random = np.random.default_rng(0)
    ids = np.where(random.random(20_000) < share, random.integers(0, vocab, 20_000), random.integers(0, 1000, 20_000))
    for dtype, double in (("uint16", "uint32"), ("uint32", "int64")):
        ids.astype(double).tofile(tmp_path / "a.bin")
        keys = {"separator": END, "dtype": dtype}
        with pytest.raises(DataError, match=rf'a\.bin has at most \d+ in every second id .* data\.dtype = "{double}"$'):
            open_in_place("nanogpt", tmp_path, settings_of(tmp_path, **keys), vocab)
        right = open_in_place("nanogpt", tmp_path, settings_of(tmp_path, **keys | {"dtype": double}), vocab)
        assert right.tokens("train") == len(ids)
    begin = np.tile([500, 0], 2**12)  # a file may begin with anything
    np.concatenate([begin, random.integers(0, 1000, 20_000)]).astype("uint16").tofile(tmp_path / "a.bin")
    open_in_place("nanogpt", tmp_path, settings_of(tmp_path, separator=END, dtype="uint16"), vocab)


def test_a_header_is_not_read_as_ids_of_nanogpt(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    ids = np.array([7, 8, END] * 50, "<u2")

    def save(write: Callable[..., None]) -> None:
        with path.open("wb") as file:
            write(file, ids)

    for write, advice in (
        (lambda: save(np.save), r"numpy\.load\(FILE\)\.tofile"),
        (lambda: save(np.savez), "is a zip archive"),
        (lambda: write_llmc(path, DOCUMENTS), 'set kind = "llmc"'),
        (lambda: write_llmc(path, DOCUMENTS, magic=20240801, version=7, dtype="<u4"), 'set kind = "llmc"'),
    ):
        write()
        with pytest.raises(DataError, match=rf"a\.bin .*{advice}"):
            open_in_place("nanogpt", tmp_path, settings_of(tmp_path, dtype="uint16", separator=END), vocab=65_536)


def test_a_damaged_description_is_written_anew(tmp_path: Path) -> None:
    data = written("nanogpt", tmp_path / "data")
    whole = open_in_place("nanogpt", tmp_path / "data", data)
    (path,) = (tmp_path / "cache").iterdir()
    content = path.read_bytes()
    for damaged in (b"[" * 200_000, content[:-9], b"{}", b"[{}, 1, []]"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{path} is damaged: the next start writes it anew"):
            pickle.loads(pickle.dumps(whole))  # as a worker opens it
        assert open_in_place("nanogpt", tmp_path / "data", data).fingerprint == whole.fingerprint
        assert path.read_bytes() == content


def test_an_id_over_the_vocabulary_is_found_when_it_is_read(tmp_path: Path) -> None:
    ids: npt.NDArray[np.uint16] = np.full(200_000, 5, np.uint16)
    ids[150_000] = 1000
    ids.tofile(tmp_path / "a.bin")
    corpus = open_in_place("nanogpt", tmp_path, settings_of(tmp_path, dtype="uint16", separator=END))
    corpus.window("train", 0, 1000)
    with pytest.raises(DataError, match=r"a\.bin: its token 150,000 has the id 1000 >= model\.vocab = 1000"):
        corpus.window("train", 149, 1000)


def test_a_separator_that_never_comes_is_told(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "a.bin", DOCUMENTS)
    write_nanogpt(tmp_path / "b.bin", DOCUMENTS)
    keys = {"dtype": "uint16"}
    described = [
        open_in_place("nanogpt", tmp_path, settings_of(tmp_path, separator=separator, **keys)).describe()
        for separator in (END, END + 1)
    ]
    assert described[1] == (
        f"{described[0]}; no document ends in the first 1,048,576 tokens of each file (data.separator = {END + 1})"
    )


def test_of_one_document_the_last_tokens_are_held_out(tmp_path: Path) -> None:
    """As nanoGPT's own preparation of Shakespeare."""
    source = Source(kind="nanogpt", path=str(tmp_path / "a"))
    (tmp_path / "a").mkdir()
    for number in range(2):
        np.arange(number * 50, number * 50 + 50, dtype="<u2").tofile(tmp_path / "a" / f"{number}.bin")
    data = settings_of(tmp_path, dtype="uint16", separator=END + 1, validation_fraction=0.1, sources=(source,))
    corpus = open_in_place("nanogpt", tmp_path / "a", data)
    tokens = [corpus.window(split, 0, corpus.tokens(split) - 1).ids.tolist() for split in SPLITS]
    assert tokens == [list(range(90)), list(range(90, 100))]
