"""The files at a path of the config: what their names say, and links."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchllm.config.errors import DataError
from torchllm.tools.prepare.file_search import FoundFile, find_files


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def found_in(path: Path | str) -> list[str]:
    return [file.path for file in find_files(str(path), lambda name: True).files]


SPLIT_OF_NAME = {
    "train.jsonl": "train",
    "data/train-00000-of-00001.parquet": "train",
    "latest.jsonl": "train",
    "contest/a.jsonl": "train",
    "devices/evaluated/interval/protestés/détest/tests/a.jsonl": "train",
    "test.jsonl": "test",
    "data/test-00000-of-00001.parquet": "test",
    "TEST/a.jsonl": "test",
    "a_test2.jsonl": "test",
    "dev/test.jsonl": "test",
    "val.bin": "held out",
    "tiny_val_000000.bin": "held out",
    "valid/a.jsonl": "held out",
    "x.validation.jsonl": "held out",
    "my-dev.txt": "held out",
    "eval/deep/a.txt": "held out",
}


def test_names_below_the_path_say_the_split(tmp_path: Path) -> None:
    root = tmp_path / "test" / "val"
    for name, split in SPLIT_OF_NAME.items():
        write(root, name)
        (file,) = find_files(str(root), lambda name: True).files
        assert file == FoundFile(str(root / name), split)
        (by_itself,) = find_files(str(root / name), lambda name: True).files
        assert by_itself.split == "train"
        (by_glob,) = find_files(f"{root}/**/*", lambda name: True).files
        assert by_glob == file
        (root / name).unlink()


def test_words_of_the_glob_itself_say_nothing(tmp_path: Path) -> None:
    write(tmp_path, "a/test/x-dev.jsonl", "a/test/x-train.jsonl")
    files = find_files(f"{tmp_path}/*/test/*.jsonl", lambda name: True).files
    assert [file.split for file in files] == ["held out", "train"]
    files = find_files(f"{tmp_path}/a/te*/x-dev.jsonl", lambda name: True).files
    assert [file.split for file in files] == ["test"]


def test_folders_behind_links_are_searched(tmp_path: Path) -> None:
    write(tmp_path, "data/a.txt", "disk2/deep/b.txt", "disk3/c.txt")
    (tmp_path / "data" / "shard1").symlink_to("../disk2")
    (tmp_path / "disk2" / "more").symlink_to("../disk3")
    expected = [f"{tmp_path}/data/{name}" for name in ("a.txt", "shard1/deep/b.txt", "shard1/more/c.txt")]
    assert (
        found_in(tmp_path / "data")
        == found_in(f"{tmp_path}/data/**/*.txt")
        == found_in(f"{tmp_path}/data/**")
        == expected
    )
    (tmp_path / "link").symlink_to("data")
    assert len(found_in(tmp_path / "link")) == 3


def test_links_that_lead_back_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path, "data/a.txt", "data/b/c.txt", "other/d.txt", "else.txt")
    for name, target in (("data/self", "."), ("data/b/up", ".."), ("data/above", ".."), ("other/back", "../data")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "data" / "other").symlink_to("../other")
    expected = [f"{tmp_path}/data/{name}" for name in ("a.txt", "b/c.txt", "other/d.txt")]
    assert found_in(tmp_path / "data") == found_in(f"{tmp_path}/data/**/*.txt") == expected


def test_each_file_counts_once(tmp_path: Path) -> None:
    write(tmp_path, "data/real/a.txt", "blobs/1")
    (tmp_path / "data" / "again.txt").symlink_to("real/a.txt")
    (tmp_path / "data" / "all").symlink_to("real")
    (tmp_path / "data" / "twice").symlink_to("../blobs")
    (tmp_path / "data" / "z.txt").symlink_to("../blobs/1")
    os.link(tmp_path / "data" / "real" / "a.txt", tmp_path / "data" / "copy.txt")  # as good as a copy
    expected = [f"{tmp_path}/data/{name}" for name in ("copy.txt", "real/a.txt", "twice/1")]
    assert found_in(tmp_path / "data") == found_in(f"{tmp_path}/data/**") == expected
    assert found_in(f"{tmp_path}/data/*/*.txt") == [expected[1]]
    assert found_in(f"{tmp_path}/data/a*.txt") == [f"{tmp_path}/data/again.txt"]


def test_a_glob_finds_what_pythons_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.txt", "b/c.txt", "b/d/e.txt", "b/d/.hidden.txt", ".git/x.txt", "b/[1].txt", "b/d/f.bin")
    monkeypatch.chdir(tmp_path)
    patterns = ("**/*.txt", "*.txt", "b/**/e.txt", "b/**", "**/d/**/*", "*/**/[a-e].txt", "./**/?.txt", "b/[[]1].txt")
    for pattern in patterns:
        expected = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
        assert found_in(pattern) == expected, pattern
        assert found_in(f"{tmp_path}/{pattern}") == [f"{tmp_path}/{path}" for path in expected]
    assert found_in("b/[1].txt") == ["b/[1].txt"]
    assert find_files("*", lambda name: True).folders == 1
    assert find_files(".", lambda name: name.endswith(".txt")).ignored == {".bin": 1, "hidden": 1}


OUTPUTS = {
    "a run": ("config.toml", "metrics.jsonl", "checkpoints/step-00000002/manifest.json", "hang/1/vm.txt"),
    "a run that starts": ("lease/000001",),
    "a checkpoint": ("step-00000002/__0_0.distcp", "step-00000002/index.json"),
    "tokens": ("0-text-a/corpus.json", "0-text-a/shards.bin"),
    "unfinished tokens": ("0-text-a/00000.json", "0-text-a/00000.train.bin"),
    "a cache": (
        "jsonl-0123456789abcdef/corpus.json",
        "verified/0123456789abcdef-01234567",
        "nanogpt-0123456789abcdef.json",
    ),
    "commits": ("revisions/org--set@newest",),
    "a model": ("model.safetensors", "README.md", "config.json"),
}


@pytest.mark.parametrize("names", OUTPUTS.values(), ids=OUTPUTS)
def test_what_torchllm_has_written_is_left_out_and_named(names: Sequence[str], tmp_path: Path) -> None:
    write(tmp_path / "data", "a.txt", "deep/corpus.json", "deep/config.toml", "lease/contract.txt", "verified/b.txt")
    expected = [f"{tmp_path}/data/{name}" for name in ("a.txt", "deep/config.toml", "deep/corpus.json")]
    expected += [f"{tmp_path}/data/{name}" for name in ("lease/contract.txt", "verified/b.txt")]
    write(tmp_path / "data" / "deep" / "own", *names)
    write(tmp_path / "elsewhere", *names)
    (tmp_path / "data" / "latest").symlink_to("../elsewhere")
    for path in ("data", "data/**", "data/**/*", "d*/**"):
        found = find_files(f"{tmp_path}/{path}", lambda name: True)
        assert [file.path for file in found.files] == expected, path
        assert any(folder.startswith(f"{tmp_path}/data/deep/own") for folder in found.outputs), path
        assert any(folder.startswith(f"{tmp_path}/data/latest") for folder in found.outputs), path
    depth = "/".join("*" for _ in names[0].split("/"))
    assert not find_files(f"{tmp_path}/data/*/own/{depth}", lambda name: True).files
    named = f"{tmp_path}/data/deep/own/{names[0]}"
    assert found_in(named) == [named]


def test_a_run_in_the_folder_of_the_text_itself_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.jsonl", "config.toml", "metrics.jsonl", "lease/000001", "hang/1/vm.txt", "b/c.jsonl")
    monkeypatch.chdir(tmp_path)
    assert found_in(".") == ["./a.jsonl", "./b/c.jsonl"]
    assert found_in("*.jsonl") == ["a.jsonl"]
    assert found_in("**/*") == ["a.jsonl", "b/c.jsonl"]


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.txt", "closed/b.txt")
    real = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"closed cannot be read: Permission denied"):
        found_in(tmp_path)
