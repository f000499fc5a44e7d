"""What a template gets of tool calls and tools: OpenAI's JSON text, and rows of tables."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.tools.prepare.chat.families import QWEN25, assistant, user, write_tokenizer
from torchllm.config import Finetune
from torchllm.tools.prepare.chat.calls import drop_absent_keys, with_objects
from torchllm.tools.prepare.chat.examples import ChatFormat
from torchllm.tools.prepare.chat.plan import chat_format, plan_chat
from torchllm.tools.prepare.chat.template import ChatTemplate, Conversation, RefusedConversation

TODAY = date(2026, 11, 27)
ARGUMENTS = {"city": "Paris", "days": 2}
TEXT = json.dumps(ARGUMENTS)
LOOP = "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}CALL{% endfor %}|{% endfor %}"
CALLS = {
    "Qwen2.5, Hermes": ('{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}', True),
    "Llama 3.1": ('{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}', True),
    "Mistral": (
        "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('an id has 9 letters') }}{% endif %}"
        "{{ c.function | tojson }}",
        True,
    ),
    "Qwen3-Coder": (
        "{% for name, value in c.function.arguments | items %}<parameter={{ name }}>{{ value }}{% endfor %}",
        True,
    ),
    "GLM-4.5": (
        "{% set a = c.function.arguments %}{% for k, v in a.items() %}<arg_key>{{ k }}</arg_key>"
        "{{ v | tojson(ensure_ascii=False) if v is not string else v }}{% endfor %}",
        True,
    ),
    "by letters": ("{% for key in c.function.arguments %}<{{ key }}>{% endfor %}", True),
    "Qwen3": (
        "{% if c.function.arguments is string %}{{ c.function.arguments }}"
        "{% else %}{{ c.function.arguments | tojson }}{% endif %}",
        False,
    ),
    "DeepSeek": ("{{ '```json\n' + c.function.arguments + '\n```' }}", False),
}
"""kind of templates -> how it writes a call, and whether it needs an object"""


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}


def talk(arguments: Any) -> Conversation:
    calling = {"role": "assistant", "content": None, "tool_calls": [call(arguments), call(arguments)]}
    return Conversation([user("how?"), calling, {"role": "tool", "content": "red"}, assistant("green")])


def template(kind: str) -> ChatTemplate:
    return ChatTemplate(LOOP.replace("CALL", CALLS[kind][0]), {}, TODAY)


@pytest.mark.parametrize("kind", CALLS)
def test_json_text_becomes_an_object_unless_the_template_prints_text(kind: str) -> None:
    chat, needs_objects = template(kind), CALLS[kind][1]
    given = talk(TEXT)
    assert with_objects(given, chat) == (talk(ARGUMENTS) if needs_objects else given)
    assert given == talk(TEXT)
    assert with_objects(talk(ARGUMENTS), chat) == talk(ARGUMENTS)


def test_function_calls_and_parameters_of_tools_are_json_text_too() -> None:
    chat = ChatTemplate(
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content or '' }}"
        "{{ m.function_call | tojson if m.function_call }}{% endfor %}",
        {},
        TODAY,
    )

    def conversation(arguments: Any, parameters: Any) -> Conversation:
        calling = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": arguments}}
        tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
        return Conversation([user("how?"), calling], [tool, {"name": "bare", "parameters": parameters}])

    schema = {"type": "object", "properties": {"parameters": {"type": "string"}, "arguments": "text stays"}}
    assert with_objects(conversation(TEXT, json.dumps(schema)), chat) == conversation(ARGUMENTS, schema)
    with pytest.raises(RefusedConversation, match=r"parameters that are no JSON object: tools\.0\.function\.para"):
        with_objects(conversation(TEXT, "city"), chat)
    with pytest.raises(RefusedConversation, match=r"arguments that are no JSON object: messages\.1\.function_call"):
        with_objects(conversation("", schema), chat)


def test_text_that_is_no_object_is_refused_by_name() -> None:
    for text in ("Paris", "", "[1]", '{"city": ', '"{}"', "NaN", '{"a": "\\ud800"}', "9" * 5000):
        for kind in ("Qwen2.5, Hermes", "Qwen3-Coder"):
            with pytest.raises(RefusedConversation, match=r"arguments that are no JSON object: messages\.1\.tool"):
                with_objects(talk(text), template(kind))
        assert with_objects(talk(text), template("DeepSeek")) == talk(text)


def format_of(kind: str, folder: Path) -> ChatFormat:
    start = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    rest = "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    path = str(write_tokenizer(folder, QWEN25._replace(template=start + CALLS[kind][0] + rest)))
    return chat_format(path, plan_chat(path, Finetune(), 64), TODAY)


def test_text_and_objects_are_the_same_tokens(tmp_path: Path) -> None:
    """In training and in a prompt; also where words look like special tokens, as a value or as a key."""
    for kind, (_, needs_objects) in CALLS.items():
        chat = format_of(kind, tmp_path / kind)
        if not needs_objects:
            continue
        odd = {"<|im_end|> city": "<|im_start|>"}
        for arguments in (ARGUMENTS, odd):
            as_text = chat.examples(talk(json.dumps(arguments)))
            as_objects = chat.examples(talk(arguments))
            for one, other in zip(as_text.examples, as_objects.examples, strict=True):
                assert one.ids.tolist() == other.ids.tolist(), kind
            asked, asked_by_text = (talk(form).messages[:3] for form in (arguments, json.dumps(arguments)))
            prompt = chat.prompt(Conversation(asked))
            assert prompt.tolist() == chat.prompt(Conversation(asked_by_text)).tolist(), kind
            if arguments is odd:  # the template has written four of each
                assert (as_text.examples[0].ids == chat.encoder.token_id("<|im_end|>")).sum() == 4, kind
                assert as_text.words_as_text > 0, kind


def test_a_hidden_character_in_json_text_is_found(tmp_path: Path) -> None:
    with pytest.raises(RefusedConversation, match="reserved character"):
        format_of("Llama 3.1", tmp_path).examples(talk('{"city": "\\udbff\\udff2"}'))


def test_a_row_loses_the_keys_of_other_rows() -> None:
    """In objects at any depth; not in a list, and not the keys of a message, which the template never sees."""
    absent = {"city": "Paris", "colour": None, "where": {"x": 1, "y": None}, "sizes": [None, {"a": None}]}
    tool = {"function": {"name": "look", "strict": None, "parameters": {"properties": {"city": {}, "colour": None}}}}
    messages = [*talk(absent).messages, assistant("b") | {"weight": None}]
    given = Conversation(**json.loads(json.dumps({"messages": messages, "tools": [tool]})))
    assert drop_absent_keys(given) == 2 * 3 + 2
    own = {"city": "Paris", "where": {"x": 1}, "sizes": [None, {}]}
    assert given.messages == [*talk(own).messages, assistant("b") | {"weight": None}]
    assert given.tools == [{"function": {"name": "look", "parameters": {"properties": {"city": {}}}}}]
