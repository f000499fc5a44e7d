"""Verify a checkpoint: by reading all of it, or by the sizes of its files. No torch."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from torchllm.checkpoint.data_file import SUFFIX, check_data_file, check_file_size
from torchllm.checkpoint.manifest import DamagedCheckpoint, FileRecord, Manifest, hash_file, read_manifest

logger = logging.getLogger(__name__)


def verify_checkpoint(folder: Path) -> Manifest:
    """Read every file of a checkpoint and return its manifest. Raises DamagedCheckpoint if a file is damaged.

    One process reads them all; see `tensors.verify_in_parallel`.
    """
    manifest = read_manifest(folder)
    if problems := check_files(folder, manifest):
        raise DamagedCheckpoint("; ".join(problems))
    return manifest


def check_files(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> list[str]:
    """Read every `parts`-th file of a checkpoint, from number `part` on, and return an error text per damaged file.

    The list is empty if all of them are undamaged.
    """
    names = sorted(manifest.files)[part::parts]

    def check(path: Path, record: FileRecord) -> None:
        if path.suffix == SUFFIX:
            check_data_file(path, record)
        else:
            check_content(path, record)

    return _problems(folder, manifest, names, check)


def check_sizes(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> list[str]:
    """Check every `parts`-th file of a checkpoint like `check_files`, but only its size."""
    return _problems(folder, manifest, sorted(manifest.files)[part::parts], check_file_size)


def check_content(path: Path, record: FileRecord) -> None:
    """Read a file and compare its sha256 with the manifest. Raises DamagedCheckpoint if they differ."""
    check_file_size(path, record)
    if hash_file(path) != record:
        raise DamagedCheckpoint(f"{path}: damaged: its sha256 is not the manifest's")


def _problems(
    folder: Path, manifest: Manifest, names: Iterable[str], check: Callable[[Path, FileRecord], None]
) -> list[str]:
    """Return the texts of the errors that `check` raises for files of a checkpoint."""
    problems = []
    for name in names:
        try:
            check(folder / name, manifest.files[name])
        except (OSError, DamagedCheckpoint) as error:
            problems.append(str(error))
    return problems


def newest_verified(
    folders: list[Path],
    check: Callable[[Path], Manifest] = verify_checkpoint,
    warn: Callable[[str], None] = logger.warning,
) -> tuple[Path, Manifest] | None:
    """Return the first folder that passes `check`, and its manifest; None if there are no folders.

    Warns about every damaged folder before it in the list. Raises DamagedCheckpoint if there are folders but none
    passes; any other error of `check` is not caught.
    """
    reasons: list[str] = []
    for folder in folders:
        try:
            manifest = check(folder)
        except DamagedCheckpoint as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            warn(f"DAMAGED CHECKPOINT, the older {folder.name} is used instead: {reason}")
        return folder, manifest
    if reasons:
        listed = "\n  ".join(reasons)
        raise DamagedCheckpoint(
            f"no checkpoint in {folders[0].parent} verifies; repair one as said below, or restore one; the last resort "
            f"is to move them away and to start from scratch:\n  {listed}"
        )
    return None
