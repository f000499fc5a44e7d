import itertools
import logging
import shutil
from pathlib import Path

import pytest

from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint.data_file import DataFileWriter
from torchllm.checkpoint.manifest import CheckpointError, FileRecord, Manifest
from torchllm.checkpoint.tensors import verify_in_parallel
from torchllm.checkpoint.verify import check_files, check_sizes

pytestmark = pytest.mark.quick


def make(root: Path, step: int, content: bytes = b"weights") -> Path:
    temporary = manifests.make_temporary(root, step, needed=0)
    files = {}
    for name in ("a.distcp", "b.distcp"):
        with DataFileWriter(temporary / name) as file:
            file.write(name.encode() + content)
            file.end_piece(0)
            files[name] = file.finish()
    folder = manifests.step_folder(root, step)
    record = {"model": {"hidden": 8, "rate": 1e-3, "name": "größe"}}
    manifests.publish(temporary, folder, Manifest(step, {"sequences": 7}, record, 2, {"torch": "2.13"}, files))
    return folder


def test_shares_of_the_ranks_cover_every_file(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    manifest = manifests.read_manifest(folder)
    for name in manifest.files:
        (folder / name).write_bytes(b"")
    for check in (check_files, check_sizes):
        assert sum(len(check(folder, manifest, part, 3)) for part in range(3)) == 2


def test_truncated_emptied_and_deleted_files_are_refused_by_name(tmp_path: Path) -> None:
    for name, damage in itertools.product(
        ("a.distcp", "b.distcp", manifests.MANIFEST), ("truncate", "empty", "delete", "folder", "link")
    ):
        folder = make(tmp_path / name / damage, 1)
        path = folder / name
        content = path.read_bytes()
        path.unlink()
        message = ""
        if damage in ("truncate", "empty"):
            path.write_bytes(content[:-1] if damage == "truncate" else b"")
        elif damage == "folder":
            path.mkdir()
        elif damage == "link":  # even to the right content
            (tmp_path / "content").write_bytes(content)
            path.symlink_to(tmp_path / "content")
            message = ".*not a regular file"
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + message):
            verify_in_parallel(None, folder)


def test_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"1")
    for step, name in enumerate(["../secret", "/etc/hostname", "..", ".", "a/b", "", "manifest.json", "x\ny"]):
        temporary = manifests.make_temporary(tmp_path, step, needed=0)
        folder = manifests.step_folder(tmp_path, step)
        manifests.publish(temporary, folder, Manifest(step, {}, {}, 1, {}, {name: FileRecord(1, "0" * 64)}))
        with pytest.raises(CheckpointError, match="plain name"):
            verify_in_parallel(None, folder)


def test_foreign_manifests_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    broken = [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000]
    for content in [*broken, b'{"format": 2}', b'{"format": 3}']:
        (folder / manifests.MANIFEST).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            verify_in_parallel(None, folder)


def test_renamed_step_folder_is_refused(tmp_path: Path) -> None:
    make(tmp_path, 1).rename(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match="holds step 1"):
        verify_in_parallel(None, tmp_path / "step-00000002")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "a-copy")
    assert verify_in_parallel(None, tmp_path / "a-copy").step == 1


def test_folders_are_checkpoints_newest_first_or_hidden(tmp_path: Path) -> None:
    assert manifests.step_folders(tmp_path / "nowhere") == manifests.hidden_folders(tmp_path / "nowhere") == []
    oldest, middle, newest = (make(tmp_path, step) for step in (1, 2, 10**9))
    for name in ("step-7", ".step-notes.tmp"):
        (tmp_path / name).mkdir()
    manifests.set_damaged_aside(make(tmp_path, 3))
    assert manifests.step_folders(tmp_path) == [newest, middle, oldest]
    assert manifests.hidden_folders(tmp_path) == []
    hidden = manifests.hide(middle)
    assert hidden.name.startswith(".step-00000002.")
    temporary = manifests.make_temporary(tmp_path, 3, needed=0)
    assert manifests.step_folders(tmp_path) == [newest, oldest]
    assert sorted(manifests.hidden_folders(tmp_path)) == [hidden, temporary]


def test_sizes_alone_find_what_is_missing_or_cut(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    manifest = manifests.read_manifest(folder)
    assert check_sizes(folder, manifest) == []
    (folder / "a.distcp").unlink()
    (folder / "b.distcp").write_bytes((folder / "b.distcp").read_bytes() + b"1")
    missing, longer = check_sizes(folder, manifest)
    assert missing.endswith("a.distcp: missing")
    assert "bytes instead of" in longer


def test_a_mark_that_cannot_be_read_is_still_one(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    for content in (b"", b"{", b"[1]", b'{"why": 1}', b"\xff", b"[" * 200_000):
        (folder / manifests.SUSPECT).write_bytes(content)
        assert manifests.read_suspects([folder]) == {folder: "suspect.json cannot be read"}


def test_a_mark_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifests.mark(tmp_path / "nowhere", manifests.SUSPECT, "NaN")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "nowhere/suspect.json" in record.getMessage()
