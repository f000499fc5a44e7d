"""Tokenizers in Hugging Face's tokenizer.json."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from torchllm.config.errors import DataError
from torchllm.data.tokenizer import END, ByteLengths, Ids
from torchllm.tools.prepare.chat.tokenizer_config import TOKENIZER_CONFIG, read_tokenizer_config, special_tokens_of
from torchllm.tools.prepare.pieces import CONTEXT, cut_places

_END_NAMES = (END, "</s>", "<eos>", "[EOS]", "<|endoftext|>")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""token of a byte (SentencePiece's byte fallback)"""
_BLANK = "\u2581"
"""a blank in SentencePiece's tokens"""
_PLACES_TRIED = 16
"""places to try with a tokenizer.json before giving up; words around a place to try as a text"""


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer.json.

    The end token comes from a tokenizer_config.json in the same folder; without that file, from the usual names. As in
    transformers, the begin tokens are those that the post-processor of tokenizer.json adds, whatever bos_token the
    config names; usually it is one. There is none if the post-processor adds none, or if it is the end token: one token
    is enough between two documents. BPE's dropout is off, which gives a text other ids each time.
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
        dropout = getattr(self.encoding.model, "dropout", None)
        if dropout:
            self.encoding.model.dropout = None
        self.name = str(path)
        size = self.encoding.get_vocab_size(with_added_tokens=True)
        largest_id = max(self.encoding.get_vocab(with_added_tokens=True).values())
        self.vocab = max(size, largest_id + 1)  # the ids may have gaps
        config_file = path.with_name(TOKENIZER_CONFIG)
        config = read_tokenizer_config(path)
        named = special_tokens_of(config)
        named_begin, named_end = named.get("bos_token", ""), named.get("eos_token", "")
        end = self._special_id(named_end, _END_NAMES)
        if end is None and named_end:
            raise DataError(
                f"data.tokenizer: {config_file} names {named_end!r} as the end of a text (eos_token), a token that "
                f"{path} does not have: name one that it has"
            )
        if end is None:
            raise DataError(
                f"data.tokenizer: {path} has none of the usual end-of-text tokens: name its own in {config_file} "
                "(eos_token)"
            )
        self.end = end
        added = self._added_begins()
        before = () if added[-1:] == (end,) else added
        self.begin: int | None = before[-1] if before else None
        self.notes: Sequence[str] = self._notes(named_begin, named_end, config.get("add_bos_token"), config_file)
        if dropout:
            off = f"data.tokenizer: {path} drops {dropout:.0%} of BPE's merges at random: not here, where ids are fixed"
            self.notes = [*self.notes, off]
        self.unknown = self._unknown_id()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.begins: Sequence[int] = before
        self.fingerprint = f"{path.name}-{'+'.join(map(str, before)) or None}-{end}-{digest[:16]}"

    def _added_begins(self) -> tuple[int, ...]:
        """Return the tokens that the post-processor puts before a text."""
        words = islice(self.encoding.get_vocab(with_added_tokens=False), _PLACES_TRIED)
        for text in ("a", *words):
            try:
                encoding = self.encoding.encode(text, add_special_tokens=True)
            except Exception:  # the library raises bare Exception, here for a text that the tokenizer does not know
                continue
            before = list(takewhile(bool, encoding.special_tokens_mask))
            if len(before) < len(encoding.ids):
                return tuple(encoding.ids[: len(before)])
        return ()

    def _notes(self, begin: str, end: str, add_begin: object, config_file: Path) -> list[str]:
        """Return lines about begin tokens that the tokenizer_config.json names or wants, and that are ignored."""
        if begin and self.encoding.token_to_id(begin) is None:
            return [
                f"data.tokenizer: {config_file} names {begin!r} as the begin of a text (bos_token), which "
                f"{self.name} does not have: it is put before no document"
            ]
        if not isinstance(add_begin, bool) or add_begin == (self.begin is not None) or begin == end:
            return []
        return [
            f"data.tokenizer: {config_file} says add_bos_token = {str(add_begin).lower()}, which transformers "
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
        ids = map(self.encoding.token_to_id, [configured] if configured else usual_names)
        found: int | None = next((token for token in ids if token is not None), None)
        return found

    def special_id(self, name: str) -> int | None:
        added = self.encoding.get_added_tokens_decoder()
        return next((id_ for id_, token in added.items() if token.content == name), None)

    def with_special(self, ids: Sequence[int]) -> "HuggingFaceTokenizer":
        """Return a copy for which these added tokens are special: no text has them, and they stand for no bytes."""
        changed = copy(self)
        changed.encoding = deepcopy(self.encoding)
        changed.encoding.encode_special_tokens = True  # not in what the library copies
        changed.encoding.add_special_tokens([self.encoding.id_to_token(id_) for id_ in ids])
        changed.__dict__.pop("byte_lengths", None)
        return changed

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
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
        return self.encoding.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def byte_lengths(self) -> ByteLengths:
        """Return the bytes of each id, as far as the decoder can tell them without a text around the id."""
        decoder = json.loads(self.encoding.to_str())["decoder"] or {}
        decoders = {step["type"]: step for step in decoder.get("decoders", [decoder]) if step}
        lengths = np.zeros(self.vocab, dtype=np.int32)
        for token, id_ in self.encoding.get_vocab(with_added_tokens=False).items():
            if id_ != self.unknown:
                lengths[id_] = _token_bytes(token, decoders)
        for id_, added in self.encoding.get_added_tokens_decoder().items():
            lengths[id_] = 0 if added.special else len(added.content.encode())
        return lengths


def _token_bytes(token: str, decoders: Mapping[str, Mapping[str, Any]]) -> int:
    """Return how many bytes of a text a token stands for; decoders: steps of tokenizer.json's decoder, by type."""
    if "ByteLevel" in decoders:  # a letter for each byte
        return len(token)
    if "ByteFallback" in decoders and _BYTE.fullmatch(token):
        return 1
    if "WordPiece" in decoders:  # the begin of a word stands for the blank before it
        prefix = decoders["WordPiece"]["prefix"]
        return len(token.removeprefix(prefix).encode()) + (not token.startswith(prefix))
    suffix = decoders.get("BPEDecoder", {}).get("suffix", "")
    blank = decoders.get("Metaspace", {}).get("replacement", _BLANK)
    text = token.removesuffix(suffix) + " " if suffix and token.endswith(suffix) else token
    return len(text.replace(blank, " ").encode())
