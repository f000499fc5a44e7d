"""What a conversation becomes: the ids that transformers makes of it, and which of them are trained."""

import errno
import json
import os
from datetime import date, datetime, tzinfo
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import transformers

from tests.tools.prepare.chat.families import (
    FAMILIES,
    QWEN25,
    TALK,
    Family,
    Messages,
    assistant,
    system,
    user,
    write_tokenizer,
)
from torchllm.config import Finetune
from torchllm.config.errors import DataError
from torchllm.tools.prepare.chat.examples import ChatFormat, ConversationExamples
from torchllm.tools.prepare.chat.plan import chat_format, plan_chat
from torchllm.tools.prepare.chat.template import Conversation, RefusedConversation
from torchllm.tools.prepare.conversation_writer import DAY_FILE, preparation_day
from torchllm.tools.prepare.hugging_face_tokenizer import HuggingFaceTokenizer

THINKING = [
    user("how?"),
    assistant("<think>\nwhy\n</think>\n\nhello"),
    user("two"),
    assistant("<think>\n3\n</think>\n\nthree"),
]
BEGUN = date.today()
TODAY = date(2026, 11, 27)
TOOLS = [{"type": "function", "function": {"name": "fox", "parameters": {"type": "object", "properties": {}}}}]
PREFIXES = ["llama3", "qwen25", "gemma", "olmo2", "mistral", "generation", "bare"]
"""families whose whole conversation is one example"""
ENDS = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "olmo2": "<|endoftext|>", "mistral": "</s>"}
"""token that ends a turn; of the others <|im_end|>"""


def format_of(family: Family, folder: Path, today: date = TODAY) -> ChatFormat:
    path = str(write_tokenizer(folder, family))
    return chat_format(path, plan_chat(path, Finetune(), 64), today)


def reference(family: Family, folder: Path, messages: Messages, **options: Any) -> list[int]:
    begin, end = family.special[:2]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=begin, eos_token=end
    )
    tokenizer.chat_template = family.template
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert isinstance(ids, list)
    return ids


def trained(made: ConversationExamples, folder: Path) -> list[list[str]]:
    """The texts of the trained stretches of each example."""
    tokenizer = HuggingFaceTokenizer(folder / "tokenizer.json", threads=1)
    texts = []
    for ids, is_target in made.examples:
        stretches: list[list[int]] = []
        for index in range(1, len(ids)):
            if is_target[index] and not is_target[index - 1]:
                stretches.append([])
            if is_target[index]:
                stretches[-1].append(int(ids[index]))
        texts.append([tokenizer.decode(stretch) for stretch in stretches])
    return texts


