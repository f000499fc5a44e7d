"""Files in object storage or on a file system, by their URL, for checkpoints and corpora. No torch.

    s3://bucket/run, gs://bucket/run, memory://run, file:///mnt/run, /mnt/run

`fsspec` has the protocols; its packages find credentials and endpoints themselves (for s3: environment variables and
`~/.aws`, as for every other program). An object is written whole or not at all; on a file system a killed upload of
a file leaves a part of it.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchllm.config.errors import UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""package of a protocol"""


class StorageError(UserError):
    """Storage that cannot be reached, or refuses. The message is for the user and names the object."""


def storage_problem(url: str) -> str:
    """Return why no storage has this URL, without connecting to it; "" if one may have it."""
    try:
        _open(url)
    except StorageError as error:
        return str(error)
    return ""


def _open(url: str) -> tuple["AbstractFileSystem", str]:
    """Return the file system of a URL, and the path there. Raises StorageError, whose text goes on after the URL."""
    from fsspec import url_to_fs  # most runs need none

    if url.startswith(("http://", "https://")):
        raise StorageError("is a URL of the web, and no storage's: download the files, or name their bucket")
    try:
        # A listing must show the objects that other processes have written since the last one.
        system, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        package = PACKAGES.get(url.partition("://")[0], "fsspec")
        raise StorageError(f"needs the package {package}: pip install {package}") from error
    except ValueError as error:
        raise StorageError(f"is no URL of a storage: {error}") from error
    return system, path.rstrip("/")


class RemoteFolder:
    """A folder of objects. Every method raises StorageError, which names the object, if the storage fails."""

    def __init__(self, url: str) -> None:
        """Open the folder, which need not exist yet. Raises StorageError without the protocol's package."""
        self.url = url.rstrip("/")
        try:
            self._system, self._path = _open(url)
        except StorageError as error:
            raise StorageError(f"{url} {error}") from error

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size in bytes of each object directly in a folder, by name; {} if there is no such folder."""
        return {entry["name"]: entry["size"] for entry in self._list(folder) if entry["type"] == "file"}

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders in a folder, in no order; [] if there is no such folder."""
        return [entry["name"] for entry in self._list(folder) if entry["type"] == "directory"]

    def _list(self, folder: str) -> list[dict[str, Any]]:
        try:
            with self._naming("list", folder, FileNotFoundError):
                entries = self._system.ls(self._join(folder), detail=True)
        except FileNotFoundError:
            return []
        return [entry | {"name": entry["name"].rstrip("/").rpartition("/")[2]} for entry in entries]

    def exists(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        return self.entry(name) is not None

    def entry(self, name: str) -> dict[str, Any] | None:
        """Return the storage's description of an object, its "size" and fields of the protocol; None without one."""
        try:
            with self._naming("look for", name, FileNotFoundError):
                return dict(self._system.info(self._join(name)))
        except FileNotFoundError:
            return None

    def find(self, name: str) -> dict[str, dict[str, Any]]:
        """Return `entry` of all objects in a folder and below it, or of the object of this name; {} without any."""
        try:
            with self._naming("list", name, FileNotFoundError):
                found: dict[str, dict[str, Any]] = self._system.find(self._join(name), detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(f"{self._path}/"): entry for path, entry in found.items() if entry["type"] == "file"}

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes start <= i < end of an object, or all of it."""
        with self._naming("read", name):
            return bytes(self._system.cat_file(self._join(name), start=start, end=end))

    def put(self, name: str, content: bytes) -> None:
        """Write an object whole, over an older one."""
        with self._naming("write", name):
            self._make_folder_of(name)
            if self._has_folders:
                with self._temporary(name, content) as file:
                    os.replace(file, self._join(name))
            else:
                self._system.pipe_file(self._join(name), content)

    def put_if_absent(self, name: str, content: bytes) -> bool:
        """Write an object if there is none of this name: of several writers exactly one is told True, on file systems
        and in S3. FOOTGUN: where a protocol's package has no such call (sftp), fsspec looks first, and two may be."""
        try:
            with self._naming("write", name, FileExistsError):
                self._make_folder_of(name)
                if self._has_folders:  # there fsspec's own call looks first, too, and a kill leaves an empty file
                    with self._temporary(name, content) as file:
                        os.link(file, self._join(name))
                else:
                    self._system.pipe_file(self._join(name), content, mode="create")
        except FileExistsError:
            return False
        return True

    def upload(self, file: Path, name: str) -> None:
        """Copy a local file to an object, over an older one. Raises FileNotFoundError if the local file has gone."""
        if not file.exists():
            raise FileNotFoundError(str(file))
        with self._naming("write", name):
            self._make_folder_of(name)
            self._system.put_file(str(file), self._join(name))

    def download(self, name: str, file: Path) -> None:
        """Copy an object to a local file."""
        with self._naming("read", name):
            self._system.get_file(self._join(name), str(file))

    def delete(self, name: str) -> None:
        """Delete an object; it may have gone already."""
        with suppress(FileNotFoundError), self._naming("delete", name, FileNotFoundError):
            self._system.rm_file(self._join(name))

    def delete_folder(self, folder: str) -> None:
        """Delete the objects in a folder and below it, in no order; it may have gone already."""
        with suppress(FileNotFoundError), self._naming("delete", folder, FileNotFoundError):
            self._system.rm(self._join(folder), recursive=True)

    def _join(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    @property
    def _has_folders(self) -> bool:
        return "file" in self._system.protocol

    def _make_folder_of(self, name: str) -> None:
        """Make the folder of an object where storage has folders; in buckets they are parts of names."""
        if self._has_folders:
            self._system.makedirs(self._join(name).rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _temporary(self, name: str, content: bytes) -> Iterator[Path]:
        """Write a file next to an object's, to become the object as a whole; delete it if it is left."""
        path = Path(self._join(name))
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            temporary.write_bytes(content)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _naming(self, action: str, name: str, *passed: type[OSError]) -> Iterator[None]:
        """Raise the errors of the storage as StorageError, with the object; the types `passed` as they are."""
        try:
            yield
        except passed:
            raise
        except Exception as error:  # each protocol's package has its own errors
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise StorageError(f"cannot {action} {self.url}{name and '/'}{name}: {reason}") from error
