"""Chats with a published model of random weights: each answer has its own random numbers and fits into the context."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.hub.published import save_published
from tests.tools.prepare.chat.families import GEMMA, QWEN25, write_tokenizer
from torchllm.config.errors import UserError
from torchllm.tools.front.resolve import load_model
from torchllm.tools.generate.chat import answer_all, answer_lines
from torchllm.tools.generate.language_model import LanguageModel, language_model

CONTEXT = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("published")
    save_published("llama", folder, vocab_size=512, max_position_embeddings=CONTEXT)
    write_tokenizer(folder, QWEN25)
    return language_model(load_model([str(folder), "--generate.chat=true", "--generate.tokens=8", "--run.seed=3"]))


def changed(model: LanguageModel, **settings: object) -> LanguageModel:
    """Return the model with other settings of [generate]."""
    config = replace(model.config, generate=replace(model.config.generate, **settings))  # type: ignore[arg-type]
    return LanguageModel(config, model.model, model.tokenizer, model.manifest)


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_each_question_has_its_own_random_numbers_and_the_answer_that_it_has_alone(model: LanguageModel) -> None:
    questions = ["who?", "who?", "a longer question", "who?"]
    answers = answer_all(model, questions)
    assert len(set(answers)) == 4
    assert answers == [model.chat(asked(question), seed=3 + i) for i, question in enumerate(questions)]
    each_alone = changed(model, history=False)
    assert list(answer_lines(each_alone, [f"{question}\n" for question in questions])) == answers


def test_lines_are_one_conversation_without_empty_ones(model: LanguageModel) -> None:
    first, second = answer_lines(model, ["a\n", "\n", "b\n"])
    assert first == model.chat(asked("a"), seed=3)
    assert second == model.chat([*asked("a"), {"role": "assistant", "content": first}, *asked("b")], seed=4)


def test_a_system_message_begins_each_conversation(model: LanguageModel) -> None:
    stern = changed(model, system="be stern", tokens=4)
    messages = [{"role": "system", "content": "be stern"}, *asked("a")]
    assert answer_all(stern, ["a"]) == [stern.chat(messages, seed=3)]
    assert list(answer_lines(stern, ["a\n"])) == [stern.chat(messages, seed=3)]
    assert answer_all(stern, ["a"]) != answer_all(changed(model, tokens=4), ["a"])


def test_the_oldest_messages_are_forgotten_and_a_line_that_is_too_long_is_not_answered(
    model: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "torchllm")
    lines = ["one two three four", "five", "x" * 200, "six"]
    answers = list(answer_lines(model, lines))
    assert len(answers) == 3
    assert "not answered: the line is longer than the model's context of 64 tokens" in caplog.text
    assert caplog.text.count("2 messages are forgotten: the model's context has 64 tokens") >= 1
    *_, last = answer_lines(model, [*lines, *["again"] * 4])
    assert last != ""  # also after many
    with pytest.raises(UserError, match=r"prompt 1 has \d+ tokens: up to 64 fit into the model's context"):
        answer_all(model, ["a", "x" * 200])


def test_a_conversation_that_the_template_refuses_is_a_line(model: LanguageModel, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, GEMMA)
    config = replace(model.config, data=replace(model.config.data, tokenizer=str(tokenizer)))
    gemma = LanguageModel(config, model.model, model.tokenizer, model.manifest)
    with pytest.raises(UserError, match=r"the chat template refuses it .System role not supported"):
        answer_all(changed(gemma, system="be stern"), ["a"])
