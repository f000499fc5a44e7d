"""Tool calls and tools as chat templates read them: objects, with only the keys of their own row.

OpenAI's API has the arguments of a call as JSON text. A template that writes them by `tojson` (Qwen2.5, Llama 3.1,
Mistral, Hermes) would quote this text once more, and one that walks through them (Qwen3-Coder, GLM-4.5) needs an
object. A template that prints the text as it is (DeepSeek) keeps it.

All rows of a table share one struct: a row has null for each key that only other rows have.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn

from torchllm.tools.prepare.chat.template import CALLS, ChatTemplate, Conversation, RefusedConversation

PROBE = '{"161803398": 141421356}'
"""text in place of arguments, to see whether a template prints it as it is; no template writes these words"""
_SHOWN = 60
"""characters of a text that an error shows"""


ChangeText = Callable[[str, str], Any]
"""gives a new value for a text, and for the place of it, such as messages.1.function_call.arguments"""


def with_objects(conversation: Conversation, template: ChatTemplate) -> Conversation:
    """Return a conversation with objects in place of the JSON text of arguments (of calls) and parameters (of tools).

    Text stays where the template prints it as it is. Raises RefusedConversation for other text that is not an object.
    """
    for change_text in (_change_arguments, _change_parameters):
        probed = change_text(conversation, lambda text, place: PROBE)
        if probed != conversation and not _is_printed(probed, template):
            conversation = change_text(conversation, _read_object)
    return conversation


def drop_absent_keys(conversation: Conversation) -> int:
    """Remove the keys that are null from the objects in messages and tools of a row; return how many they were."""
    count = _drop_nulls(conversation.tools)
    for message in conversation.messages:
        count += sum(map(_drop_nulls, message.values()))
    return count


def _drop_nulls(value: Any) -> int:
    """Remove the keys of a value of JSON that are null, at any depth; return how many they were."""
    if isinstance(value, list):
        return sum(map(_drop_nulls, value))
    if not isinstance(value, dict):
        return 0
    absent = [key for key, item in value.items() if item is None]
    for key in absent:
        del value[key]
    return len(absent) + sum(map(_drop_nulls, value.values()))


def _change_arguments(conversation: Conversation, change: ChangeText) -> Conversation:
    messages = []
    for index, message in enumerate(conversation.messages):
        calls = {}
        for key in CALLS:
            if key in message:
                calls[key] = _change_under("arguments", message[key], f"messages.{index}.{key}", change)
        messages.append(message | calls)
    return conversation._replace(messages=messages)


def _change_parameters(conversation: Conversation, change: ChangeText) -> Conversation:
    return conversation._replace(tools=_change_under("parameters", conversation.tools, "tools", change))


def _change_under(key: str, value: Any, place: str, change: ChangeText) -> Any:
    """Return a value of JSON with the texts under `key` changed. An object under `key` is left as it is."""
    if isinstance(value, list):
        return [_change_under(key, item, f"{place}.{index}", change) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    changed = {}
    for name, item in value.items():
        if name != key:
            changed[name] = _change_under(key, item, f"{place}.{name}", change)
        else:
            changed[name] = change(item, f"{place}.{name}") if isinstance(item, str) else item
    return changed


def _is_printed(probed: Conversation, template: ChatTemplate) -> bool:
    """Return whether a template prints the probe as it is."""
    try:
        return PROBE in template.render(probed.messages, probed.tools)
    except RefusedConversation:  # e.g. it walks through an object
        return False


def _read_object(text: str, place: str) -> dict[str, Any]:
    """Return the object that a text holds. Raises RefusedConversation if it holds none."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair has no bytes
    except ValueError:
        _refuse(text, place)
    if not isinstance(value, dict):
        _refuse(text, place)
    return value


def _refuse(text: str, place: str) -> NoReturn:
    shown = json.dumps(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...", ensure_ascii=False)
    key = place.rpartition(".")[2]
    raise RefusedConversation(
        f"{key} that are no JSON object", f": {place} is {shown}: make it an object, or JSON text of an object"
    )
