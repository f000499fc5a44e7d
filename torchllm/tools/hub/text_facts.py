"""Properties of the model's texts, as known to a run and written by its export.

begin of a text        `bos_token_id` of config.json and generation_config.json
ends of a text         `eos_token_id` there: ends of a turn of the run's conversations, of a document, and of a text
                       of the published model that the run started from
chat template          chat_template.jinja, and `chat_template` of tokenizer_config.json
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torchllm.checkpoint.manifest import Manifest
from torchllm.config import Config
from torchllm.data.tokenizer import Tokenizer
from torchllm.tools.hub.exported import published_origin
from torchllm.tools.hub.files import CONFIG_JSON
from torchllm.tools.hub.hub import find_hub_model
from torchllm.tools.hub.safetensors_header import HubFileError
from torchllm.tools.prepare.chat.plan import ChatPlan, chat_format, chat_plan_of_run

log = logging.getLogger(__name__)

GENERATION_JSON = "generation_config.json"
END = "eos_token_id"
"""key of the id that ends a text, or of several"""


class TextFacts(NamedTuple):
    """Properties of the texts of a model."""

    begin: int | None
    """id before each text; None: there is none"""
    ends: tuple[int, ...]
    """ids that end a text; the first ends a turn, or a document if there are no turns"""
    chat: ChatPlan | None = None
    """how conversations are written; None: the run had none"""

    @property
    def end(self) -> int | list[int]:
        """The ends as transformers writes them."""
        return self.ends[0] if len(self.ends) == 1 else list(self.ends)


def text_facts(config: Config, manifest: Manifest, tokenizer: Tokenizer) -> TextFacts:
    """Return the properties of a run's texts. manifest: of a checkpoint.

    Raises DataError if the checkpoint does not say how its conversations were written, and the files that did are gone.
    """
    chat = chat_plan_of_run(config, manifest.data, manifest.record)
    turn_ends: Iterable[int] = ()
    if chat is not None:
        turn_ends = chat_format(config.data.tokenizer, chat).ends_of_turn.values()
    published = published_ends(published_origin(manifest.record).name, tokenizer)
    return TextFacts(tokenizer.begin, tuple(dict.fromkeys([*turn_ends, tokenizer.end, *published])), chat)


def published_ends(name: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end a text of a published model; the tokenizer's end must be one of them.

    name: folder or id on the hub; "" if there is none. Where it is not on this machine any more, or has another
    tokenizer, a warning says so.
    """
    if not name:
        return []
    try:
        folder = find_hub_model(name, weights=False, may_download=False).folder
    except HubFileError as error:
        log.warning("%s: the ids that end its texts are not carried over (%s)", name, error)
        return []
    ends = _read_ends(folder / GENERATION_JSON) or _read_ends(folder / CONFIG_JSON)
    if ends and tokenizer.end not in ends:
        log.warning(
            "%s: the ids that end its texts, %s, are not carried over: data.tokenizer ends them with %d",
            *(name, ends, tokenizer.end),
        )
        return []
    return [end for end in ends if 0 <= end < tokenizer.vocab]


def _read_ends(path: Path) -> list[int]:
    """Return the ids that a file of a published model names; [] if it names none or cannot be read."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    ends = content.get(END) if isinstance(content, dict) else None
    listed = ends if isinstance(ends, list) else [ends]
    return [end for end in listed if type(end) is int]
