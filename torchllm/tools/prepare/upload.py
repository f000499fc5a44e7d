"""Copy a finished corpus to object storage, where runs read it: its description last, so that no run finds a part."""

from pathlib import Path

from torchllm.config.errors import DataError
from torchllm.data.corpus_header import HEADER
from torchllm.runtime.storage import RemoteFolder


def refuse_other_corpus(folder: Path, url: str) -> bool:
    """Return whether the corpus of a folder is at a URL. Raises DataError if another one is, or StorageError."""
    storage = RemoteFolder(url)
    if not storage.exists(HEADER):
        return False
    here = folder / HEADER
    if here.exists() and storage.read(HEADER) == here.read_bytes():
        return True
    raise DataError(
        f"{url} holds a corpus that is not the one in {folder}: choose another prepare.remote, or delete it"
    )


def upload_corpus(folder: Path, url: str) -> None:
    """Copy the files of a corpus to a URL, unless it is there. Raises DataError for another one, or StorageError."""
    if refuse_other_corpus(folder, url):
        return
    storage = RemoteFolder(url)
    # Others are of processes that were killed while they wrote.
    files = [path for path in folder.iterdir() if path.suffix in (".bin", ".json") and path.name != HEADER]
    for file in sorted(files):
        storage.upload(file, file.name)
    if not storage.put_if_absent(HEADER, (folder / HEADER).read_bytes()):
        refuse_other_corpus(folder, url)  # of another process, at the same time