class Today(datetime):
    """The clock of transformers: it would write another date than ours at midnight."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "Today":
        return cls(TODAY.year, TODAY.month, TODAY.day)


@pytest.fixture(autouse=True)
def _today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Today)


def test_a_conversation_has_the_ids_that_transformers_gives_it(tmp_path: Path) -> None:
    for name in PREFIXES:
        folder = tmp_path / name
        family = FAMILIES[name]
        chat = format_of(family, folder)
        talks = [TALK, [user("  blanks \n"), assistant(" and é≠世界 \n\n more  ")]]
        if name in ("llama3", "qwen25", "olmo2"):
            talks.append([system("the date"), *TALK])
        for messages in talks:
            (example,) = chat.examples(Conversation(messages)).examples
            assert example.ids.tolist() == reference(family, folder, messages), name
        prompt = chat.prompt(Conversation(TALK[:3])).tolist()
        assert prompt == reference(family, folder, TALK[:3], add_generation_prompt=True), name
        begin = chat.encoder.token_id(family.special[0])
        assert prompt[:2] != [begin, begin], name


def test_the_turns_of_the_assistant_are_trained_with_their_ends(tmp_path: Path) -> None:
    """The prompt before a turn and blanks behind its end are not."""
    for name in PREFIXES:
        folder = tmp_path / name
        chat = format_of(FAMILIES[name], folder)
        made = chat.examples(Conversation(TALK))
        end = ENDS.get(name, "<|im_end|>")
        blank = " " if name == "mistral" else ""
        assert trained(made, folder) == [[f"{blank}hello there{end}", f"{blank}they are lazy: 12{end}"]], name
        by_blocks = name in ("generation", "bare")
        assert made.rule == ("generation blocks" if by_blocks else "one example per conversation"), name
        assert chat.ends_of_turn == {end: chat.encoder.token_id(end)}, name


def test_a_template_that_renders_earlier_turns_otherwise_gives_an_example_per_turn(tmp_path: Path) -> None:
    chat = format_of(FAMILIES["qwen3"], tmp_path)
    made = chat.examples(Conversation(THINKING))
    assert made.rule == "one example per turn"
    assert trained(made, tmp_path) == [
        ["<think>\nwhy\n</think>\n\nhello<|im_end|>"],
        ["<think>\n3\n</think>\n\nthree<|im_end|>"],
    ]
    for example, end in zip(made.examples, (2, 4), strict=True):
        assert example.ids.tolist() == reference(FAMILIES["qwen3"], tmp_path, THINKING[:end])
    assert chat.examples(Conversation(THINKING[:2])).rule == "one example per conversation"


CALL = {"type": "function", "function": {"name": "sun", "arguments": {"days": 2}}}
CALLED = '<tool_call>\n{"name": "sun", "arguments": {"days": 2}}\n</tool_call>'
WITH_CALL = [user("how?"), assistant("") | {"tool_calls": [CALL]}, {"role": "tool", "content": "2"}, assistant("two")]


def test_a_turn_that_ends_with_a_tool_call_is_trained_with_its_end(tmp_path: Path) -> None:
    """`</tool_call>` is an added token at the end of the block, and ends no turn."""
    made = format_of(FAMILIES["calling"], tmp_path).examples(Conversation(WITH_CALL))
    assert trained(made, tmp_path) == [[f"{CALLED}<|im_end|>", "two<|im_end|>"]]
    assert made.rule == "generation blocks"
    assert made.without_end == 0


def test_words_that_look_like_the_end_of_a_turn_are_none(tmp_path: Path) -> None:
    for name in ("generation", "bare", "calling", "qwen25", "llama3"):
        folder = tmp_path / name
        chat = format_of(FAMILIES[name], folder)
        (end,) = chat.ends_of_turn
        for is_last, words in product((False, True), (f"close it with {end}", f"two {FAMILIES[name].special[0]}")):
            talk = [user("how?"), assistant("three"), user("how?"), assistant("two")]
            talk[3 if is_last else 1] = assistant(words)
            made = chat.examples(Conversation(talk))
            assert trained(made, folder)[0][is_last].strip() == f"{words}{end}", name
            (example,) = made.examples
            ends = example.is_target & (example.ids == chat.ends_of_turn[end])
            assert ends.sum() == 2, name


def test_what_ends_a_turn_is_read_from_the_template(tmp_path: Path) -> None:
    for name, ends in (("phi", ["<|end|>", "<|endoftext|>"]), ("parts", ["<|im_end|>"])):
        folder = tmp_path / name
        chat = format_of(FAMILIES[name], folder)
        assert chat.ends_of_turn == {end: chat.encoder.token_id(end) for end in ends}, name
        made = chat.examples(Conversation(TALK[:2]))
        assert trained(made, folder) == [["hello there" + "\n".join(ends)]], name


def test_a_token_that_is_added_and_not_special_may_end_a_turn(tmp_path: Path) -> None:
    calling = FAMILIES["calling"]
    family = calling._replace(special=("<|endoftext|>", "<|endoftext|>"), words=(*calling.words, *calling.special[1:]))
    chat = format_of(family, tmp_path)
    assert chat.ends_of_turn == {"<|im_end|>": chat.encoder.token_id("<|im_end|>")}
    assert trained(chat.examples(Conversation(WITH_CALL)), tmp_path) == [[f"{CALLED}<|im_end|>", "two<|im_end|>"]]


def test_a_turn_without_its_prompt_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    for name in ["r1", "mistral"]:
        folder = tmp_path / name
        chat = format_of(FAMILIES[name], folder)
        messages = THINKING if name == "r1" else [system("be brief"), *TALK]
        with pytest.raises(RefusedConversation, match=r"leaves out thinking\. .* finetune\.chat_template = FILE"):
            chat.examples(Conversation(messages))


def test_a_line_end_that_the_prompt_alone_has_is_named(tmp_path: Path) -> None:
    """Jinja drops the line end behind `{% endif %}`; the advice is tried."""
    lost = QWEN25._replace(
        template="{% for m in messages %}<|im_start|>{% if m.role == 'user' %}user{% else %}assistant{% endif %}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    talk = Conversation([user("a"), assistant("hello")])
    shown = (
        r"has '.*\|>assistant\\n' where the turn has '.*\|>assistanthello<\|im_end\|>\\n', and .* a tag %}: write it"
    )
    with pytest.raises(RefusedConversation, match=shown):
        format_of(lost, tmp_path / "lost").examples(talk)
    cured = lost._replace(template=lost.template.replace("{% endif %}\n", "{% endif %}{{ '\\n' }}"))
    made = format_of(cured, tmp_path / "cured").examples(talk)
    assert trained(made, tmp_path / "cured") == [["hello<|im_end|>"]]


def test_special_tokens_in_messages_are_plain_text_and_counted(tmp_path: Path) -> None:
    """The template's own keep their ids, the text stays the same, and the targets are where they were."""
    for name in ["llama3", "qwen25", "gemma", "mistral", "generation"]:
        folder = tmp_path / name
        family = FAMILIES[name]
        chat = format_of(family, folder)
        end = ENDS.get(name, "<|im_end|>")
        words = f"the {end}{family.special[0]} fox"
        made = chat.examples(Conversation([user(words), assistant(f"hello {end} world")]))
        assert made.words_as_text == 3, name
        (example,) = made.examples
        (harmless,) = chat.examples(Conversation([user("the fox"), assistant("hello world")])).examples
        special = {chat.encoder.token_id(token) for token in family.special}
        assert [token for token in example.ids if token in special] == [
            token for token in harmless.ids if token in special
        ], name
        (stretch,) = trained(made, folder)[0]
        assert stretch.strip() == f"hello {end} world{end}", name
        text = HuggingFaceTokenizer(folder / "tokenizer.json", threads=1).decode(example.ids.tolist())
        assert words in text, name


