"""Files in object storage or on a file system, by their URL: what checkpoints and corpora need of it. No torch.

    s3://bucket/run, gs://bucket/run, memory://run, file:///mnt/run, /mnt/run

`fsspec` has the protocols; credentials and endpoints are those of its packages (for s3: environment variables and
`~/.aws`, as for every other program). An object is there whole or not at all, and is never appended to.
"""

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
    except ImportError:
        protocol = url.partition("://")[0]
        package = PACKAGES.get(protocol, "fsspec")
        return f"needs the package {package}: pip install {package}"
    except ValueError as error:
        return f"is no URL of a storage: {error}"
    return ""


def _open(url: str) -> tuple["AbstractFileSystem", str]:
    """Return the file system of a URL, and the path there. Raises ImportError or ValueError."""
    from fsspec import url_to_fs  # most runs need none

    # A listing must show what other processes have written since the last one.
    system, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    return system, path.rstrip("/")


class RemoteFolder:
    """A folder of objects. Every method raises StorageError, which names the object, if the storage fails."""

    def __init__(self, url: str) -> None:
        """Open the folder, which need not exist yet. Raises StorageError without the protocol's package."""
        self.url = url.rstrip("/")
        if problem := storage_problem(url):
            raise StorageError(f"{url} {problem}")
        self._system, self._path = _open(url)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size in bytes of each object directly in a folder, by name; {} if there is no such folder."""
        return {entry["name"]: entry["size"] for entry in self._list(folder) if entry["type"] == "file"}

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders in a folder, in no order; [] if there is no such folder."""
        return [entry["name"] for entry in self._list(folder) if entry["type"] == "directory"]

    def _list(self, folder: str) -> list[dict[str, Any]]:
        try:
            entries = self._system.ls(self._join(folder), detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._error("list", folder, error) from error
        return [entry | {"name": entry["name"].rstrip("/").rpartition("/")[2]} for entry in entries]

    def exists(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        try:
            self._system.info(self._join(name))
        except FileNotFoundError:
            return False
        except Exception as error:
            raise self._error("look for", name, error) from error
        return True

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes start <= i < end of an object, or all of it."""
        try:
            content: bytes = self._system.cat_file(self._join(name), start=start, end=end)
        except Exception as error:
            raise self._error("read", name, error) from error
        return content

    def put(self, name: str, content: bytes) -> None:
        """Write an object whole, over an older one."""
        try:
            self._make_folder_of(name)
            self._system.pipe_file(self._join(name), content)
        except Exception as error:
            raise self._error("write", name, error) from error

    def put_if_absent(self, name: str, content: bytes) -> bool:
        """Write an object whole if there is none of this name: of several writers exactly one is told True."""
        try:
            self._make_folder_of(name)
            self._system.pipe_file(self._join(name), content, mode="create")
        except FileExistsError:
            return False
        except Exception as error:
            raise self._error("write", name, error) from error
        return True

    def upload(self, file: Path, name: str) -> None:
        """Copy a local file to an object, over an older one. Raises FileNotFoundError if the local file has gone."""
        try:
            self._make_folder_of(name)
            self._system.put_file(str(file), self._join(name))
        except Exception as error:
            if not file.exists():
                raise FileNotFoundError(str(file)) from error
            raise self._error("write", name, error) from error

    def download(self, name: str, file: Path) -> None:
        """Copy an object to a local file."""
        try:
            self._system.get_file(self._join(name), str(file))
        except Exception as error:
            raise self._error("read", name, error) from error

    def delete(self, name: str) -> None:
        """Delete an object; it may have gone already."""
        try:
            self._system.rm_file(self._join(name))
        except FileNotFoundError:
            pass
        except Exception as error:
            raise self._error("delete", name, error) from error

    def delete_folder(self, folder: str, first: str) -> None:
        """Delete the objects in a folder, beginning with `first`, without which the others count for nothing."""
        self.delete(f"{folder}/{first}")
        try:
            self._system.rm(self._join(folder), recursive=True)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise self._error("delete", folder, error) from error

    def _join(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _make_folder_of(self, name: str) -> None:
        """Make the folder of an object where storage has folders; in buckets they are parts of names."""
        if self._system.protocol in ("file", ("file", "local")):
            self._system.makedirs(self._join(name).rpartition("/")[0], exist_ok=True)

    def _error(self, action: str, name: str, error: Exception) -> StorageError:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return StorageError(f"cannot {action} {self.url}/{name}: {reason}".replace("/:", ":"))
