"""The tokenizer_config.json of transformers, in the folder of a tokenizer.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchllm.config.errors import DataError
from torchllm.config.files import read_regular

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""keys of it that chat templates know as variables"""


def read_tokenizer_config(tokenizer: Path) -> dict[str, Any]:
    """Return the content of the tokenizer_config.json in a tokenizer.json's folder; {} if there is none.

    Raises DataError that names it if it is damaged.
    """
    path = tokenizer.with_name(TOKENIZER_CONFIG)
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_regular(path))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        special_tokens_of(content)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"data.tokenizer: {path} cannot be read ({error}): copy it again") from error
    return content


def special_tokens_of(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that the content of a tokenizer_config.json names, by their key.

    Raises ValueError if the text of the begin or end is missing.
    """
    tokens = {}
    for name in SPECIAL_NAMES:
        token = content.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
        elif name in ("bos_token", "eos_token") and content.get(name):  # of documents; the others are for templates
            raise ValueError(f"{name} is {content[name]!r}")
    return tokens
