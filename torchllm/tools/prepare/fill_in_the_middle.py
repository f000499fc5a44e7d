"""Fill-in-the-middle (data.fim_rate): documents whose middle is trained after the text that follows it.

A document is cut at two places of its characters, drawn uniformly, and its parts are written in another order, each
after a special token (Bavarian et al. 2022, arXiv 2207.14255, sections 3 and 4.4). The parts are tokenized one by one,
as they are when a model fills in text. Which documents, and where, a hash of the text decides: the corpus is the same
in any order of files, shards and processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np

from torchllm.config import Data
from torchllm.config.errors import DataError
from torchllm.data.tokenizer import Ids, Tokenizer
from torchllm.tools.prepare.hugging_face_tokenizer import HuggingFaceTokenizer


@dataclass(frozen=True)
class FillInTheMiddle:
    """The settings, part of the plan of a corpus."""

    rate: float
    style: Literal["psm", "spm"]
    tokens: tuple[int, ...]
    """ids before the prefix, the suffix and the middle"""

    def made_special(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return a tokenizer for which the tokens are special, also where its file says that they are not."""
        return tokenizer.with_special(self.tokens) if isinstance(tokenizer, HuggingFaceTokenizer) else tokenizer

    def cut(self, text: str, text_hash: int) -> list[str]:
        """Return prefix, middle and suffix of a document, or the whole text alone. text_hash: of `TextRecord`."""
        digest = blake2b(text_hash.to_bytes(8, "little"), digest_size=24, person=b"fim").digest()
        draw, first, second = (int.from_bytes(digest[index : index + 8], "little") for index in (0, 8, 16))
        if draw >= self.rate * 2**64:
            return [text]
        start, end = sorted(place * (len(text) + 1) >> 64 for place in (first, second))
        return [text[:start], text[start:end], text[end:]]

    def join(self, parts: Sequence[Ids]) -> Ids:
        """Return the ids of a document from the ids of each part of `cut`."""
        if len(parts) == 1:
            return parts[0]
        prefix, middle, suffix = parts
        before_prefix, before_suffix, before_middle = (np.array([token], dtype=np.uint32) for token in self.tokens)
        if self.style == "psm":
            ordered = [before_prefix, prefix, before_suffix, suffix, before_middle, middle]
        else:  # as the paper trains it together with psm: the middle goes on with the prefix
            ordered = [before_prefix, before_suffix, suffix, before_middle, prefix, middle]
        return np.concatenate(ordered)


def plan_fim(data: Data, tokenizer: Tokenizer, vocab: int) -> FillInTheMiddle:
    """Return the settings. DataError if the tokenizer or the model, with `vocab` tokens, lacks a special token."""
    ids = []
    for name in data.fim_tokens:
        token = tokenizer.special_id(name)
        if token is None or token >= vocab:
            lack = f"data.tokenizer {tokenizer.name!r} has no special token {name!r}"
            if token is not None:
                lack = f"{name!r} is token {token}, and model.vocab is {vocab}"
            raise DataError(f"data.fim_tokens: {lack}: name its own, use another tokenizer, or set data.fim_rate = 0")
        ids.append(token)
    return FillInTheMiddle(data.fim_rate, data.fim_style, tuple(ids))
