"""Read compressed files as their content: gzip, zstd and lz4 (of several frames, too), bz2 and xz.

A compressed file can only be read from its beginning. The unpacked size is limited: a file of some KB may hold more
than all memory and disks.
"""

import io
import lzma
import os
from typing import Any, BinaryIO

from torchllm.data.error import DataError
from torchllm.tools.prepare.file_form import HEAD, compression_of

_BUFFER = 2**18
"""bytes unpacked at a time"""
_ALWAYS = 2**30
"""bytes that any file may unpack to"""
_TIMES = 100
"""its size, that a file may unpack to"""
LONGEST = 2**27
"""bytes of a line, or of a document between delimiters, in a compressed file"""


def compression_of_file(path: str) -> str:
    """Return how a file is compressed; "" if it is not. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return compression_of(file.read(HEAD))


def open_unpacked(path: str) -> BinaryIO:
    """Open a file for reading, a compressed one as its content: then it has no `seek`. Raises OSError."""
    compression = compression_of_file(path)
    if not compression:
        return open(path, "rb", buffering=_BUFFER)
    size = os.path.getsize(path)
    return io.BufferedReader(_Unpacked(path, compression, size), _BUFFER)


def first_bytes(path: str, size: int = HEAD) -> bytes:
    """Return the first bytes of a file's content. Raises OSError."""
    with open_unpacked(path) as file:
        return file.read(size)


class _Xz:
    """The content of an xz file. Unlike `lzma.open` it raises LZMAError for bytes after a stream that are none."""

    def __init__(self, path: str) -> None:
        self._file = io.FileIO(path)
        self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def readinto(self, buffer: Any) -> int:
        """Unpack the next bytes. Raises LZMAError, EOFError or OSError."""
        while True:
            packed = b""
            if self._stream.eof:
                packed = self._stream.unused_data.lstrip(b"\0")
                while not packed and (block := self._file.read(_BUFFER)):
                    packed = block.lstrip(b"\0")  # streams may be padded
                if not packed:
                    return 0
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            elif self._stream.needs_input and not (packed := self._file.read(_BUFFER)):
                raise EOFError("it ends before its end-of-stream marker")
            if content := self._stream.decompress(packed, len(buffer)):
                buffer[: len(content)] = content
                return len(content)

    def close(self) -> None:
        self._file.close()


class _Unpacked(io.RawIOBase):
    """The content of a compressed file."""

    def __init__(self, path: str, compression: str, size: int) -> None:
        """`size`: of the file, in bytes."""
        self._path = path
        self._compression = compression
        self._size = size
        self._unpacked = 0
        self._stream: Any = None
        if compression == "xz":
            self._stream = _Xz(path)
        else:
            import pyarrow

            self._stream = pyarrow.input_stream(path, compression=compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Unpack the next bytes. Raises OSError if they are damaged or missing, DataError if they are too many."""
        try:
            count: int = self._stream.readinto(buffer)
        except (OSError, EOFError, ValueError, lzma.LZMAError) as error:  # pyarrow's own errors are ValueErrors
            raise OSError(f"{self._compression}, and damaged, cut off or followed by other bytes: {error}") from error
        self._unpacked += count
        most = _ALWAYS + _TIMES * self._size
        if self._unpacked > most:
            raise DataError(
                f"{self._path} has {self._size:,} bytes and unpacks to over {most:,}, as hardly any text does: take it "
                "out of data.sources.path or, if you trust its content, decompress it"
            )
        return count

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
