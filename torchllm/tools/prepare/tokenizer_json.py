"""Write a run's tokenizer as the files that transformers reads: tokenizer.json and tokenizer_config.json.

A Hugging Face tokenizer.json is copied; bytes become one without merges.

tokenizer_config.json is always written anew, so that transformers 4 and 5 read tokenizer.json as a run does. Of a file
that is there the special tokens, the chat template and the side of padding are kept. Other keys change ids in one of
the two, or in both: the class (transformers 4 does not know `TokenizersBackend`, and takes the one of the model where
none is named), `add_bos_token`, `added_tokens_decoder`, `fix_mistral_regex`, ...
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchllm.data.tokenizer import BEGIN, END, ByteTokenizer, Tokenizer
from torchllm.tools.prepare.chat.plan import ChatPlan
from torchllm.tools.prepare.chat.template import TEMPLATE_FILE, special_names
from torchllm.tools.prepare.chat.tokenizer_config import TOKENIZER_CONFIG, read_tokenizer_config, special_tokens_of
from torchllm.tools.prepare.hugging_face_tokenizer import HuggingFaceTokenizer

if TYPE_CHECKING:
    import tokenizers

KEPT = ("chat_template", "padding_side")
"""keys of a tokenizer_config.json that are kept, besides special tokens"""


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int, chat: ChatPlan | None = None) -> None:
    """Write the files of a tokenizer into a folder.

    max_length: tokens of the longest text for the model. chat: has the template to write; None: the tokenizer's.
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
        assert isinstance(tokenizer, ByteTokenizer)
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
    """Return the content of a tokenizer_config.json that makes transformers 4 and 5 both give the ids of an encoding.

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


def convert(tokenizer: ByteTokenizer) -> "tokenizers.Tokenizer":
    """Return the bytes as a tokenizer of the library tokenizers, which puts the begin token before each text."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as LibraryTokenizer

    converted = LibraryTokenizer(
        models.BPE(vocab={text: value for value, text in _printable_bytes().items()}, merges=[])
    )
    converted.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    converted.decoder = decoders.ByteLevel()
    converted.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in (BEGIN, END)])
    converted.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN}:1 $B:1", special_tokens=[(BEGIN, tokenizer.begin)]
    )
    return converted


def _printable_bytes() -> dict[int, str]:
    """Return the character that stands for each byte in a tokenizer.json, as in GPT-2's vocabulary."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = {value: chr(value) for value in shown}
    hidden = [value for value in range(256) if value not in characters]
    for number, value in enumerate(hidden):
        characters[value] = chr(256 + number)
    return characters
