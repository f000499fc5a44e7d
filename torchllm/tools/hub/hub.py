"""Find a published model: a folder, or an id of the Hugging Face Hub, downloaded once per node. No torch.

An id is ORG/NAME, or ORG/NAME@REVISION with a branch, a tag or a commit. The result is pinned to the commit, so that
every node, and a later start, reads the same files. huggingface_hub does the work: its cache, its token and its
HF_HUB_OFFLINE are honored.
"""

import re
from pathlib import Path
from typing import NamedTuple

from torchllm.tools.hub.files import WHOLE_MODEL, weight_files
from torchllm.tools.hub.safetensors_header import HubFileError

HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
SMALL_FILES = ["*.json", "*.model", "*.jinja", "*.txt", "*.md", "LICENSE*"]
"""config, index, tokenizer, template, model card"""
SUBFOLDERS = ["*/*"]
"""original files in another form"""


class FoundModel(NamedTuple):
    """Where a published model lies on this machine."""

    folder: Path
    pinned: str
    """its name, which means the same files later: the folder, or ORG/NAME@COMMIT"""


def is_hub_id(name: str) -> bool:
    """Return whether the name of a model is an id of the hub, and no folder."""
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def find_hub_model(name: str, *, weights: bool, may_download: bool) -> FoundModel:
    """Return where a model lies, a folder or an id; download it first if need be.

    weights: also the weights, not only config and tokenizer. may_download: False in a rank of a run whose check has
    downloaded it. Raises HubFileError if it is not there.
    """
    if Path(name).exists():
        return FoundModel(Path(name), name)
    match = HUB_ID.fullmatch(name)
    if match is None:
        raise HubFileError(f"{name!r} is neither a folder nor an id of the hub, such as ORG/NAME or ORG/NAME@REVISION")
    wanted = [*SMALL_FILES, WHOLE_MODEL] if weights else SMALL_FILES
    folder = _download(match["id"], match["revision"], wanted, may_download)
    if weights and not (folder / WHOLE_MODEL).exists():
        _download(match["id"], folder.name, weight_files(folder), may_download)
    return FoundModel(folder, f"{match['id']}@{folder.name}")


def _download(hub_id: str, revision: str | None, patterns: list[str], may_download: bool) -> Path:
    """Return the folder of the hub's cache with the files of these patterns. Raises HubFileError."""
    import huggingface_hub  # of no use to other runs

    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=SUBFOLDERS,
            local_files_only=not may_download,
        )
    except Exception as error:  # of the network, of the hub, or of the cache: they share no base class
        reason = str(error).split("\n")[0]
        raise HubFileError(f"{hub_id}: cannot be had from the hub: {type(error).__name__}: {reason}") from error
    return Path(folder)