def test_tokens_of_the_template_that_are_not_special_are_counted_where_the_assistant_does_not_write_them(
    tmp_path: Path,
) -> None:
    """They stay tokens, as in transformers, until tokenizer.json calls them special: then no message may have one."""
    qwen3 = FAMILIES["qwen3"]
    messages = [user("how? </think>"), assistant("<think>\nwhy\n</think>\n\nhello")]
    chat = format_of(qwen3, tmp_path / "not special")
    made = chat.examples(Conversation(messages))
    assert made.control_words == ["</think>"]
    (example,) = made.examples
    assert example.ids.tolist() == reference(qwen3, tmp_path / "not special", messages)
    assert chat.examples(Conversation(THINKING)).control_words == []
    assert chat.examples(Conversation(messages, [{"a": ["<think>"]}])).control_words == ["</think>", "<think>"]
    words = format_of(qwen3._replace(words=(*qwen3.words, "fox")), tmp_path / "of no template")
    assert words.examples(Conversation([user("fox"), assistant("hello")])).control_words == []
    special = format_of(qwen3._replace(special=(*qwen3.special, *qwen3.words), words=()), tmp_path / "special")
    made = special.examples(Conversation(messages))
    assert made.control_words == []
    assert special.encoder.token_id("</think>") not in made.examples[0].ids


def test_tools_and_weights_of_the_openai_form(tmp_path: Path) -> None:
    """A message of weight 0 is not trained, a value of null is as if it were not there, the last question is left."""
    messages = [TALK[0], TALK[1] | {"weight": 0, "name": None}, *TALK[2:], user("never answered")]
    chat = format_of(QWEN25, tmp_path)
    made = chat.examples(Conversation(messages, TOOLS))
    assert trained(made, tmp_path) == [["they are lazy: 12<|im_end|>"]]
    assert made.examples[0].ids.tolist() == reference(QWEN25, tmp_path, messages[:4], tools=TOOLS)
    made = format_of(FAMILIES["generation"], tmp_path / "blocks").examples(Conversation(messages))
    assert trained(made, tmp_path / "blocks") == [["they are lazy: 12<|im_end|>"]]


def test_refused_conversations(tmp_path: Path) -> None:
    chat = format_of(FAMILIES["gemma"], tmp_path)
    for messages, words in (
        ([user("a")], "no message of the assistant"),
        ([system("a"), user("b"), assistant("c")], r"the chat template refuses it \(System role not supported\)"),
        ([user("\U0010fff2"), assistant("c")], "reserved character"),
    ):
        with pytest.raises(RefusedConversation, match=words):
            chat.examples(Conversation(messages))


