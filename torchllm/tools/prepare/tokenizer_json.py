"""Write a run's tokenizer as the files that transformers reads: tokenizer.json and tokenizer_config.json.

A Hugging Face tokenizer.json is copied. Bytes and tiktoken rank files are converted, and only if the result gives the
same ids: pairs of tokens that tiktoken merges by their rank become a list of merges, and the pattern, which another
library of regular expressions reads, loses its possessive quantifiers.

tokenizer_config.json is always written anew, so that transformers 4 and 5 read tokenizer.json as a run does. Of a file
that is there the special tokens, the chat template and the side of padding are kept. Other keys change ids in one of
the two, or in both: the class (transformers 4 does not know `TokenizersBackend`, and takes the one of the model where
none is named), `add_bos_token`, `added_tokens_decoder`, `fix_mistral_regex`, ...
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchllm.data.tokenizer import ByteTokenizer, Tokenizer
from torchllm.tools.prepare.chat.plan import ChatPlan
from torchllm.tools.prepare.chat.template import TEMPLATE_FILE, special_names
from torchllm.tools.prepare.chat.tokenizer_config import TOKENIZER_CONFIG, read_tokenizer_config, special_tokens_of
from torchllm.tools.prepare.hugging_face_tokenizer import HuggingFaceTokenizer
from torchllm.tools.prepare.tiktoken_tokenizer import TiktokenTokenizer

if TYPE_CHECKING:
    import tokenizers

KEPT = ("chat_template", "padding_side")
"""keys of a tokenizer_config.json that are kept, besides special tokens"""
TRIED_TEXTS = 200
"""random texts to test a conversion with, besides the texts written here"""
TRIED_TOKENS = 50
"""tokens of each"""
TEXTS = (
    "",
    " ",
    "Hello, world! It's 3.14159 o'clock; they'll SAY'S I'D we'Ve don't",
    "  two  blanks\n\n\nthree lines \t tabs\r\n and \r returns \n \n",
    "def f(x):\n    return x**2 + 1234567890  # (comment)\n\n",
    "Größe, naïve, Ελληνικά, русский, 中文字符, 日本語, 한국어, العربية, हिन्दी, 🙂👩‍👩‍👧‍👦",
    "https://example.org/a_b-c?d=e&f=%20 <|not a token|> […] $1,000.00!!!...???",
    "\u00a0\u2003wide\u200bspaces \u017f'\u017f",
    "x" * 300 + " " * 300 + "\n" * 300,
)
"""texts of all kinds"""


class InexactTokenizer(Exception):
    """A tokenizer that has no tokenizer.json with the same ids. The message says why."""


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int, chat: ChatPlan | None = None) -> None:
    """Write the files of a tokenizer into a folder.

    max_length: tokens of the longest text for the model. chat: has the template to write; None: the tokenizer's.

    Raises InexactTokenizer, and writes nothing, if a conversion would give other ids than the tokenizer.
    """
    earlier: dict[str, Any] = {}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        source = Path(tokenizer.name)
        shutil.copyfile(source, folder / "tokenizer.json")
        if source.with_name(TEMPLATE_FILE).is_file():
            shutil.copyfile(source.with_name(TEMPLATE_FILE), folder / TEMPLATE_FILE)
        earlier = read_tokenizer_config(source)
        encoding = tokenizer.encoding
    else:
        assert isinstance(tokenizer, (ByteTokenizer, TiktokenTokenizer))
        encoding = convert(tokenizer)
        encoding.save(str(folder / "tokenizer.json"))
    content = _config_of(encoding, earlier)
    content.setdefault("bos_token", None if tokenizer.begin is None else encoding.id_to_token(tokenizer.begin))
    content |= {"eos_token": encoding.id_to_token(tokenizer.end), "model_max_length": max_length}
    if chat is not None:
        template = with_special_tokens(chat.template, chat.special_tokens, special_tokens_of(content))
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
        content["chat_template"] = template
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (folder / TOKENIZER_CONFIG).write_text(f"{text}\n", encoding="utf-8")


def _config_of(encoding: "tokenizers.Tokenizer", earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json with which transformers 4 and 5 both give the ids of an encoding.

    earlier: content of the file next to the tokenizer.json.
    """
    tokens = special_tokens_of(earlier)
    before = json.loads(encoding.to_str())["pre_tokenizer"] or {}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: token for name, token in tokens.items() if encoding.token_to_id(token) is not None},
        "model_input_names": ["input_ids", "attention_mask"],  # else transformers 4 hands token types to the model
        "add_prefix_space": before.get("add_prefix_space", False),  # transformers 4 changes tokenizer.json's to this
        "clean_up_tokenization_spaces": False,
        **{key: earlier[key] for key in KEPT if key in earlier},
    }


