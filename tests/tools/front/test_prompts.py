"""The prompts of a file: its lines, as an editor shows them."""

from pathlib import Path

import pytest

from torchllm.config import Generate
from torchllm.config.errors import UserError
from torchllm.tools.front.prompts import read_prompts

pytestmark = pytest.mark.quick


def test_a_line_is_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffdéf\r\n\r\n  two words\n \t\npage\fbreak\u2028line\x85\n".encode())
    settings = Generate(prompt="first", prompts_file=str(file))
    assert read_prompts(settings) == ["déf", "  two words", "page\fbreak\u2028line\x85"]
    assert read_prompts(Generate(prompt="first")) == ["first"]
    assert read_prompts(Generate()) == []


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    with pytest.raises(UserError, match=r"generate\.prompts_file: .*prompts.txt cannot be read: "):
        read_prompts(Generate(prompts_file=str(tmp_path / "prompts.txt")))