def test_the_sandbox_holds(tmp_path: Path) -> None:
    family = QWEN25._replace(template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RefusedConversation, match="unsafe"):
        format_of(family, tmp_path).examples(Conversation(TALK))


def test_the_date_is_that_of_the_preparation(tmp_path: Path) -> None:
    """It is noted when the preparation begins, and stays after an interruption."""
    (tmp_path / DAY_FILE).write_text("2024-07-26\n")
    assert preparation_day(tmp_path) == date(2024, 7, 26)
    new = tmp_path / "new"
    new.mkdir()
    assert preparation_day(new) in (BEGUN, date.today())
    assert preparation_day(new) == preparation_day(new)
    assert [path.name for path in new.iterdir()] == [DAY_FILE]
    chat = format_of(FAMILIES["llama3"], tmp_path, preparation_day(tmp_path))
    (example,) = chat.examples(Conversation([system("a"), *TALK])).examples
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json", threads=1)
    assert "Today Date: 26 Jul 2024" in tokenizer.decode(example.ids.tolist())


def test_the_day_is_noted_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (errno.EPERM, errno.EOPNOTSUPP):
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(code, "no hard links")))
        (tmp_path / DAY_FILE).unlink(missing_ok=True)
        assert preparation_day(tmp_path) in (BEGUN, date.today())
        assert [path.name for path in tmp_path.iterdir()] == [DAY_FILE]


def test_where_the_template_is_found(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, QWEN25)
    assert plan_chat(str(path), Finetune(), 8).template == QWEN25.template
    named = tmp_path / "other.jinja"
    named.write_text("{{ messages[-1].content }}")
    assert plan_chat(str(path), Finetune(chat_template=str(named)), 8).template == "{{ messages[-1].content }}"
    named.write_text("{% if %}")
    with pytest.raises(DataError, match="error in line 1"):
        plan_chat(str(path), Finetune(chat_template=str(named)), 8)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        plan_chat("bytes", Finetune(), 8)


WITH_TOOLS = """
{% set word = "fox" %}
{%- macro shown(tool) %}{{ word }} {{ tool.function.name }}
{% endmacro %}
    {% for tool in tools %}{{ shown(tool) }}{% endfor %}
""" + QWEN25.template.replace("You are helpful.", "brown")


@pytest.mark.parametrize("place", ["list", "dict", "folder"])
def test_of_named_templates_the_one_is_taken_that_transformers_takes(place: str, tmp_path: Path) -> None:
    """By whether there are tools."""
    path = write_tokenizer(tmp_path, QWEN25)
    named = {"default": QWEN25.template, "tool_use": WITH_TOOLS, "rag": "x"}
    if place == "folder":
        path.with_name("chat_template.jinja").write_text(named["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(named["tool_use"])
    else:
        path.with_name("chat_template.jinja").unlink()
        config = tmp_path / "tokenizer_config.json"
        listed = [{"name": name, "template": template} for name, template in named.items()]
        templates = listed if place == "list" else named
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": templates}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = chat_format(str(path), plan_chat(str(path), Finetune(), 64), TODAY)
    texts = []
    for tools in (None, TOOLS):
        ids = theirs.apply_chat_template(TALK, tools=tools, tokenize=True, return_dict=False)
        prompt = theirs.apply_chat_template(
            TALK[:1], tools=tools, tokenize=True, return_dict=False, add_generation_prompt=True
        )
        (example,) = chat.examples(Conversation(TALK, tools)).examples
        assert example.ids.tolist() == ids
        assert chat.prompt(Conversation(TALK[:1], tools)).tolist() == prompt
        texts.append(theirs.decode(ids))
    assert "You are helpful." in texts[0]
    assert "fox fox" in texts[1]


def test_a_list_of_templates_without_a_default_is_an_error(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, QWEN25)
    path.with_name("chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    for named in ([{"name": "x"}], [{"name": "rag", "template": "x"}], ["x"], [{"name": "default", "template": 3}]):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": named}))
        with pytest.raises(DataError, match=r"none has the name \"default\": .* finetune\.chat_template = FILE"):
            plan_chat(str(path), Finetune(), 8)
