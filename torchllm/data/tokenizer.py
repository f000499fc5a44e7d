"""Encode text as token ids and decode it: bytes, tiktoken rank files, Hugging Face's tokenizer.json; all local files.

A document is never trusted: text that looks like a special token ("<|end_of_text|>") is encoded as ordinary text.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import tiktoken
from tiktoken.load import load_tiktoken_bpe

from torchllm.data.error import DataError
from torchllm.data.pieces import CONTEXT, cut_places
from torchllm.git_lfs import why_pointer

Ids = npt.NDArray[np.unsignedinteger[Any]]
Pattern = Literal["llama3", "cl100k", "gpt2", "o200k"]

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
_LONG_PIECE = 10_000
"""characters encoded at a time in a text that the pattern cannot split, such as a megabyte of blanks"""


class Tokenizer(Protocol):
    """Interface of a tokenizer."""

    name: str
    """data.tokenizer: "bytes" or a path"""
    vocab: int
    """ids are 0 <= id < vocab, special tokens included"""
    begin: int | None
    """id put before a document; None: none, e.g. Qwen"""
    end: int
    """id put after a document; generation stops at it"""
    fingerprint: str
    """changes if any text could be encoded differently"""
    earlier_fingerprints: tuple[str, str]
    """fingerprints in earlier versions, newest first: same ids of documents, but possibly another begin"""
    begins: Mapping[str, int | None]
    """id put before a document, for each of these fingerprints"""
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


LARGEST_TOKENIZER = 1 << 30
"""bytes of a tokenizer's file"""


@lru_cache(maxsize=4)
def load_tokenizer(name: str, pattern: Pattern = "llama3", threads: int = 1) -> Tokenizer:
    """Return the tokenizer of data.tokenizer (`name`) and data.pattern.

    `threads` encode the documents of one call in parallel (a Hugging Face tokenizer uses one CPU for 1, else all).
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
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path, threads)
    return TiktokenTokenizer(path, pattern, threads)


def describe_documents(tokenizer: Tokenizer) -> list[str]:
    """Return a line about the ids before and after a document, and lines about ignored settings."""
    end = f"{tokenizer.decode([tokenizer.end])} ({tokenizer.end})"
    before = "nothing" if tokenizer.begin is None else f"{tokenizer.decode([tokenizer.begin])} ({tokenizer.begin})"
    return [f"data.tokenizer: before a document {before}, after it {end}", *tokenizer.notes]


def begin_of_text(tokenizer: Tokenizer, fingerprints: Sequence[str]) -> list[int]:
    """Return the ids before a document in corpora of a tokenizer with these fingerprints, of any version.

    Without a fingerprint of this tokenizer: the current ids.
    """
    known = [tokenizer.begins[fingerprint] for fingerprint in fingerprints if fingerprint in tokenizer.begins]
    begin = known[0] if known else tokenizer.begin
    return [] if begin is None else [begin]


class ByteTokenizer:
    """The 256 bytes of UTF-8 and two special tokens."""

    def __init__(self) -> None:
        self.encoding = tiktoken.Encoding(
            name="bytes",
            pat_str=r"(?s:.)",
            mergeable_ranks={bytes([value]): value for value in range(256)},
            special_tokens={BEGIN: 256, END: 257},
        )
        self.name, self.vocab, self.end = "bytes", 258, 257
        self.begin: int | None = 256
        self.fingerprint = "bytes"
        self.earlier_fingerprints = ("bytes", "bytes")
        self.begins: Mapping[str, int | None] = {"bytes": self.begin}
        self.unknown: int | None = None
        self.notes: Sequence[str] = ()

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text: the same ids as the encoding's, without its search for merges."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def find_cut(self, text: str, start: int) -> int:
        """Return the end of the text: bytes do not depend on each other."""
        return len(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens by their names; U+FFFD for ids without a token and invalid UTF-8."""
        return _decode(self.encoding, ids)


