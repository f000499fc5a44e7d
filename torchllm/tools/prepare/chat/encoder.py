"""Encode rendered conversations: ids, and the characters that each id stands for.

The whole text is encoded in one go, the template's special tokens as such, exactly as at inference: contents and
markers encoded apart would give ids that a model never sees there.

Where a message holds words that look like special tokens, they must become plain text in the same go. Then a copy of
the tokenizer encodes the text: in it each special token has a fence on both sides and the same id. In the text only
the template's special tokens get the fence, so that words of messages match none.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers

from torchllm.config.errors import DataError
from torchllm.data.tokenizer import Ids
from torchllm.tools.prepare.chat.marks import FENCE, RenderedChat, TextSpan, special_pattern

Offsets = npt.NDArray[np.int64]
"""(tokens, 2): the first character of each token in the text, and the end of it"""


class EncodedChat(NamedTuple):
    """The tokens of a text."""

    ids: Ids
    offsets: Offsets

    def inside(self, spans: Sequence[TextSpan]) -> npt.NDArray[np.bool_]:
        """Return which tokens hold a character of one of `spans`, (tokens,).

        A token without characters counts by its position.
        """
        starts, ends = self.offsets.T
        inside = np.zeros(len(self.ids), dtype=np.bool_)
        for span in spans:
            inside |= (starts < span.end) & (np.maximum(ends, starts + 1) > span.start)
        return inside

    def across(self, places: Sequence[int]) -> int:
        """Return how many tokens hold characters on both sides of one of `places`, characters of the text."""
        starts, ends = self.offsets.T
        return sum(int(((starts < place) & (ends > place)).sum()) for place in places)


class ChatEncoder:
    """A tokenizer.json, used on texts that hold its special tokens."""

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json. Raises DataError if it is none."""
        try:
            self._content: dict[str, Any] = json.loads(path.read_text("utf-8"))
            # A post-processor adds a second BOS, or trims blanks off the offsets; neither is wanted here.
            self._content |= {"post_processor": None, "truncation": None, "padding": None}
            if "dropout" in self._content["model"]:
                self._content["model"]["dropout"] = None  # ids are fixed
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self._content))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"data.tokenizer: {path} is not a Hugging Face tokenizer.json ({error})") from error
        added = self._content.get("added_tokens") or []
        self.special: list[str] = [token["content"] for token in added if token["special"]]
        """texts of the special tokens"""
        self.not_special: list[str] = [token["content"] for token in added if not token["special"]]
        """texts of the other added tokens"""
        self.added_pattern = special_pattern([token["content"] for token in added])
        """matches each token that the template may write and the merges do not make, special or not"""
        self.special_pattern = special_pattern(self.special)

    @cached_property
    def _fenced_tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer whose special tokens have a fence on both sides."""
        content = json.loads(json.dumps(self._content))
        special = set(self.special)
        for token in content["added_tokens"]:
            if token["content"] in special:
                token["content"] = _fenced(token["content"])
        model = content["model"]
        if isinstance(model["vocab"], dict):  # else it is a list of pieces and scores
            model["vocab"] = {_fenced(word) if word in special else word: row for word, row in model["vocab"].items()}
        else:
            model["vocab"] = [[_fenced(word) if word in special else word, score] for word, score in model["vocab"]]
        if model.get("unk_token") in special:
            model["unk_token"] = _fenced(model["unk_token"])
        return tokenizers.Tokenizer.from_str(json.dumps(content))

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, chats: Sequence[RenderedChat]) -> list[EncodedChat]:
        """Return the tokens of each text; no token is put before or after it."""
        ordinary = [chat.text for chat in chats if not chat.plain]
        encodings = iter(self._tokenizer.encode_batch(ordinary, add_special_tokens=False))
        encoded = []
        for chat in chats:
            if chat.plain:
                encoded.append(self._encode_fenced(chat))
            else:
                encoding = next(encodings)
                encoded.append(EncodedChat(_ids(encoding), _offsets(encoding)))
        return encoded

    def _encode_fenced(self, chat: RenderedChat) -> EncodedChat:
        """Return the tokens of a text with words of messages that look like special tokens."""
        words = [match for match in self.special_pattern.finditer(chat.text) if not is_inside(match, chat.plain)]
        parts: list[str] = []
        fences: list[int] = []
        """characters of the text before each fence"""
        start = 0
        for word in words:
            parts += [chat.text[start : word.start()], _fenced(word.group())]
            fences += word.span()
            start = word.end()
        parts.append(chat.text[start:])
        encoding = self._fenced_tokenizer.encode("".join(parts), add_special_tokens=False)
        # Fence k, counted from 0, is character fences[k] + k of the encoded text.
        places = np.array(fences, dtype=np.int64) + np.arange(len(fences))
        offsets = _offsets(encoding)
        return EncodedChat(_ids(encoding), offsets - np.searchsorted(places, offsets))


def _fenced(token: str) -> str:
    return f"{FENCE}{token}{FENCE}"


def is_inside(match: re.Match[str], spans: Sequence[TextSpan]) -> bool:
    """Return whether a match has a character in one of `spans`."""
    return any(span.start < match.end() and match.start() < span.end for span in spans)


def _ids(encoding: tokenizers.Encoding) -> Ids:
    return np.array(encoding.ids, dtype=np.uint32)


def _offsets(encoding: tokenizers.Encoding) -> Offsets:
    return np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)


@lru_cache(maxsize=2)
def load_chat_encoder(tokenizer: str) -> ChatEncoder:
    """Return the encoder of a tokenizer.json. Raises DataError if data.tokenizer is not such a file."""
    path = Path(tokenizer)
    if path.suffix != ".json" or not path.is_file():
        raise DataError(
            f"data.tokenizer: conversations need a Hugging Face tokenizer.json, which has special tokens and offsets; "
            f"{tokenizer!r} is none"
        )
    return ChatEncoder(path)
