"""The English of what users read: words that sounded foreign in earlier texts do not come back."""

import functools
import re

import pytest

from tests.tiny_run import ROOT
from tests.user_texts import Text, user_texts

pytestmark = pytest.mark.quick

INSTEAD = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bseldom(er)?\b": "rarely, less often",
    r"\boftener\b": "more often",
    r"\bfor want of\b": "without, because of too little",
    r"\b(is|are) left out\b": "is missing, is omitted",
    r"\bof its own accord\b": "by itself",
    r"\bthe (paper|lecture)\b": "the name of the work, as in docs/references.md",
    r"\bDESIGN\b": "nothing: no such file is in this repository",
    r"\b(bytes|FLOPs?|messages|numbers|samples|seconds|steps|tokens) an? [a-z]+": "per",
    r"(?i)\b(neighbour|licence|colour|behaviour|centred|honour|favour|judgement)\w*": "the American spelling",
    r"(?i)\b(label|model|travel)l(ed|ing)\b": "the American spelling",
    r"(?i)\b\w*(normal|initial|optim|util|recogn|organ|parallel|synchron|serial|summar|vector)is(e|ing|ation)": "-ize",
}
"""pattern -> what plain English has for it"""


@functools.cache
def texts() -> list[Text]:
    return list(user_texts(ROOT))


def foreign_words(text: str) -> list[str]:
    """Return what a text says that plain English says otherwise, each with a proposal."""
    found = []
    for pattern, proposal in INSTEAD.items():
        for match in re.finditer(pattern, text):
            found.append(f"{match.group(0)!r}: say {proposal!r}")
    return found


def test_the_list_of_texts_has_errors_help_and_shell_messages() -> None:
    shell = [text for place, text in texts() if place.startswith("run_train.sh")]
    help_texts = [text for place, text in texts() if place.startswith("torchllm/config/schema.py")]
    assert any(text.startswith("RECIPE=$recipe: ") for text in shell)
    assert any("did you mean" in text for _, text in texts())
    assert any(text.startswith("peak learning rate") for text in help_texts)


def test_users_read_plain_english() -> None:
    wrong = [f"{place}: {word}" for place, text in texts() for word in foreign_words(text)]
    assert wrong == []


def test_pages_are_in_plain_english() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert len(pages) > 20
    wrong = [f"{page.name}: {word}" for page in pages for word in foreign_words(page.read_text(encoding="utf-8"))]
    assert wrong == []
