"""Secrets in a config that experiment trackers would receive."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torchllm.config.schema import Config
from torchllm.tools.config.read import ConfigError, config_error

_SECRET_KEY = re.compile(r"(\.|_)(password|passphrase|secret|credentials?|token|(api|access|auth|private)_?key)$")
"""matches the names of keys that hold secrets, by their ends"""
_SECRET_TEXT = re.compile(
    r"://[^/\s:@]+:[^/\s@]+@|\b(hf_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30,})\b"
)
"""a password in a URL; keys of Hugging Face, AWS, GitHub"""


def secret_problems(config: Config, receiver: str) -> Iterator[ConfigError]:
    """Find secrets in a config that `receiver`, an experiment tracker, would upload."""
    advice = "keep it in an environment variable or in a separate file"
    for key, text in texts_of(asdict(config)):
        if text and _SECRET_KEY.search(key):
            yield config_error(key, f"has the name of a secret, and {receiver} uploads the config: {advice}")
        elif _SECRET_TEXT.search(text):
            yield config_error(key, f"has a password or an access key, and {receiver} uploads the config: {advice}")


def texts_of(table: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of each string in a table, nested tables and lists included."""
    if isinstance(table, str):
        yield key, table
    elif isinstance(table, dict):
        for name, value in table.items():
            yield from texts_of(value, f"{key}.{name}" if key else name)
    elif isinstance(table, (list, tuple)):
        for index, value in enumerate(table):
            yield from texts_of(value, f"{key}.{index}")
