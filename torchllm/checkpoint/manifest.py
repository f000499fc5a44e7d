"""What makes a folder of files a checkpoint: its manifest, how it appears and how it goes. No torch.

A run's `checkpoints/` holds `step-00000100/`: the files that `checkpoint.py` wrote and `manifest.json` with the size
and sha256 of each. A step folder is written under a hidden temporary name, forced to disk and renamed, and it is
renamed before it is deleted, so that at any moment it exists whole or not at all. It is never written to again.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.config.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.step-\d{8,}\.[0-9a-f]{32}\.tmp")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")

logger = logging.getLogger(__name__)


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found, verified or loaded. The message is for the user."""


class FileRecord(NamedTuple):
    """What a file must be: its size in bytes and the sha256 of its content in hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint that is not a tensor."""

    step: int
    """optimizer steps done"""
    data: dict[str, Any]
    """the data loader's position"""
    record: dict[str, Any]
    """what the run says about itself: its resolved config, say"""
    world_size: int
    """ranks that wrote it"""
    versions: dict[str, str]
    """of the software that wrote it"""
    files: dict[str, FileRecord]
    """every other file of the folder, by name"""


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies; `root` is the run's `checkpoints/`."""
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step in the name of a step folder."""
    match = _STEP.fullmatch(folder.name)
    assert match, folder
    return int(match[1])


def step_folders(root: Path) -> list[Path]:
    """The step folders under `root`, newest first, verified or not."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _STEP.fullmatch(path.name)), key=step_of, reverse=True)


def hash_file(path: Path) -> FileRecord:
    """Size and sha256 of a regular file. Raises CheckpointError for a link, a folder, a device."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


def publish(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Write the manifest into `temporary`, whose other files are on disk already, and let the folder appear as `final`.

    Raises OSError, also when `final` exists and is not empty: nothing is overwritten.
    """
    with (temporary / MANIFEST).open("wb") as file:
        file.write(_serialize(manifest))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(temporary)
    os.rename(temporary, final)
    _sync_folder(final.parent)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a step folder, itself checked to the last bit. Raises CheckpointError."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint folder")
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: has no {MANIFEST}, so it is not a whole checkpoint") from error
    try:
        fields = json.loads(content)
        if fields.pop("format") != FORMAT:
            raise CheckpointError(f"{path}: written by another version of torchllm (its format is not {FORMAT})")
        fields.pop("sha256")
        manifest = Manifest(**{**fields, "files": {name: FileRecord(*file) for name, file in fields["files"].items()}})
        whole = isinstance(manifest.step, int) and _serialize(manifest) == content
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: damaged: it is not what was written")
    for name in manifest.files:
        if not _PLAIN_NAME.fullmatch(name) or name in (".", "..", MANIFEST):
            raise CheckpointError(f"{path}: {name!r} is not the plain name of a file in the folder")
    if _STEP.fullmatch(folder.name) and step_of(folder) != manifest.step:
        raise CheckpointError(f"{folder}: holds step {manifest.step}")
    return manifest


def check_files(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the `part`-th of `parts` shares of the files; empty when they are what was written."""
    found = []
    for name in sorted(manifest.files)[part::parts]:
        path, expected = folder / name, manifest.files[name]
        try:
            record = hash_file(path)
        except FileNotFoundError:
            found.append(f"{path}: missing")
        except (OSError, CheckpointError) as error:
            found.append(str(error))
        else:
            if record.size != expected.size:
                found.append(f"{path}: {record.size} bytes instead of {expected.size}")
            elif record != expected:
                found.append(f"{path}: damaged: its sha256 is not the manifest's")
    return found


def verify_checkpoint(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose every file was read and is what was written. Raises CheckpointError."""
    manifest = read_manifest(folder)
    if found := check_files(folder, manifest):
        raise CheckpointError("; ".join(found))
    return manifest


def newest_verified(
    folders: list[Path],
    check: Callable[[Path], Manifest] = verify_checkpoint,
    warn: Callable[[str], None] = logger.warning,
) -> tuple[Path, Manifest] | None:
    """The first folder that passes `check`, warning of every one before it; None if there are no folders.

    Raises CheckpointError when there are some and none passes.
    """
    reasons: list[str] = []
    for folder in folders:
        try:
            manifest = check(folder)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            warn(f"DAMAGED CHECKPOINT, the older {folder.name} is used instead: {reason}")
        return folder, manifest
    if reasons:
        listed = "\n  ".join(reasons)
        raise CheckpointError(
            f"no checkpoint in {folders[0].parent} verifies; restore one, or move them away to start anew:\n  {listed}"
        )
    return None


def make_temporary(root: Path, step: int, needed: int) -> Path:
    """A new hidden folder to write the checkpoint of `step` into. CheckpointError if `needed` bytes do not fit."""
    root.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(root).free) < needed:
        raise CheckpointError(
            f"{step_folder(root, step)}: a checkpoint needs {needed} bytes, {free} are free; make room and resume "
            "(earlier checkpoints are untouched)"
        )
    temporary = _temporary_name(root, step)
    temporary.mkdir()
    return temporary


def set_damaged_aside(folder: Path) -> None:
    """Rename a damaged step folder so that its step can be saved again; it is kept for a person to look at."""
    aside = folder.with_name(f"damaged-{folder.name}.{uuid.uuid4().hex}")
    os.rename(folder, aside)
    logger.warning("%s is damaged; it was moved to %s", folder, aside.name)


def delete_checkpoint(folder: Path) -> None:
    """Delete a step folder: hidden by a rename first, so that no half of it ever passes for a checkpoint."""
    temporary = _temporary_name(folder.parent, step_of(folder))
    os.rename(folder, temporary)
    _sync_folder(folder.parent)
    shutil.rmtree(temporary)


def delete_leftovers(root: Path) -> None:
    """Delete what saves and deletions that were killed left behind. Only for the one run that writes here."""
    for path in root.iterdir() if root.is_dir() else ():
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path)
            logger.info("deleted %s, left by a run that was killed", path)


def _temporary_name(root: Path, step: int) -> Path:
    return root / f".{step_folder(root, step).name}.{uuid.uuid4().hex}.tmp"


def _serialize(manifest: Manifest) -> bytes:
    """The one spelling of a manifest: a file that differs from it in any bit is damaged."""
    fields = {"format": FORMAT, **asdict(manifest)}
    body = json.dumps(fields, indent=1, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**fields, "sha256": digest}, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _sync_folder(folder: Path) -> None:
    if sys.platform == "win32":  # cannot open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
