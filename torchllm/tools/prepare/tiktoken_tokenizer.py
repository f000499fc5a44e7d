"""Tokenizers in tiktoken's rank files."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
from tiktoken.load import load_tiktoken_bpe

from torchllm.data.error import DataError
from torchllm.data.tokenizer import BEGIN, END, ByteLengths, Ids, Pattern, byte_lengths_of, decode_ids
from torchllm.tools.prepare.pieces import cut_places

_LONG_PIECE = 10_000
"""characters encoded at a time in a text that the pattern cannot split, such as a megabyte of blanks"""


class _Vocabulary(NamedTuple):
    """The parts of a tokenizer that its rank file lacks."""

    split: str
    """regular expression that splits text into the pieces within which bytes are merged"""
    special: dict[str, int]
    """ids of the special tokens"""
    begin: str
    """special token that begins a document, unless it is the end token"""
    end: str
    """special token that ends a document"""


_PATTERN_OF_RANKS: dict[int, Pattern] = {
    50_256: "gpt2",  # r50k_base
    50_281: "gpt2",  # p50k_base, whose ranks have a gap for <|endoftext|>
    100_256: "cl100k",
    128_000: "llama3",
    199_998: "o200k",
}
"""ranks of a published file -> its pattern"""
_OTHER_RANKS = {151_643: "Qwen", 163_584: "Kimi K2", 200_000: "Llama 4"}
"""ranks of a published file whose pattern is not built in -> its model"""


def _check_pattern(path: Path, pattern: Pattern, ranks: int) -> None:
    """Raise DataError if a rank file of `ranks` tokens is a published one that splits text by another pattern."""
    if ranks in _OTHER_RANKS:
        raise DataError(
            f"data.tokenizer: {path} has {ranks:,} ranks, like {_OTHER_RANKS[ranks]}, whose pattern is not built in: "
            "use the tokenizer.json of the model"
        )
    right = _PATTERN_OF_RANKS.get(ranks, pattern)
    if right != pattern:
        raise DataError(
            f'data.pattern: {path} has {ranks:,} ranks, like the pattern "{right}"; "{pattern}" would give other '
            f'tokens than its models were trained on: set data.pattern = "{right}"'
        )


def _vocabulary(pattern: Pattern, ranks: int) -> _Vocabulary:
    """Return the encoding of `pattern` for a rank file of `ranks` tokens. The patterns are tiktoken_ext's."""
    if pattern == "gpt2":
        split = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
        return _Vocabulary(split, {"<|endoftext|>": min(ranks, 50_256)}, "<|endoftext|>", "<|endoftext|>")
    if pattern == "o200k":
        upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
        contraction = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        split = (
            rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]*[{lower}]+{contraction}"
            rf"|[^\r\n\p{{L}}\p{{N}}]?[{upper}]+[{lower}]*{contraction}"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        special = {"<|endoftext|>": ranks + 1, "<|endofprompt|>": ranks + 20}
        return _Vocabulary(split, special, "<|endoftext|>", "<|endoftext|>")
    if pattern == "cl100k":
        special = {
            "<|endoftext|>": ranks + 1,
            "<|fim_prefix|>": ranks + 2,
            "<|fim_middle|>": ranks + 3,
            "<|fim_suffix|>": ranks + 4,
            "<|endofprompt|>": ranks + 20,
        }
        split = (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
            r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
        )
        return _Vocabulary(split, special, "<|endoftext|>", "<|endoftext|>")
    names = [BEGIN, END, "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>"]
    names += ["<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
    names += ["<|python_tag|>", "<|image|>"]
    names += [f"<|reserved_special_token_{index}|>" for index in range(2, 2 + 256 - len(names))]
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    special = {token: ranks + index for index, token in enumerate(names)}
    return _Vocabulary(split, special, BEGIN, END)


def split_pattern(pattern: Pattern) -> str:
    """Return the regular expression, in tiktoken's form, that splits text before merging."""
    return _vocabulary(pattern, 0).split


class TiktokenTokenizer:
    """A tiktoken rank file (a base64 token and its rank per line), such as Llama 3's tokenizer.model."""

    def __init__(self, path: Path, pattern: Pattern, threads: int) -> None:
        """Read a rank file. Raises DataError if it is no rank file, or a published one with another pattern."""
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if content[:1] == content[2:3] == b"\n":  # a message of protobuf, whose first field is one with a text
            raise DataError(
                f"data.tokenizer: {path} is a SentencePiece model, which is not read: use the tokenizer.json of the "
                "same model; transformers writes it with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        try:
            # tiktoken caches files by path and would return an old copy of a changed file: the hash prevents that
            ranks = load_tiktoken_bpe(str(path), expected_hash=digest)
        except ValueError as error:
            raise DataError(f"data.tokenizer: {path} is not a tiktoken rank file ({error})") from error
        count = max(ranks.values(), default=0) + 1
        _check_pattern(path, pattern, count)
        vocabulary = _vocabulary(pattern, count)
        self.encoding = tiktoken.Encoding(
            path.name, pat_str=vocabulary.split, mergeable_ranks=ranks, special_tokens=vocabulary.special
        )
        self.name = str(path)
        self.split = vocabulary.split
        self.vocab = self.encoding.n_vocab
        self.end = vocabulary.special[vocabulary.end]
        begin = vocabulary.special[vocabulary.begin]
        self.begin: int | None = None if begin == self.end else begin
        self.begins: Sequence[int] = () if self.begin is None else (begin,)
        named = pattern if self.begins else f"{pattern}-None"
        self.fingerprint = f"{path.name}-{named}-{digest[:16]}"
        self.unknown: int | None = None
        self.notes: Sequence[str] = ()
        self.threads = threads

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        if self.threads == 1:
            return [self._encode(text) for text in texts]
        with ThreadPoolExecutor(self.threads) as pool:  # the encoder releases the interpreter lock
            return list(pool.map(self._encode, texts))

    def _encode(self, text: str) -> Ids:
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # the regular expression ran out of stack on one huge piece
            pieces = []
            for start in range(0, len(text), _LONG_PIECE):
                piece = text[start : start + _LONG_PIECE]
                pieces.append(self.encoding.encode_to_numpy(piece, disallowed_special=()))
            return np.concatenate(pieces)

    def find_cut(self, text: str, start: int) -> int:
        """Return the last place after `start` where every match of the pattern ends; 0 if there is none."""
        return next(cut_places(text, start), 0)

    def decode(self, ids: Sequence[int]) -> str:
        return decode_ids(self.encoding, ids)

    @cached_property
    def byte_lengths(self) -> ByteLengths:
        return byte_lengths_of(self.encoding)
