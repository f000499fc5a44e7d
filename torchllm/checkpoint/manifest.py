"""What makes a folder of files a checkpoint: its manifest, and how the folder appears and disappears. No torch.

A run's `checkpoints/` holds step folders such as `step-00000100/`: the files that `tensors.py` wrote, and
`manifest.json` with the size and sha256 of each. A step folder is written under a hidden temporary name, forced to disk
and renamed, and it is renamed before it is deleted, so that at any moment it exists whole or not at all. It is never
written to again.
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
"""version of the manifest's format"""
_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.step-\d{8,}\.[0-9a-f]{32}\.tmp")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")

logger = logging.getLogger(__name__)


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found, verified or loaded. The message is for the user."""


class FileRecord(NamedTuple):
    """What the manifest says about a file."""

    size: int
    """in bytes"""
    sha256: str
    """of the content, in hex"""


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint that is not a tensor."""

    step: int
    """optimizer steps done"""
    data: dict[str, Any]
    """state of the data loader: how far the run is in its data"""
    record: dict[str, Any]
    """information about the run, such as its resolved config"""
    world_size: int
    """number of ranks that wrote it"""
    versions: dict[str, str]
    """of torch and Python when it was written"""
    files: dict[str, FileRecord]
    """every file of the folder but the manifest, by name"""


def step_folder(root: Path, step: int) -> Path:
    """Return the folder for the checkpoint of a step; `root` is the run's `checkpoints/`."""
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step that the name of a step folder says."""
    match = _STEP.fullmatch(folder.name)
    assert match, folder
    return int(match[1])


def step_folders(root: Path) -> list[Path]:
    """Return the step folders under `root`, newest first, without verifying them."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(folders, key=step_of, reverse=True)


def hash_file(path: Path) -> FileRecord:
    """Return size and sha256 of a regular file. Raises CheckpointError for a link, a folder or a device."""
    _check_regular(path)
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


def _check_regular(path: Path) -> None:
    """Raise CheckpointError for a link, a folder or a device: its content could be anybody's."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise CheckpointError(f"{path}: not a regular file")


def publish(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Write the manifest into `temporary`, whose other files are on disk already, and rename the folder to `final`.

    Raises OSError if the disk fails, or if `final` exists and is not empty: nothing is overwritten.
    """
    with (temporary / MANIFEST).open("wb") as file:
        file.write(_serialize(manifest))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(temporary)
    os.rename(temporary, final)
    _sync_folder(final.parent)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a step folder. Raises CheckpointError if a single bit of it is not as written."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint folder")
    try:
        _check_regular(path)
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: has no {MANIFEST}, so it is not a whole checkpoint") from error
    manifest = _parse_manifest(content, path)
    for name in manifest.files:
        if not _PLAIN_NAME.fullmatch(name) or name in (".", "..", MANIFEST):
            raise CheckpointError(f"{path}: {name!r} is not the plain name of a file in the folder")
    if _STEP.fullmatch(folder.name) and step_of(folder) != manifest.step:
        raise CheckpointError(f"{folder}: holds step {manifest.step}")
    return manifest


def _parse_manifest(content: bytes, path: Path) -> Manifest:
    """Return the manifest that is serialized as exactly `content`, or raise CheckpointError, naming `path`."""
    damaged = CheckpointError(f"{path}: damaged: it is not what was written")
    try:
        fields = json.loads(content)
        if fields.pop("format") != FORMAT:
            raise CheckpointError(f"{path}: written by another version of torchllm (its format is not {FORMAT})")
        del fields["sha256"]
        files = {name: FileRecord(*record) for name, record in fields.pop("files").items()}
        manifest = Manifest(**fields, files=files)
        whole = isinstance(manifest.step, int) and _serialize(manifest) == content
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged from error
    if not whole:
        raise damaged
    return manifest


def check_files(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> list[str]:
    """Read every `parts`-th file of a checkpoint, from number `part` on, and return what is wrong, one text per file.

    The list is empty if all of them are what was written.
    """
    problems = []
    for name in sorted(manifest.files)[part::parts]:
        path, expected = folder / name, manifest.files[name]
        try:
            record = hash_file(path)
        except FileNotFoundError:
            problems.append(f"{path}: missing")
        except (OSError, CheckpointError) as error:
            problems.append(str(error))
        else:
            if record.size != expected.size:
                problems.append(f"{path}: {record.size} bytes instead of {expected.size}")
            elif record != expected:
                problems.append(f"{path}: damaged: its sha256 is not the manifest's")
    return problems


def verify_checkpoint(folder: Path) -> Manifest:
    """Read every file of a checkpoint and return its manifest. Raises CheckpointError if one is not what was written.

    One process reads them all; see `checkpointer.verify_in_parallel`.
    """
    manifest = read_manifest(folder)
    if problems := check_files(folder, manifest):
        raise CheckpointError("; ".join(problems))
    return manifest


def newest_verified(
    folders: list[Path],
    check: Callable[[Path], Manifest] = verify_checkpoint,
    warn: Callable[[str], None] = logger.warning,
) -> tuple[Path, Manifest] | None:
    """Return the first folder that passes `check`, and its manifest; None if there are no folders.

    Warns of every damaged folder ahead of it in the list. Raises CheckpointError if there are folders but none passes.
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
            f"no checkpoint in {folders[0].parent} verifies; restore one, or move them away to start from scratch:"
            f"\n  {listed}"
        )
    return None


def make_temporary(root: Path, step: int, needed: int) -> Path:
    """Create a hidden folder to write the checkpoint of `step` into. CheckpointError if `needed` bytes do not fit."""
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
    """Rename a damaged step folder so that its step can be saved again; it stays for a person to look at."""
    aside = folder.with_name(f"damaged-{folder.name}.{uuid.uuid4().hex}")
    os.rename(folder, aside)
    logger.warning("%s is damaged; it was moved to %s", folder, aside.name)


def delete_checkpoint(folder: Path) -> None:
    """Hide a step folder by a rename, then delete it, so that no part of it ever passes for a checkpoint."""
    temporary = _temporary_name(folder.parent, step_of(folder))
    os.rename(folder, temporary)
    _sync_folder(folder.parent)
    shutil.rmtree(temporary)


def delete_leftovers(root: Path) -> None:
    """Delete the hidden folders of saves and deletions that were killed. Only the run that writes here may call it."""
    for path in root.iterdir() if root.is_dir() else ():
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path)
            logger.info("deleted %s, left by a run that was killed", path)


def _temporary_name(root: Path, step: int) -> Path:
    """Return a new name that `delete_leftovers` recognizes and `step_folders` does not."""
    return root / f".{step_folder(root, step).name}.{uuid.uuid4().hex}.tmp"


def _serialize(manifest: Manifest) -> bytes:
    """Return the only valid content of a manifest's file: one that differs from it in any bit is damaged."""
    fields = {"format": FORMAT, **asdict(manifest)}
    body = json.dumps(fields, indent=1, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**fields, "sha256": digest}, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk: without it a rename can be lost in a power failure."""
    if sys.platform == "win32":  # cannot open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
