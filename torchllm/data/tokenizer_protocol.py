"""The interface of all tokenizers."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import tiktoken

Ids = npt.NDArray[np.unsignedinteger[Any]]
Pattern = Literal["llama3", "cl100k", "gpt2", "o200k"]

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


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
    earlier_fingerprints: tuple[str, str]
    """fingerprints in earlier versions, newest first: same ids of documents, but possibly another begin"""
    begins: Mapping[str, tuple[int, ...]]
    """ids put before a document, for each of these fingerprints"""
    unknown: int | None
    """id of unknown text; None: the tokenizer encodes any text"""
    notes: Sequence[str]
    """lines about settings in its files that are ignored"""

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, without begin and end."""

    def find_cut(self, text: str, start: int) -> int:
        """Return the last place after `start` to cut a long text (see `pieces`); 0 if there is none."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens by their names; U+FFFD for ids without a token and invalid UTF-8."""


def decode_ids(encoding: tiktoken.Encoding, ids: Sequence[int]) -> str:
    """Return the text of ids, with U+FFFD for ids that have no token; tiktoken's own `decode` raises for them."""
    content = bytearray()
    for token in ids:
        try:
            content += encoding.decode_single_token_bytes(token)
        except KeyError:
            content += "\ufffd".encode()
    return content.decode("utf-8", errors="replace")
