"""A chat template that fills the memory, or does not end, is an error."""

import pytest

from torchllm.data.error import DataError
from torchllm.tools.prepare.chat.trial import try_template

HARMFUL = {
    "product": ("{{ ('a' * 1000000000) * 20 }}", "over 512 MiB"),
    "width": ("{{ '%1000000000d' % 1 }}", "over 512 MiB"),
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "over 1 s"),
    "brackets": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
    "signs": ("{{ " + "-" * 50000 + "1 }}", "nested too deeply"),
    "blocks": ("{% if 1 %}" * 500 + "{% endif %}" * 500, "nested too deeply"),
    "syntax": ("{% if %}", "error in line 1"),
    "no content": ("{% if true %}hello{% endif %}", "does not write the content of the assistant's messages"),
}


def test_a_harmful_template_is_an_error() -> None:
    for name in HARMFUL:
        template, words = HARMFUL[name]
        with pytest.raises(DataError, match=words):
            try_template(template, {}, seconds=1)


def test_a_template_that_refuses_some_conversations_is_none() -> None:
    """Whether it suits the data, the data will show."""
    try_template("{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}", {})
