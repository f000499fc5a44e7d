"""One record of a raw source: a document, or its fault.

Everything that can be wrong with a text is found here, before any of it is tokenized, and written into the record. So
reading continues, and `data.on_bad_record` decides later.
"""

import codecs
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchllm.tools.prepare.file_form import foreign_form
from torchllm.tools.prepare.unpack import first_bytes, open_unpacked

BLOCK = 2**18
"""bytes read, or characters handled, at a time"""
IN_MEMORY = 2**19
"""a text of more bytes is tokenized in pieces; a text file of more bytes is not kept in memory, but read again"""
EMPTY_FILE = "empty file"
"""kind of a file that holds nothing but blanks: no fault, because nothing could be missed"""
UNREADABLE = "unreadable file"
"""fault of a file that cannot be read; a file in several shards has it in each"""
ANOTHER_FORM = "file of another form"
"""fault of a file that is not of the kind of its source"""
WRONG_KEY = "wrong key"
"""fault of a record, or of a file of records, that has nothing under the key of the config"""
NO_PLACE_TO_CUT = "no place to cut"
"""fault of a long text that cannot be tokenized in pieces"""


class Origin(NamedTuple):
    """Where a record, or its fault, begins."""

    name: str
    """file; of a data set of the hub, its id and split"""
    row: int | None = None
    """number of the row, from 0"""
    byte: int | None = None
    """offset in the file"""

    def describe(self) -> str:
        """Return file:line, file and row, or file.

        The line is found by counting line ends from the start of the file, so call this for an error message only.
        """
        if self.row is not None:
            return f"{self.name} row {self.row}"
        if self.byte is None:
            return self.name
        return f"{self.name}:{_line_ends(self.name, self.byte) + 1}"


def _line_ends(path: str, stop: int) -> int:
    """Return the number of line ends in the first `stop` bytes of a file."""
    count = 0
    with open_unpacked(path) as file:
        while stop > 0:
            block = file.read(min(BLOCK, stop))
            if not block:
                break
            count += block.count(b"\n")
            stop -= len(block)
    return count


class TextRecord(NamedTuple):
    """One record of a source: a document, or its fault."""

    origin: Origin
    text: str = ""
    """empty if the record has a fault, or is a large file"""
    size: int = 0
    """bytes of the text in UTF-8"""
    text_hash: int = 0
    """64 bits of the BLAKE2b of the text in UTF-8: the same text has the same hash in any source"""
    fault: str = ""
    """kind of fault, such as "not UTF-8"; empty for a good record"""
    detail: str = ""
    """details of the fault in the error message"""
    ids: "npt.NDArray[np.uint32] | None" = None
    """of a document that is token ids already, in place of a text"""

    @property
    def is_long(self) -> bool:
        """Return whether the text is tokenized in pieces."""
        return self.size > IN_MEMORY and self.ids is None

    def is_held_out(self, fraction: float) -> bool:
        """Return whether the text is among this fraction of all texts: the same in any source."""
        return (self.text_hash >> 11) * 2.0**-53 < fraction  # 53 bits as a float in [0, 1)

    def blocks(self) -> Iterator[str]:
        """Yield the text in blocks of at most BLOCK characters; a large file is read again."""
        if not self.text and self.size:
            yield from _decoded_file(self.origin.name)
        for start in range(0, len(self.text), BLOCK):
            yield self.text[start : start + BLOCK]


def _hash_number(digest: blake2b) -> int:
    """Return a hash as a number of 64 bits."""
    return int.from_bytes(digest.digest(), "little")


def check_text(text: object, origin: Origin) -> TextRecord:
    """Return the record of a value that should be a text."""
    if not isinstance(text, str):
        return TextRecord(origin, fault="not text", detail=f" but {type(text).__name__}")
    if not text or text.isspace():
        return TextRecord(origin, fault="empty document")
    if "\0" in text:
        return TextRecord(origin, fault="NUL character")
    size, digest = 0, blake2b(digest_size=8)
    try:
        for start in range(0, len(text), BLOCK):
            encoded = text[start : start + BLOCK].encode()
            size += len(encoded)
            digest.update(encoded)
    except UnicodeEncodeError:
        return TextRecord(origin, fault="half of a surrogate pair", detail=" (not Unicode text)")
    return TextRecord(origin, text, size, _hash_number(digest))