def _decode(encoding: tiktoken.Encoding, ids: Sequence[int]) -> str:
    """Return the text of ids, with U+FFFD for ids that have no token; tiktoken's own `decode` raises for them."""
    content = bytearray()
    for token in ids:
        try:
            content += encoding.decode_single_token_bytes(token)
        except KeyError:
            content += "\ufffd".encode()
    return content.decode("utf-8", errors="replace")


class _Vocabulary(NamedTuple):
    """The parts of a tokenizer that its rank file lacks."""

    split: str
    """regular expression that splits text into the pieces within which bytes are merged"""
    special: dict[str, int]
    """ids of the special tokens"""
    begin: str
    """special token that begins a document; earlier versions also used it if it is the end token"""
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
            f"data.tokenizer: {path} has {ranks:,} ranks, those of {_OTHER_RANKS[ranks]}, whose pattern is not built "
            "in: use the tokenizer.json of the model"
        )
    right = _PATTERN_OF_RANKS.get(ranks, pattern)
    if right != pattern:
        raise DataError(
            f'data.pattern: {path} has {ranks:,} ranks, those of the pattern "{right}", not of "{pattern}", which '
            f'would give other tokens than its models were trained on: set data.pattern = "{right}"'
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
        earlier = f"{path.name}-{pattern}-{digest[:16]}"
        self.fingerprint = earlier if begin == self.begin else f"{path.name}-{pattern}-{self.begin}-{digest[:16]}"
        self.earlier_fingerprints = (earlier, earlier)
        self.begins: Mapping[str, int | None] = {self.fingerprint: self.begin, earlier: begin}
        self.unknown: int | None = None
        self.notes: Sequence[str] = ()
        self.threads = threads

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, without begin and end."""
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
        """Return the text of ids; special tokens by their names; U+FFFD for ids without a token and invalid UTF-8."""
        return _decode(self.encoding, ids)


_BEGIN_NAMES = (BEGIN, "<s>", "<bos>", "[BOS]", "<|startoftext|>")
_END_NAMES = (END, "</s>", "<eos>", "[EOS]", "<|endoftext|>")
_PLACES_TRIED = 16
"""places to try with a tokenizer.json before giving up; words around a place to try as a text"""


class _TokenizerConfig(NamedTuple):
    """Settings of a tokenizer_config.json; "" if a setting is missing."""

    begin: str = ""
    end: str = ""
    add_begin: bool | None = None
    """whether a begin is put before a text; transformers goes by tokenizer.json, and ignores it"""


def _read_tokenizer_config(path: Path) -> _TokenizerConfig:
    """Read a tokenizer_config.json, which need not exist. Raises DataError that names it if it is damaged."""
    if not path.is_file():
        return _TokenizerConfig()
    try:
        content = json.loads(path.read_text("utf-8"))
        names = []
        for key in ("bos_token", "eos_token"):
            token = content.get(key) or ""
            names.append(str(token["content"] if isinstance(token, dict) else token))
        add_begin = content.get("add_bos_token")
    except (OSError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise DataError(
            f"data.tokenizer: {path} cannot be read ({type(error).__name__}: {error}): copy it again, or delete it if "
            "the tokens of the tokenizer have their usual names"
        ) from error
    begin, end = names
    return _TokenizerConfig(begin, end, add_begin if isinstance(add_begin, bool) else None)


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer.json.

    The end token comes from a tokenizer_config.json in the same folder; without that file, from the usual names. As in
    transformers, the begin token is the token that the post-processor of tokenizer.json adds, whatever bos_token the
    config names. There is no begin token if the post-processor adds none, or if it is the end token: one token is
    enough between two documents.
    """

    def __init__(self, path: Path, threads: int) -> None:
        """Read a tokenizer.json. Raises DataError if it is none, or its end-of-text token is unknown."""
        import tokenizers

        # Otherwise the library warns at every later fork of this process.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        try:
            self.encoding = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"data.tokenizer: {path} is not a Hugging Face tokenizer.json ({error})") from error
        self.encoding.encode_special_tokens = True
        self.encoding.no_truncation()
        self.encoding.no_padding()
        self.name = str(path)
        size = self.encoding.get_vocab_size(with_added_tokens=True)
        largest_id = max(self.encoding.get_vocab(with_added_tokens=True).values())
        self.vocab = max(size, largest_id + 1)  # the ids may have gaps
        config_file = path.with_name("tokenizer_config.json")
        config = _read_tokenizer_config(config_file)
        end = self._special_id(config.end, _END_NAMES)
        if end is None and config.end:
            raise DataError(
                f"data.tokenizer: {config_file} names {config.end!r} as the end of a text (eos_token), a token that "
                f"{path} does not have: name one that it has"
            )
        if end is None:
            raise DataError(
                f"data.tokenizer: {path} has none of the usual end-of-text tokens: name its own in {config_file} "
                "(eos_token)"
            )
        self.end = end
        added = self._added_begin()
        self.begin: int | None = None if added == end else added
        self.notes: Sequence[str] = self._notes(config, config_file)
        self.unknown = self._unknown_id()
        named = self._special_id(config.begin, ())
        usual = self._special_id(config.begin, _BEGIN_NAMES)
        begins = [self.begin, named if config_file.is_file() else usual, end if usual is None else usual]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        fingerprints = [f"{path.name}-{begin}-{end}-{digest[:16]}" for begin in begins]
        self.fingerprint = fingerprints[0]
        self.earlier_fingerprints = (fingerprints[1], fingerprints[2])
        self.begins: Mapping[str, int | None] = dict(zip(fingerprints, begins, strict=True))

    def _added_begin(self) -> int | None:
        """Return the token that the post-processor puts before a text; of several the last."""
        words = islice(self.encoding.get_vocab(with_added_tokens=False), _PLACES_TRIED)
        for text in ("a", *words):
            try:
                encoding = self.encoding.encode(text, add_special_tokens=True)
            except Exception:  # the library raises bare Exception, here for a text that the tokenizer does not know
                continue
            before = list(takewhile(bool, encoding.special_tokens_mask))
            if len(before) < len(encoding.ids):
                return encoding.ids[len(before) - 1] if before else None
        return None

    def _notes(self, config: _TokenizerConfig, config_file: Path) -> list[str]:
        """Return lines about begin tokens in the files that are ignored."""
        if config.begin and self.encoding.token_to_id(config.begin) is None:
            return [
                f"data.tokenizer: {config_file} names {config.begin!r} as the begin of a text (bos_token), which "
                f"{self.name} does not have: it is put before no document"
            ]
        if config.add_begin in (None, self.begin is not None) or config.begin == config.end:
            return []
        return [
            f"data.tokenizer: {config_file} says add_bos_token = {str(config.add_begin).lower()}, which transformers "
            f"does not follow either: what is put before a text is what the post-processor of {self.name} adds"
        ]

    def _unknown_id(self) -> int | None:
        """Return the id of unknown text, None if there is none."""
        model = self.encoding.model
        if hasattr(model, "unk_token"):
            return None if model.unk_token is None else self.encoding.token_to_id(model.unk_token)
        unknown: int | None = json.loads(self.encoding.to_str())["model"].get("unk_id")  # of a Unigram
        return unknown

    def _special_id(self, configured: str, usual_names: Sequence[str]) -> int | None:
        """Return the id of the token that the config names, else of the first usual name that exists."""
        for candidate in [configured] if configured else usual_names:
            token: int | None = self.encoding.token_to_id(candidate)
            if token is not None:
                return token
        return None

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, without begin and end."""
        encodings = self.encoding.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def find_cut(self, text: str, start: int) -> int:
        """Return a place after `start` where cutting the text does not change its ids; 0 if none is found.

        The file may have any pattern or none, or put a blank before each text, so some places are tried.
        """
        candidates = (cut for cut in cut_places(text, start) if cut <= len(text) - CONTEXT)
        for cut in islice(candidates, _PLACES_TRIED):
            left = text[max(0, cut - CONTEXT) : cut]
            right = text[cut : cut + CONTEXT]
            uncut, left_ids, right_ids = self.encode_documents([left + right, left, right])
            if np.array_equal(uncut, np.concatenate([left_ids, right_ids])):
                return cut
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens by their names."""
        return self.encoding.decode(list(ids), skip_special_tokens=False)
