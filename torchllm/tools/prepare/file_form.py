"""The form of a file by its first bytes, whatever its name: compressed text, or a form that is not read as text."""

import json
import re

HEAD = 512
"""first bytes of a file that tell its form"""
_LOOKED_AT = 2**18
"""bytes of the first line of JSON that are looked at"""

_COMPRESSIONS = {
    "gzip": rb"\x1f\x8b\x08",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # the second: a frame to skip, as pzstd writes before each
    "bz2": rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)",
    "lz4": rb"\x04\x22\x4d\x18",
}
_UNPACK = "unpack it"
_FORMS = {
    rb"(?s)PK\x03\x04.{26}[\w./-]*/?data\.pkl": "a checkpoint of torch, which is no text",
    rb"PK\x03\x04|PK\x05\x06": f"a zip archive: {_UNPACK}",
    rb"7z\xbc\xaf\x27\x1c": f"a 7z archive: {_UNPACK}",
    rb"Rar!\x1a\x07": f"a rar archive: {_UNPACK}",
    rb"\xfd7zXZ\x00": f"compressed (xz): {_UNPACK}",
    rb"(?s).{257}ustar": f"a tar archive: {_UNPACK}",
    rb"\x1f\x9d": f"compressed (.Z): {_UNPACK}",
    rb"\xff\x06\x00\x00sNaPpY": f"compressed (snappy): {_UNPACK}",
    rb"PAR1": 'parquet: set kind = "parquet"',
    rb"ARROW1|\xff\xff\xff\xff": "an Arrow file: write it as parquet (datasets: to_parquet)",
    rb"\x93NUMPY": "an array of numpy",
    rb"\x89HDF\r\n": "an HDF5 file: write it as parquet",
    rb"SQLite format 3\0": "an SQLite database: write it as parquet",
    rb"%PDF-": "a PDF: extract its text",
    rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff": "text in UTF-16 or UTF-32: convert it by iconv -t UTF-8",
}


def compression_of(head: bytes) -> str:
    """Return how a file that begins with `head` is compressed; "" if it is not."""
    return next((name for name, magic in _COMPRESSIONS.items() if re.match(magic, head)), "")


def foreign_form(head: bytes) -> str:
    """Return the form of a file that begins with `head`, with advice, if it is known and not text in UTF-8; else ""."""
    return next((form for magic, form in _FORMS.items() if re.match(magic, head)), "")


def is_json_array(content: bytes) -> bool:
    """Return whether the content of a file, or its first 256 KiB, is one JSON array instead of lines of JSON."""
    content = content[:_LOOKED_AT].removeprefix(b"\xef\xbb\xbf").strip()
    if not content.startswith(b"["):
        return False
    first, _, rest = content.partition(b"\n")
    if not rest:
        return True
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return True
    return False  # lines that are arrays