MASKS_OF_TOKENS = ("attention_mask", "labels")
"""columns next to token ids that may mark some of them as padding or not trained"""


def check_document(fields: Mapping[str, Any], key: str, origin: Origin) -> TextRecord:
    """Return the record of a row with a text under `key`, or with token ids, which are used as they are."""
    value = fields[key]
    if not isinstance(value, list):
        return check_text(value, origin)
    if not value:
        return TextRecord(origin, fault="empty document")
    if not all(type(number) is int and 0 <= number < 2**31 for number in value):
        return TextRecord(origin, fault="not token ids", detail=f": {key!r} is a list of other values")
    for name, kept in (("attention_mask", [1] * len(value)), ("labels", value)):
        if fields.get(name) not in (None, kept):
            detail = f": {name!r} masks some, and masks are not read; write documents without padding"
            return TextRecord(origin, fault="masked token ids", detail=detail)
    ids = np.array(value, dtype=np.uint32)
    digest = blake2b(ids.tobytes(), digest_size=8)
    return TextRecord(origin, size=ids.nbytes, text_hash=_hash_number(digest), ids=ids)


class _BadByte(ValueError):
    """A text file is not UTF-8, or has a NUL character."""

    def __init__(self, offset: int, value: int) -> None:
        """`value` is the byte at `offset` of the file."""
        self.offset = offset
        self.value = value


def _decoded_file(path: str) -> Iterator[str]:
    """Yield the text of a UTF-8 file in blocks, without its byte order mark. Raises _BadByte, and OSError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_unpacked(path) as file:
        raw = file.read(BLOCK)
        offset = len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0
        raw = raw[offset:]
        while True:
            undecoded = len(decoder.getstate()[0])  # the first bytes of a character that ends in this block
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise _BadByte(offset - undecoded + error.start, error.object[error.start]) from error
            if b"\0" in raw:
                raise _BadByte(offset + raw.index(b"\0"), 0)
            yield text
            if not raw:
                break
            offset += len(raw)
            raw = file.read(BLOCK)


def read_text_file(path: str) -> TextRecord:
    """Return the record of a whole text file, which is read block by block.

    The text of a file over IN_MEMORY bytes is not in the record; `TextRecord.blocks` reads it.
    """
    size, digest = 0, blake2b(digest_size=8)
    in_memory: list[str] = []
    blank = True
    try:
        if form := foreign_form(first_bytes(path)):
            return another_form(path, form)
        for text in _decoded_file(path):
            encoded = text.encode()
            size += len(encoded)
            digest.update(encoded)
            blank = blank and (not text or text.isspace())
            if size <= IN_MEMORY:
                in_memory.append(text)
            else:
                in_memory.clear()
    except OSError as error:
        return unreadable_file(path, error)
    except _BadByte as error:
        if error.value == 0:
            return TextRecord(Origin(path, byte=error.offset), fault="NUL character")
        return not_utf8(path, error.offset, error.value)
    if blank:
        return TextRecord(Origin(path), fault=EMPTY_FILE)
    return TextRecord(Origin(path), "".join(in_memory), size, _hash_number(digest))


def unreadable_file(path: str, error: Exception) -> TextRecord:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return TextRecord(Origin(path), fault=UNREADABLE, detail=f" ({reason})")


def another_form(path: str, form: str) -> TextRecord:
    """Return the record of a file that is known to be of another form; `form` names it, with advice."""
    return TextRecord(Origin(path), fault=ANOTHER_FORM, detail=f": it is {form}")


def not_utf8(path: str, byte: int, value: int) -> TextRecord:
    """Return the record of bytes that are not UTF-8; the first wrong one is at `byte` of the file."""
    return TextRecord(Origin(path, byte=byte), fault="not UTF-8", detail=f" (byte 0x{value:02x})")
