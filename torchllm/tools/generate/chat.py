"""Chat with a model: many conversations of a question at a time, or one with a user."""

import logging
from collections.abc import Iterable, Iterator, Sequence

from torchllm.runtime.signs_of_life import signs_of_life
from torchllm.tools.generate.language_model import LanguageModel
from torchllm.tools.prepare.chat.template import Message

log = logging.getLogger("torchllm")


def answer_all(model: LanguageModel, questions: Sequence[str]) -> list[str]:
    """Return the answer to each question, in a conversation with nothing else but generate.system."""
    return model.answers([[*_system(model), _question(question)] for question in questions])


def answer_lines(model: LanguageModel, lines: Iterable[str]) -> Iterator[str]:
    """Yield the answer to each line of a user that is not empty; answer i is sampled with run.seed + i.

    With generate.history it follows the messages before. The oldest are forgotten where they leave no room for
    generate.tokens, or half of the model's context. A line that does not fit alone is not answered. Both are logged.
    """
    settings = model.config.generate
    needed = min(settings.tokens, model.config.longest_text // 2)
    history: list[Message] = []
    answered = 0
    for line in lines:
        if not line.strip():
            continue
        messages = [*(history if settings.history else []), _question(line)]
        forgotten = 0
        while len(messages) > 1 and model.room([*_system(model), *messages]) < needed:
            del messages[:2]
            forgotten += 2
        if forgotten:
            log.warning("%d messages are forgotten: the model's context has %s", forgotten, _context(model))
        if model.room([*_system(model), *messages]) < 1:
            log.warning("not answered: the line is longer than the model's context of %s", _context(model))
            continue
        with signs_of_life("generate"):
            answer = model.chat([*_system(model), *messages], seed=model.config.run.seed + answered)
        history = [*messages, {"role": "assistant", "content": answer}]
        answered += 1
        yield answer


def _system(model: LanguageModel) -> list[Message]:
    system = model.config.generate.system
    return [{"role": "system", "content": system}] if system else []


def _question(text: str) -> Message:
    return {"role": "user", "content": text.strip()}


def _context(model: LanguageModel) -> str:
    return f"{model.config.longest_text:,} tokens"
