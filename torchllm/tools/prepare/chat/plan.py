"""The settings, besides its text, that decide the tokens of a conversation."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from torchllm.config import Config, Finetune
from torchllm.config.paths import same_path
from torchllm.tools.prepare.chat.encoder import load_chat_encoder
from torchllm.tools.prepare.chat.examples import ChatFormat
from torchllm.tools.prepare.chat.template import ChatTemplate, read_template
from torchllm.tools.prepare.chat.tokenizer_config import read_tokenizer_config, special_tokens_of


@dataclass(frozen=True)
class ChatPlan:
    """A part of the plan of a corpus of conversations."""

    sequence_length: int
    """training.sequence_length, in tokens"""
    template: str
    """source of the chat template"""
    special_tokens: dict[str, str]
    """that the template knows by name, such as {"eos_token": "</s>"}"""


def plan_chat(tokenizer: str, finetune: Finetune, sequence_length: int) -> ChatPlan:
    """Return the plan for conversations with data.tokenizer.

    Raises DataError if the tokenizer or the template cannot be used.
    """
    load_chat_encoder(tokenizer)
    path = Path(tokenizer)
    special_tokens = special_tokens_of(read_tokenizer_config(path))
    template = read_template(path, finetune.chat_template)
    _ = ChatTemplate(template, special_tokens, date.today()).reads_parts  # an error now if it writes no answers
    return ChatPlan(sequence_length, template, special_tokens)


def chat_format(tokenizer: str, plan: ChatPlan, day: date | None = None, reads_calls: bool = True) -> ChatFormat:
    """Return how conversations become tokens; day: the template's date, or today; reads_calls: as in `ChatFormat`."""
    template = ChatTemplate(plan.template, plan.special_tokens, day or date.today())
    return ChatFormat(load_chat_encoder(tokenizer), template, reads_calls)


def chat_plan_of_run(config: Config, state: Mapping[str, Any], record: Mapping[str, Any]) -> ChatPlan | None:
    """Return how the conversations of a run were written; None if it had none.

    state, record: of the data and of the run, in a checkpoint. Where the config names another template than the run
    did, it is read. Raises DataError if that fails.
    """
    saved = state.get("chat")
    template_file = record.get("config", {}).get("finetune", {}).get("chat_template", "")
    if saved is not None and same_path(template_file, config.finetune.chat_template):
        return ChatPlan(**saved)
    if saved is not None or config.generate.chat or any(source.messages_key for source in config.data.sources):
        return plan_chat(config.data.tokenizer, config.finetune, config.training.sequence_length)
    return None
