"""Check the messages of a conversation, and convert them to one form.

Keys that change the content of a message, or whether it is trained, are never ignored in silence: a content that is
neither text nor a list of texts, and a key that other programs read as a mask, is a fault of the conversation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torchllm.tools.prepare.chat.template import CALLS, Message, RefusedConversation

WEIGHT = "weight"
"""key of a message of the assistant: with 0 its turn is not trained"""
MASKS = ("train", "training", "trainable", "train_on_turn", "train_detail", "loss", "loss_weight", "mask", "masked")
"""keys of a message that other programs read as masks of training; none is read here"""
MASKS_OF_CONVERSATIONS = ("train", WEIGHT)
"""keys of a conversation with the same meaning"""
NESTED = "nested too deeply"
"""fault of a conversation that holds objects in objects in objects ..."""


def read_messages(value: object, key: str, has_columns: bool = False) -> list[Message]:
    """Return the messages under `key` of a record, with one text as content each. Raises RefusedConversation.

    has_columns: it is a row of a table: a message has null for each key that only others have.
    """
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    ):
        raise RefusedConversation("no messages", f": {key!r} must be a list of objects, each with a role")
    return [_read_message(message, f"{key}.{index}", has_columns) for index, message in enumerate(value)]


def read_tools(value: object, key: str) -> list[Any] | None:
    """Return the descriptions of tools under `key` of a record; None if there are none. Raises RefusedConversation."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RefusedConversation("tools are no list of objects", f": {key!r} is {_kind(value)}")
    return value


def refuse_masks(record: Mapping[str, Any], where: str, keys: Sequence[str] = MASKS) -> None:
    """Raise RefusedConversation if an object has one of `keys`, which seem to mask training and are not read."""
    for key in keys:
        if record.get(key) is not None:
            advice = 'remove it; a message of the assistant with "weight": 0 is not trained'
            raise RefusedConversation("a mask that is not read", f": {where}{key}: {advice}")


def _read_message(message: Message, where: str, has_columns: bool) -> Message:
    refuse_masks(message, f"{where}.")
    is_weight_absent = WEIGHT not in message or (has_columns and message[WEIGHT] is None)
    if not is_weight_absent and not _is_weight(message[WEIGHT]):
        raise RefusedConversation("weight is not 0 or 1", f": {where}.{WEIGHT} is {message[WEIGHT]!r}")
    content = message.get("content")
    if content is None and message["role"] == "assistant" and any(message.get(key) for key in CALLS):
        return message
    if isinstance(content, str):
        return message
    return message | {"content": _join_parts(content, f"{where}.content")}


def _is_weight(value: object) -> bool:
    return type(value) in (int, float) and value in (0, 1)  # true is a word of other programs' masks


def _join_parts(content: object, where: str) -> str:
    """Return the text of a content that is a list of parts of type text, as OpenAI's API takes it."""
    if not isinstance(content, list):
        raise RefusedConversation(
            "content is no text", f": {where} is {_kind(content)}, not text or a list of text parts"
        )
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = f"of type {part['type']!r}" if isinstance(part, dict) and "type" in part else _kind(part)
            raise RefusedConversation(
                "content is no text", f': {where}.{index} is {kind}, not {{"type": "text", "text": …}}'
            )
        texts.append(part["text"])
    return "".join(texts)


def _kind(value: object) -> str:
    """Return the kind of a JSON value, in words."""
    if value is None:
        return "missing or null"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")
