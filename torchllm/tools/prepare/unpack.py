"""Read compressed files as their content: gzip, zstd and lz4 (of several frames, too), and bz2.

A compressed file can only be read from its beginning.
"""

import io
from typing import Any, BinaryIO

from torchllm.config.errors import DataError
from torchllm.config.files import is_url
from torchllm.tools.prepare.file_form import HEAD, compression_of

_BUFFER = 2**18
"""bytes unpacked at a time"""
LONGEST = 2**27
"""bytes of a line, or of a document between delimiters, in a compressed file"""


def compression_of_file(path: str) -> str:
    """Return how a file is compressed; "" if it is not. Raises OSError."""
    with open_file(path, 0) as file:
        return compression_of(file.read(HEAD))


def open_file(path: str, buffering: int) -> BinaryIO:
    """Open a file for reading, also of a URL. Raises OSError; DataError if a storage fails."""
    if not is_url(path):
        return open(path, "rb", buffering=buffering)
    from torchllm.tools.prepare.remote_files import open_object  # most sources are on this machine

    return open_object(path)


def open_unpacked(path: str) -> BinaryIO:
    """Open a file for reading, a compressed one as its content: then it has no `seek`. Raises OSError."""
    compression = compression_of_file(path)
    if not compression:
        return open_file(path, _BUFFER)
    return io.BufferedReader(_Unpacked(path, compression), _BUFFER)


def first_bytes(path: str, size: int = HEAD) -> bytes:
    """Return the first bytes of a file's content. Raises OSError."""
    with open_unpacked(path) as file:
        return file.read(size)


class _Unpacked(io.RawIOBase):
    """The content of a compressed file."""

    def __init__(self, path: str, compression: str) -> None:
        import pyarrow

        self._compression = compression
        source = open_file(path, _BUFFER) if is_url(path) else path
        self._stream = pyarrow.input_stream(source, compression=compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Unpack the next bytes. Raises OSError if they are damaged or missing."""
        try:
            count: int = self._stream.readinto(buffer)
        except DataError:  # of a storage
            raise
        except (OSError, EOFError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise OSError(f"{self._compression}, and damaged, cut off or followed by other bytes: {error}") from error
        return count

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