def with_special_tokens(template: str, known: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a chat template that gives the texts of a run where the special tokens have other names.

    known: the texts of special tokens as the run knew them, by their names in a template. now: as the tokenizer that is
    written knows them.
    """
    lines = []
    for name in sorted(special_names(template)):
        if known.get(name, "") != now.get(name, ""):
            lines.append(f"{{% set {name} = {json.dumps(known.get(name, ''))} %}}\n")  # Jinja drops the line end
    return "".join(lines) + template


def convert(tokenizer: ByteTokenizer | TiktokenTokenizer) -> "tokenizers.Tokenizer":
    """Return a tokenizer of the library tokenizers with the same ids, which puts the begin token, if there is one,
    before each text.

    Raises InexactTokenizer if a text is found that has other ids.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as LibraryTokenizer

    original = tokenizer.encoding
    special = {name: original.encode_single_token(name) for name in original.special_tokens_set}
    ranks = {token: original.encode_single_token(token) for token in original.token_byte_values()}  # ids are ranks
    ids = {printable(token): rank for token, rank in ranks.items()} | special
    merges = [(printable(left), printable(right)) for left, right in merges_of(ranks)]
    has_pattern = isinstance(tokenizer, TiktokenTokenizer)
    converted = LibraryTokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=has_pattern))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    converted.pre_tokenizer = byte_level
    if isinstance(tokenizer, TiktokenTokenizer):
        try:
            split = pre_tokenizers.Split(Regex(without_possessive(tokenizer.split)), "isolated")
        except Exception as error:  # the library raises bare Exception
            raise InexactTokenizer(f"its pattern is none of the library tokenizers ({error})") from error
        converted.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    converted.decoder = decoders.ByteLevel()
    converted.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    if tokenizer.begin is not None:
        begin = converted.id_to_token(tokenizer.begin)
        converted.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, tokenizer.begin)]
        )
    check_same_ids(tokenizer, converted, special)
    return converted


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pairs of tokens whose bytes together are a token, by the rank of that; of one token by the pair's."""
    merges = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def without_possessive(pattern: str) -> str:
    """Convert a pattern from tiktoken's regular expressions to the tokenizers library's.

    The latter takes `{1,3}+` for a repetition of a repetition, and `$` for the end of each line.
    """
    return re.sub(r"(\{\d+(?:,\d*)?\}|(?<!\\)[?*+])\+", r"\1", pattern).replace("$", r"\z")


def _printable_bytes() -> dict[int, str]:
    """Return the character that stands for each byte in a tokenizer.json, as in GPT-2's vocabulary."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = {value: chr(value) for value in shown}
    hidden = [value for value in range(256) if value not in characters]
    for number, value in enumerate(hidden):
        characters[value] = chr(256 + number)
    return characters


PRINTABLE_BYTES = _printable_bytes()


def printable(token: bytes) -> str:
    """Return the text that stands for a token's bytes in a tokenizer.json."""
    return "".join(PRINTABLE_BYTES[value] for value in token)


def check_same_ids(tokenizer: Tokenizer, converted: "tokenizers.Tokenizer", special: Mapping[str, int]) -> None:
    """Raise InexactTokenizer if the converted tokenizer gives a text other ids, or a special token another one."""
    for name, token in special.items():
        if converted.token_to_id(name) != token:
            raise InexactTokenizer(f"the special token {name} would be {converted.token_to_id(name)}, not {token}")
    random = np.random.default_rng(0)
    drawn = random.integers(0, tokenizer.vocab, (TRIED_TEXTS, TRIED_TOKENS))
    texts = [*TEXTS, *(tokenizer.decode(ids.tolist()) for ids in drawn)]
    converted.encode_special_tokens = True  # as the tokenizers of a run do: a document has none
    for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
        new_ids = converted.encode(text, add_special_tokens=False).ids
        if new_ids != ids.tolist():
            raise InexactTokenizer(
                f"the text {text[:80]!r} would have other ids: {new_ids[:8]}, not {ids[:8].tolist()}"
            )
    converted.encode_special_tokens = False
