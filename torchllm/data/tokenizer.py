"""Text to token ids and back: bytes, tiktoken rank files, Hugging Face's tokenizer.json; all from local files.

A document is never trusted: text that looks like a special token ("<|end_of_text|>") is encoded as ordinary text.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import tiktoken
from tiktoken.load import load_tiktoken_bpe

from torchllm.data.error import DataError

Ids = npt.NDArray[np.unsignedinteger[Any]]
Pattern = Literal["llama3", "cl100k"]

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
_LONG_PIECE = 10_000
"""characters encoded at a time in a text that the pattern cannot split, such as a megabyte of blanks"""


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    name: str
    """what the user called it"""
    vocab: int
    """ids are 0 <= id < vocab, special tokens included"""
    begin: int
    """id put before a document"""
    end: int
    """id put after a document; generation stops at it"""
    fingerprint: str
    """changes when any text could be encoded differently"""

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, without begin and end."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens as their names; U+FFFD for what is no token (spare rows) or no UTF-8."""


@lru_cache(maxsize=4)
def load_tokenizer(name: str, pattern: Pattern = "llama3", threads: int = 1) -> Tokenizer:
    """The tokenizer that `data.tokenizer` and `data.pattern` name; DataError when its file is missing or unreadable.

    `threads` encode the documents of one call side by side (a Hugging Face tokenizer uses all CPUs, or one for 1).
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(f'data.tokenizer: there is no file {name!r} (give "bytes" or the path of a tokenizer file)')
    return JsonTokenizer(path, threads) if path.suffix == ".json" else RankTokenizer(path, pattern, threads)


class ByteTokenizer:
    """The 256 bytes of UTF-8 and two special tokens."""

    def __init__(self) -> None:
        self.encoding = tiktoken.Encoding(
            name="bytes",
            pat_str=r"(?s:.)",
            mergeable_ranks={bytes([value]): value for value in range(256)},
            special_tokens={BEGIN: 256, END: 257},
        )
        self.name, self.vocab, self.begin, self.end = "bytes", 258, 256, 257
        self.fingerprint = "bytes"

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """The bytes of each text: what the Encoding gives, without its search for merges (tested equal)."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return _decode(self.encoding, ids)


def _decode(encoding: tiktoken.Encoding, ids: Sequence[int]) -> str:
    def piece(token: int) -> bytes:
        try:
            return encoding.decode_single_token_bytes(token)
        except KeyError:
            return "\ufffd".encode()

    return b"".join(map(piece, ids)).decode("utf-8", errors="replace")


def _pattern(name: Pattern, ranks: int) -> tuple[str, dict[str, int], str, str]:
    """How text is split before merging, the special tokens, and which of them begin and end a document."""
    if name == "cl100k":
        middle = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
        special = {"<|endoftext|>": ranks + 1} | {token: ranks + 2 + index for index, token in enumerate(middle)}
        special["<|endofprompt|>"] = ranks + 20
        split = (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
            r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
        )
        return split, special, "<|endoftext|>", "<|endoftext|>"
    names = [BEGIN, END, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>"]
    names += ["<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
    names += ["<|python_tag|>", "<|image|>"]
    names += [f"<|reserved_special_token_{index}|>" for index in range(2, 2 + 256 - len(names))]
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return split, {token: ranks + index for index, token in enumerate(names)}, BEGIN, END


class RankTokenizer:
    """A tiktoken rank file (one base64 token and its rank a line), such as Llama 3's tokenizer.model."""

    def __init__(self, path: Path, pattern: Pattern, threads: int) -> None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        try:
            # tiktoken keeps a copy by path, and would serve a stale one after the file changed: the hash forbids that
            ranks = load_tiktoken_bpe(str(path), expected_hash=digest)
        except ValueError as error:
            raise DataError(f"data.tokenizer: {path} is not a tiktoken rank file ({error})") from error
        split, special, begin, end = _pattern(pattern, max(ranks.values(), default=0) + 1)
        self.encoding = tiktoken.Encoding(path.name, pat_str=split, mergeable_ranks=ranks, special_tokens=special)
        self.name, self.vocab = str(path), self.encoding.n_vocab
        self.begin, self.end = special[begin], special[end]
        self.fingerprint = f"{path.name}-{pattern}-{digest[:16]}"
        self.threads = threads

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        if self.threads == 1:
            return [self._encode(text) for text in texts]
        with ThreadPoolExecutor(self.threads) as pool:  # the encoder lets go of the interpreter lock
            return list(pool.map(self._encode, texts))

    def _encode(self, text: str) -> Ids:
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # the pattern ran out of its stack on one huge run
            pieces = [text[start : start + _LONG_PIECE] for start in range(0, len(text), _LONG_PIECE)]
            return np.concatenate([self.encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces])

    def decode(self, ids: Sequence[int]) -> str:
        return _decode(self.encoding, ids)


_BEGIN_NAMES = (BEGIN, "<s>", "<bos>", "[BOS]", "<|startoftext|>")
_END_NAMES = (END, "</s>", "<eos>", "[EOS]", "<|endoftext|>")


class JsonTokenizer:
    """A Hugging Face tokenizer.json; begin and end are those of tokenizer_config.json beside it, or the usual ones."""

    def __init__(self, path: Path, threads: int) -> None:
        import tokenizers

        # unset, the library would warn at every later fork of this process
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        try:
            self.encoding = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"data.tokenizer: {path} is not a Hugging Face tokenizer.json ({error})") from error
        self.encoding.encode_special_tokens = True
        self.encoding.no_truncation()
        self.encoding.no_padding()
        self.name, self.vocab = str(path), self.encoding.get_vocab_size(with_added_tokens=True)
        self.vocab = max(self.vocab, 1 + max(self.encoding.get_vocab(with_added_tokens=True).values()))
        beside = path.with_name("tokenizer_config.json")
        config = json.loads(beside.read_text("utf-8")) if beside.is_file() else {}
        end = self._first(config.get("eos_token"), _END_NAMES)
        begin = self._first(config.get("bos_token"), _BEGIN_NAMES)
        if end is None:
            raise DataError(f"data.tokenizer: {path} has no end-of-text token that is known: name it in {beside}")
        self.end = end
        self.begin = end if begin is None else begin  # as GPT-2 does
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.fingerprint = f"{path.name}-{self.begin}-{self.end}-{digest[:16]}"

    def _first(self, named: str | dict[str, str] | None, usual: Sequence[str]) -> int | None:
        content = named["content"] if isinstance(named, dict) else named
        ids = [self.encoding.token_to_id(name) for name in ([content] if content else usual)]
        return next((found for found in ids if found is not None), None)

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self.encoding.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoding.decode(list(ids), skip_special_tokens=False)
