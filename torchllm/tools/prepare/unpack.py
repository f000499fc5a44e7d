"""Read compressed files as their content: gzip, zstd and lz4 (of several frames, too), bz2 and xz.

A compressed file can only be read from its beginning. The unpacked size is limited: a file of some KB may hold more
than all memory and disks.
"""

import io
import lzma
import os
from collections.abc import Callable
from functools import cache
from typing import Any, BinaryIO, NoReturn

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
    return io.BufferedReader(_Unpacked(path, compression, _open_stream(path, compression), lambda: size), _BUFFER)


def first_bytes(path: str, size: int = HEAD) -> bytes:
    """Return the first bytes of a file's content. Raises OSError."""
    with open_unpacked(path) as file:
        return file.read(size)


def most_unpacked(size: int) -> int:
    """Return to how many bytes a file of `size` bytes may unpack."""
    return _ALWAYS + _TIMES * size


def refuse_bomb(path: str, size: int) -> NoReturn:
    """Raise the DataError of a file of `size` bytes that unpacks to more than it may."""
    raise DataError(
        f"{path} has {size:,} bytes and unpacks to over {most_unpacked(size):,}, as hardly any text does: take it out "
        "of data.sources.path or, if you trust its content, decompress it"
    )


def _open_stream(path: str, compression: str) -> Any:
    if compression == "xz":
        return _Xz(path)
    import pyarrow

    return pyarrow.input_stream(path, compression=compression)


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
        """Close the file."""
        self._file.close()


@cache
def limit_fsspec() -> None:
    """Limit what compressed files unpack to that libraries read through fsspec, as `datasets` reads the hub's."""
    from fsspec.compression import compr, register_compression

    for name in ("gzip", "bz2", "xz", "lzma", "zstd", "lz4"):
        if name in compr:
            register_compression(name, _limited(compr[name], name), (), force=True)


def _limited(unpack: Callable[..., Any], compression: str) -> Callable[..., Any]:
    """Return one of fsspec's functions (file, mode) -> content, with the limit."""

    def limited(file: Any, mode: str = "rb", **options: Any) -> Any:
        stream = unpack(file, mode=mode, **options)
        if "r" not in mode:
            return stream
        name = getattr(file, "path", getattr(file, "name", "a file"))
        return io.BufferedReader(_Unpacked(name, compression, stream, file.tell), _BUFFER)

    return limited


class _Unpacked(io.RawIOBase):
    """The content of a compressed file."""

    def __init__(self, path: str, compression: str, stream: Any, size: Callable[[], int]) -> None:
        """`stream` has the content; `size` returns how many bytes the file has, or how many of them were read."""
        self._path = path
        self._compression = compression
        self._size = size
        self._unpacked = 0
        self._stream = stream

    def readable(self) -> bool:
        """Say that this can be read."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Unpack the next bytes. Raises OSError if they are damaged or missing, DataError if they are too many."""
        try:
            count: int = self._stream.readinto(buffer)
        except (OSError, EOFError, ValueError, lzma.LZMAError) as error:  # pyarrow's own errors are ValueErrors
            raise OSError(f"{self._compression}, and damaged, cut off or followed by other bytes: {error}") from error
        self._unpacked += count
        if self._unpacked > _ALWAYS and self._unpacked > most_unpacked(self._size()):
            refuse_bomb(self._path, self._size())
        return count

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._stream.close()
        super().close()
