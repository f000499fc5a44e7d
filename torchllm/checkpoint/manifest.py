"""The manifest of a checkpoint, its marks, and the atomic creation and deletion of its folder. No torch.

A run's `checkpoints/` holds step folders such as `step-00000100/`: a file of tensors per rank (`data_file.py`), their
index (`index.py`), and `manifest.json` with the size and a sha256 of each file (for a file of tensors, the sha256 of
its table of sums). A step folder is written under a hidden temporary name, forced to disk and renamed, and it is
renamed before it is deleted (`history.py`), so that at any moment it exists whole or not at all. Its files are
never written again; later status is in separate files:

    proven.json     the following steps were finite: the newest such checkpoint is never deleted
    suspect.json    the run went wrong after it, or trained on wrong data before: a restarted run loads an older one

The existence of such a file is the mark; its content tells a person the reason.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.config.errors import UserError
from torchllm.config.system_errors import describe_system_error

MANIFEST = "manifest.json"
FORMAT = 3
"""version of the format that is written"""
READS = (2, FORMAT)
"""in format 2 the sums of pieces are SHA-256 (`piece_table.py`)"""
_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.step-\d{8,}\.[0-9a-f]{32}\.tmp")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")

logger = logging.getLogger(__name__)


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found, verified or loaded. The message is for the user."""


class DamagedCheckpoint(CheckpointError):
    """A damaged checkpoint: an older one may be used instead."""


class FileRecord(NamedTuple):
    """The manifest's record of a file."""

    size: int
    """in bytes"""
    sha256: str
    """in hex, of the content; for a data file, of the table at its end"""


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint that is not a tensor."""

    step: int
    """optimizer steps done"""
    data: dict[str, Any]
    """state of the data loader: the run's position in its data"""
    record: dict[str, Any]
    """information about the run, such as its resolved config"""
    world_size: int
    """number of ranks that wrote it"""
    versions: dict[str, str]
    """versions of torch and Python that wrote it"""
    files: dict[str, FileRecord]
    """every file of the folder except the manifest, by name"""
    format: int = FORMAT
    """version of the format of the folder"""


def step_folder(root: Path, step: int) -> Path:
    """Return the folder for the checkpoint of a step; `root` is the run's `checkpoints/`."""
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    match = _STEP.fullmatch(folder.name)
    assert match, folder
    return int(match[1])


def step_folders(root: Path) -> list[Path]:
    """Return the step folders under `root`, newest first, without verifying them."""
    if not root.is_dir():
        return []
    return newest_first(root.iterdir())


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that are named as step folders, newest first."""
    return sorted((path for path in paths if _STEP.fullmatch(path.name)), key=step_of, reverse=True)


def check_plain_file(path: Path) -> int:
    """Return the size of a file in bytes. Raises DamagedCheckpoint for a link, a folder or a device: other programs may
    control its content."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpoint(f"{path}: not a regular file")
    return status.st_size


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write a file, force it to disk, and return its record."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def publish(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Write the manifest into `temporary`, whose other files are on disk already, and rename the folder to `final`.

    Raises OSError if the disk fails, or if `final` exists and is not empty: nothing is overwritten.
    """
    write_file(temporary / MANIFEST, _serialize(manifest))
    sync(temporary)
    os.rename(temporary, final)
    sync(final.parent)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a step folder. Raises DamagedCheckpoint if a single bit is wrong."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise DamagedCheckpoint(f"{folder}: there is no such checkpoint folder")
    try:
        check_plain_file(path)
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{folder}: has no {MANIFEST}, so it is not a whole checkpoint") from error
    except OSError as error:
        raise DamagedCheckpoint(str(error)) from error
    manifest = parse_manifest(content, str(path))
    if _STEP.fullmatch(folder.name) and step_of(folder) != manifest.step:
        right = step_folder(folder.parent, manifest.step).name
        raise DamagedCheckpoint(f"{folder}: holds step {manifest.step}: rename it to {right}")
    return manifest


def parse_manifest(content: bytes, path: str) -> Manifest:
    """Return the manifest whose serialization is exactly `content`, or raise DamagedCheckpoint, naming `path`."""
    damaged = DamagedCheckpoint(f"{path}: damaged: the content has changed")
    try:
        fields = json.loads(content)
        if fields["format"] not in READS:
            raise DamagedCheckpoint(f"{path}: a checkpoint of format {fields['format']!r}; this torchllm reads 2 and 3")
        del fields["sha256"]
        files = {name: FileRecord(*record) for name, record in fields.pop("files").items()}
        manifest = Manifest(**fields, files=files)
        whole = isinstance(manifest.step, int) and _serialize(manifest) == content
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged from error
    if not whole:
        raise damaged
    for name in manifest.files:
        if not _PLAIN_NAME.fullmatch(name) or name in (".", "..", MANIFEST):
            raise DamagedCheckpoint(f"{path}: {name!r} is not the plain name of a file in the folder")
    return manifest


def make_temporary(root: Path, step: int, needed: int) -> Path | None:
    """Create a hidden folder to write the checkpoint of `step` into; None if there is one of this step.

    CheckpointError if `needed` bytes do not fit, or the folder cannot be made.
    """
    folder, temporary = step_folder(root, step), _temporary_name(root, step)
    try:
        if folder.exists():
            return None
        root.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(root).free) < needed:
            raise CheckpointError(
                f"{folder}: a checkpoint needs {needed} bytes, {free} are free; make room and resume "
                "(earlier checkpoints are untouched)"
            )
        temporary.mkdir()
        return temporary
    except OSError as error:
        raise lost_save(folder, describe_system_error(error), needed) from error


def lost_save(folder: Path, reason: str, needed: int) -> CheckpointError:
    """Return the error of a checkpoint of `needed` bytes that could not be written."""
    try:
        free = shutil.disk_usage(folder.parent).free
    except OSError:  # its folder has gone, too
        return CheckpointError(f"cannot write {folder}: {reason} (earlier checkpoints cannot be reached either)")
    room = f"it needs {needed} bytes, {free} are free; " if free < needed else ""
    return CheckpointError(f"cannot write {folder}: {reason} ({room}earlier checkpoints are untouched)")


def set_damaged_aside(folder: Path) -> None:
    """Rename a damaged step folder so that its step can be saved again; it is kept for inspection."""
    aside = folder.with_name(f"damaged-{folder.name}.{uuid.uuid4().hex}")
    os.rename(folder, aside)
    logger.warning("%s is damaged; it was moved to %s", folder, aside.name)


def hide(folder: Path) -> Path:
    """Rename a step folder before its deletion, so that no partly deleted folder looks like a checkpoint; return it."""
    temporary = _temporary_name(folder.parent, step_of(folder))
    os.rename(folder, temporary)
    sync(folder.parent)
    return temporary


def hidden_folders(root: Path) -> list[Path]:
    """Return the hidden folders of saves and deletions that were killed or are still running."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _TEMPORARY.fullmatch(path.name))


