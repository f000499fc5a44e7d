"""Encode text as token ids and decode it: bytes, or a local tokenizer.json of Hugging Face.

A document is never trusted: text that looks like a special token ("<|end_of_text|>") is encoded as ordinary text.
"""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchllm.config.errors import DataError
from torchllm.config.files import why_pointer
from torchllm.data.registry import TOKENIZERS

Ids = npt.NDArray[np.unsignedinteger[Any]]
ByteLengths = npt.NDArray[np.int32]
"""(vocab,), bytes of UTF-8 that each id stands for in a text; 0 for a special token, and an id without a token"""

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
LARGEST_TOKENIZER = 1 << 30
"""bytes of a tokenizer's file"""
_SAMPLE = "The cat's 2 naïve friends\n\tsaid:  «Hello, World!» (東京, 1999.5 km)\n" * 8


class Tokenizer(Protocol):
    """Interface of a tokenizer."""

    name: str
    """data.tokenizer: "bytes" or a path"""
    vocab: int
    """ids are 0 <= id < vocab, special tokens included"""
    begin: int | None
    """id put before a document, of several the last; None: none, e.g. Qwen"""
    end: int
    """id put after a document; generation stops at it"""
    fingerprint: str
    """changes if any text could be encoded differently"""
    begins: Sequence[int]
    """ids put before a document"""
    unknown: int | None
    """id of unknown text; None: the tokenizer encodes any text"""
    notes: Sequence[str]
    """lines about settings in its files that are ignored"""

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, without begin and end."""

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token, which no text has; None if there is none of this name."""

    def find_cut(self, text: str, start: int) -> int:
        """Return the last place after `start` to cut a long text (see `pieces`); 0 if there is none."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens by their names; U+FFFD for ids without a token and invalid UTF-8."""

    @property
    def byte_lengths(self) -> ByteLengths:
        """Return the bytes of each id, computed once."""


def bits_per_byte(nats: float, size: int) -> float:
    """Return the loss in bits per byte of a text of `size` bytes, comparable between tokenizers.

    nats: the loss of the tokens that stand for these bytes (`Tokenizer.byte_lengths`), without special tokens.
    """
    return nats / math.log(2) / size


@lru_cache(maxsize=4)
def load_tokenizer(name: str, threads: int = 1) -> Tokenizer:
    """Return the tokenizer of data.tokenizer (`name`), which encodes documents on one CPU for 1 thread, else on all.

    Raises DataError if the file is missing or is not a tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        raise DataError(f"data.tokenizer: {name!r} is a folder: name the tokenizer file in it, such as tokenizer.json")
    if not path.is_file():
        raise DataError(f'data.tokenizer: there is no file {name!r} (give "bytes" or the path of a tokenizer file)')
    if path.stat().st_size > LARGEST_TOKENIZER:
        raise DataError(f"data.tokenizer: {path} has {path.stat().st_size} bytes, more than any tokenizer")
    if reason := why_pointer(path, path.stat().st_size):
        raise DataError(f"data.tokenizer: {path} {reason}")
    if path.suffix != ".json":
        raise DataError(
            f"data.tokenizer: {path} is no tokenizer.json; models of SentencePiece and ranks of tiktoken are not read: "
            "use the tokenizer.json of the same model; transformers writes it with "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    if "tokenizer.json" not in TOKENIZERS:
        raise DataError(f"data.tokenizer: {path} has no reader: import torchllm.recipe, which registers all")
    tokenizer: Tokenizer = TOKENIZERS["tokenizer.json"](path, threads)
    return tokenizer


def describe_documents(tokenizer: Tokenizer) -> list[str]:
    """Return a line about the ids before and after a document, and lines about ignored settings and inexact bytes."""
    end = f"{tokenizer.decode([tokenizer.end])} ({tokenizer.end})"
    begins = [f"{tokenizer.decode([token])} ({token})" for token in tokenizer.begins]
    before = " ".join(begins) or "nothing"
    lines = [f"data.tokenizer: before a document {before}, after it {end}", *tokenizer.notes]
    (ids,) = tokenizer.encode_documents([_SAMPLE])
    counted, size = int(tokenizer.byte_lengths[ids].sum()), len(_SAMPLE.encode())
    if counted != size:
        difference = f"{counted / size - 1:+.1%}"
        lines.append(
            "data.tokenizer: its tokens are not exactly the bytes of a text: those of a sample have "
            f"{difference} bytes, and validation bits per byte are about as far off"
        )
    return lines


class ByteTokenizer:
    """The 256 bytes of UTF-8 and two special tokens."""

    def __init__(self) -> None:
        self.name, self.vocab, self.end = "bytes", 258, 257
        self.begin: int | None = 256
        self.fingerprint = "bytes"
        self.begins: Sequence[int] = (256,)
        self.unknown: int | None = None
        self.notes: Sequence[str] = ()

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def special_id(self, name: str) -> int | None:
        return None  # for others than begin and end

    def find_cut(self, text: str, start: int) -> int:
        """Return the end of the text: bytes do not depend on each other."""
        return len(text)

    def decode(self, ids: Sequence[int]) -> str:
        names = {256: BEGIN, 257: END}
        content = b"".join(bytes([token]) if token < 256 else names.get(token, "\ufffd").encode() for token in ids)
        return content.decode("utf-8", errors="replace")

    @cached_property
    def byte_lengths(self) -> ByteLengths:
        return (np.arange(self.vocab) < 256).astype(np.int32)
