"""What the messages of a conversation may hold: text, and 0 or 1 as a weight."""

import json
from typing import Any

from tests.tools.prepare.chat.families import assistant, user
from torchllm.tools.prepare.conversation_records import ConversationForm
from torchllm.tools.prepare.records import Origin, TextRecord

HERE = Origin("talks.jsonl", byte=0)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def checked(answer: dict[str, Any], has_columns: bool = False, **beside: Any) -> TextRecord:
    messages = [user("a"), {"role": "assistant", "content": "b"} | answer]
    return ConversationForm("messages").record({"messages": messages} | beside, HERE, is_row=has_columns)


def messages_of(record: TextRecord) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(record.text)["messages"]
    return messages


def test_parts_of_text_are_joined() -> None:
    for parts, joined in [([text("red"), text(" green")], "red green"), ([], ""), ([text("red") | {"a": 1}], "red")]:
        record = checked({"content": parts})
        assert not record.fault, parts
        assert messages_of(record) == [user("a"), assistant(joined)], parts


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"content": [{"type": "image_url", "image_url": {}}]},
        "content is no text: messages.1.content.0 is of type 'image",
    ),
    ({"content": [{"type": "text", "text": 3}]}, "content is no text: messages.1.content.0 is of type 'text', not"),
    ({"content": 3}, "content is no text: messages.1.content is a number"),
    ({"content": True}, "content is no text: messages.1.content is true or false"),
    ({"content": {"text": "red"}}, "content is no text: messages.1.content is an object"),
    ({"content": None}, "content is no text: messages.1.content is missing or null"),
    ({"content": None, "tool_calls": []}, "content is no text: messages.1.content is missing or null"),
    ({"role": 3}, "no messages: 'messages' must be a list of objects, each with a role"),
    ({"weight": "0"}, "weight is not 0 or 1: messages.1.weight is '0'"),
    ({"weight": 0.5}, "weight is not 0 or 1: messages.1.weight is 0.5"),
    ({"weight": True}, "weight is not 0 or 1: messages.1.weight is True"),
    ({"weight": False}, "weight is not 0 or 1: messages.1.weight is False"),
    ({"weight": None}, "weight is not 0 or 1: messages.1.weight is None"),
    ({"train": False}, "a mask that is not read: messages.1.train: remove it"),
]


def test_what_is_no_text_and_no_weight_is_a_fault() -> None:
    for answer, words in BAD:
        record = checked(answer)
        assert f"{record.fault}{record.detail}".startswith(words), answer


def test_a_weight_is_0_or_1() -> None:
    for weight in [0, 1, 0.0, 1.0]:
        assert not checked({"weight": weight}).fault, weight


def test_a_call_needs_no_content() -> None:
    for key in ("tool_calls", "function_call"):
        assert not checked({"content": None, key: [{"function": {"name": "f", "arguments": {}}}]}).fault


def test_what_is_beside_the_messages() -> None:
    """Descriptions of tools are objects, and a weight of the whole conversation is not read."""
    assert not checked({}, tools=[{"name": "f"}]).fault
    assert not checked({}, tools=[], weight=None, source="web").fault
    assert checked({}, tools="[]").fault == "tools are no list of objects"
    assert checked({}, tools=["f"]).fault == "tools are no list of objects"
    assert checked({}, weight=0.5).fault == "a mask that is not read"
    assert checked({}, train=False).fault == "a mask that is not read"


def test_a_row_of_a_table_has_null_where_others_have_a_weight() -> None:
    record = checked({"weight": None}, has_columns=True)
    assert not record.fault
    assert messages_of(record)[1]["weight"] is None


def test_the_text_of_a_conversation_is_what_it_was() -> None:
    """A hash of it decides what is held out, and the order of keys what the model sees of a tool."""
    messages = [user("é"), {"content": "b", "role": "assistant", "name": None, "weight": 1}]
    record = ConversationForm("messages").record({"messages": messages, "tools": []}, HERE, is_row=False)
    assert record.text == json.dumps({"messages": messages, "tools": None}, ensure_ascii=False)


def test_deep_nesting_is_a_fault() -> None:
    deep: Any = {}
    for _ in range(100000):
        deep = {"a": deep}
    assert checked({"extra": deep}).fault == "nested too deeply"