def _temporary_name(root: Path, step: int) -> Path:
    """Return a new name that `hidden_folders` recognizes and `step_folders` does not."""
    return root / f".{step_folder(root, step).name}.{uuid.uuid4().hex}.tmp"


def _serialize(manifest: Manifest) -> bytes:
    """Return the only valid content of a manifest's file: any other bit is damage."""
    fields = asdict(manifest)
    body = json.dumps(fields, indent=1, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**fields, "sha256": digest}, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def sync(path: Path) -> None:
    """Force a file, or the entries of a folder, to disk: without it a rename can be lost in a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


PROVEN = "proven.json"
"""mark: the following steps were finite"""
SUSPECT = "suspect.json"
"""mark: a restarted run loads an older one"""


def mark(folder: Path, name: str, reason: str) -> None:
    """Mark a step folder as PROVEN or SUSPECT, atomically. A failure is only a warning: it must not end the run."""
    temporary = folder / f".{name}"
    try:
        write_file(temporary, json.dumps({"reason": reason}).encode() + b"\n")
        os.replace(temporary, folder / name)
    except OSError as error:
        logger.warning("cannot write %s: %s", folder / name, error)


def read_suspects(folders: Iterable[Path]) -> dict[Path, str]:
    """Return the step folders that are marked as suspect, and why."""
    suspects = {}
    for folder in folders:
        path = folder / SUSPECT
        if path.exists():
            suspects[folder] = _reason(path)
    return suspects


def _reason(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["reason"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{path.name} cannot be read"


def find_proven(newest_first: Iterable[Path]) -> Path | None:
    """Return the newest step folder that is marked as proven, None if there is none."""
    return next((folder for folder in newest_first if (folder / PROVEN).exists()), None)


def without_suspects(
    newest_first: Sequence[Path], suspects: dict[Path, str], warn: Callable[[str], None]
) -> list[Path]:
    """Return the step folders that are not suspect.

    Warns of each suspect that is newer than all of them. Raises CheckpointError if there are folders, but all are
    suspect.
    """
    usable = [folder for folder in newest_first if folder not in suspects]
    if newest_first and not usable:
        listed = "\n  ".join(f"{folder.name}: {suspects[folder]}" for folder in newest_first)
        raise CheckpointError(
            f"every checkpoint in {newest_first[0].parent} is marked as suspect: name one with checkpoint.resume, or "
            f"move them away to start from scratch\n  {listed}"
        )
    for folder in newest_first:
        if folder == usable[0]:
            break
        warn(f"SUSPECT CHECKPOINT {folder.name} is skipped, an older one is used instead: {suspects[folder]}")
    return usable
