"""Verify a checkpoint: by reading all of it, or by the sizes of its files. No torch."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torchllm.checkpoint.data_file import SUFFIX
from torchllm.checkpoint.manifest import DamagedCheckpoint, FileRecord, Manifest
from torchllm.checkpoint.piece_table import check_data_file, check_file_size


def read_content(path: Path, record: FileRecord) -> bytes:
    """Return the content of a small file. Raises DamagedCheckpoint if it is not the one that the manifest records."""
    check_file_size(path, record)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise DamagedCheckpoint(f"{path}: damaged: its sha256 is not the manifest's")
    return content


def _check_content(path: Path, record: FileRecord) -> None:
    """Read a file. Raises OSError, or DamagedCheckpoint if it is not the one that the manifest records."""
    if path.suffix == SUFFIX:
        check_data_file(path, record)
    else:
        read_content(path, record)


def _problems(
    check: Callable[[Path, FileRecord], None], folder: Path, manifest: Manifest, part: int = 0, parts: int = 1
) -> list[str]:
    """Check every `parts`-th file of a checkpoint, from number `part` on; return an error text per damaged file."""
    problems = []
    for name in sorted(manifest.files)[part::parts]:
        try:
            check(folder / name, manifest.files[name])
        except (OSError, DamagedCheckpoint) as error:
            problems.append(str(error))
    return problems


check_files = partial(_problems, _check_content)
check_sizes = partial(_problems, check_file_size)


def newest_verified(
    folders: list[Path], check: Callable[[Path], Manifest], warn: Callable[[str], None]
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
