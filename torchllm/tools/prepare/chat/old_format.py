"""The format of chats as recipes of commit 8ca45ed ask for it; goes with version 0.3."""

from functools import lru_cache

from torchllm.config import Finetune
from torchllm.tools.prepare.chat.examples import ChatFormat
from torchllm.tools.prepare.chat.plan import chat_format_today, plan_chat


class OldChatFormat(ChatFormat):
    """A `ChatFormat` with one end of a turn."""

    def end_of_turn(self) -> int | None:
        """Return the first token that the template writes after an answer; None if it writes none."""
        return next(iter(self.ends_of_turn.values()), None)


@lru_cache(maxsize=1)
def old_chat_format(tokenizer: str, chat_template: str) -> OldChatFormat:
    """Return the format for chats with a template. Raises what `plan_chat` does."""
    today = chat_format_today(tokenizer, plan_chat(tokenizer, Finetune(chat_template=chat_template), 0))
    return OldChatFormat(today.encoder, today.template)
