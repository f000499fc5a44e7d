"""What a chat template may do with a conversation, and what it may not."""

import re
import resource
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.tools.prepare.chat.families import assistant, user
from torchllm.config.errors import DataError
from torchllm.tools.prepare.chat.template import ChatTemplate, RefusedConversation, chosen_by_tools, read_template

TODAY = date(2026, 11, 25)
VALUES: dict[str, Any] = {"extra": {"a": 1}, "number": 2.5, "flag": True, "tool_calls": [{"number": 3}]}
TOOLS = [{"name": "f", "count": 2}]


def rendered(template: str) -> str:
    """Text of a conversation whose messages hold values of all kinds."""
    loop = f"{{% for message in messages %}}{{{{ message.content }}}}{template}{{% endfor %}}"
    return ChatTemplate(loop, {}, TODAY).render([user("a") | VALUES, assistant("b") | VALUES], TOOLS)


def test_what_a_template_would_print_as_python_does_is_refused() -> None:
    for template, shown in [
        ("{{ message.extra }}", '{"a": 1}'),
        ("{{ message.extra | trim }}", '{"a": 1}'),
        ("{{ 'x' ~ message.extra }}", '{"a": 1}'),
        ("{{ [message.extra] | join }}", '{"a": 1}'),
        ("{{ [message.extra] ~ 'x' }}", '{"a": 1}'),
        ("{{ message.extra | list }}", '["a"]'),
        ("{{ '%s' % message.number }}", "2.5"),
        ("{{ message.number }}", "2.5"),
        ("{{ message.flag }}", "true"),
        ("{{ none }}", "null"),
        ("{{ tools }}", '[{"name": "f", "count": 2}]'),
    ]:
        with pytest.raises(RefusedConversation, match=re.escape(f"it prints {shown} as Python writes it")):
            rendered(template)


def test_a_byte_order_mark_is_no_part_of_a_template(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_text("{{ messages }}\f", encoding="utf-8-sig")
    for named in ("", str(file)):
        assert read_template(tmp_path / "tokenizer.json", named) == "{{ messages }}\f"


def test_a_template_reads_objects_and_numbers() -> None:
    for template, text in [
        ("{{ message.extra | tojson }}", '{"a": 1}'),
        ("{{ 'é<書' | tojson }}", '"é<書"'),
        ("{{ message.number | int }}", "2"),
        ("{{ message.tool_calls[0].number }}", "3"),
        ("{{ tools[0].count }}", "2"),
        ("{% if message.number > 2 and message.extra.a == 1 and message.flag %}yes{% endif %}", "yes"),
        ("{% for key, value in message.extra.items() %}{{ key }}{% endfor %}", "a"),
        ("{{ message.extra is mapping and message.tool_calls is iterable and 'yes' }}", "yes"),
        ("{{ missing }}", ""),
    ]:
        assert rendered(template) == f"a{text}b{text}", template


def test_compiling_a_template_computes_nothing() -> None:
    """Not even what no conversation reaches: it would be computed here, without a limit."""
    before = most_memory()
    never = "{% if false %}{{ 'a' * 300000000 }}{{ 'a' | center(300000000) }}{% endif %}"
    ChatTemplate(never + "{{ messages[1].content }}", {}, TODAY).render([user("a"), assistant("b")], None)
    assert most_memory() - before < 2**27


def most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_template_that_reads_parts_gets_parts() -> None:
    parts = "{% for message in messages %}{% for part in message.content %}{{ part.text }};{% endfor %}{% endfor %}"
    template = ChatTemplate(parts, {}, TODAY)
    assert template.reads_parts
    assert template.render([user("hello"), assistant("world")], None) == "hello;world;"
    assert not ChatTemplate("{{ messages[-1].content }}", {}, TODAY).reads_parts


def test_a_template_that_leaves_out_the_answers_is_an_error() -> None:
    template = ChatTemplate("{% for message in messages %}{{ message.contents }}{% endfor %}", {}, TODAY)
    with pytest.raises(DataError, match=r"does not write the content .* finetune\.chat_template = FILE"):
        template.render([user("hello"), assistant("world")], None)


WORDS = "{{ messages[-1].content }}"


def test_a_template_for_tools_and_one_for_the_rest_give_the_texts_that_they_give_alone() -> None:
    for template in [
        f"\n {WORDS} \n  \n",
        f"{{%- set x = 1 -%}} {WORDS} {{%- if x %}}\n{{% endif %}}\n",
        f"{WORDS}\n\n",
    ]:
        alone = ChatTemplate(template, {}, TODAY)
        for tools, source in ((TOOLS, chosen_by_tools(template, WORDS)), (None, chosen_by_tools(WORDS, template))):
            assert ChatTemplate(source, {}, TODAY).render([user("a")], tools) == alone.render([user("a")], tools), (
                template
            )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
        ("{% if 1 %}" * 500 + "{% endif %}" * 500, "nested too deeply"),
        ("{% if %}", "error in line 1"),
        ("{% if true %}hello{% endif %}", "does not write the content of the assistant's messages"),
    ],
)
def test_a_wrong_template_is_an_error(template: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        _ = ChatTemplate(template, {}, date.today()).reads_parts
