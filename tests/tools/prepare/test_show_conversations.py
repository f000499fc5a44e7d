"""Examples of conversations as text, with what is trained of them."""

import json
from itertools import islice
from pathlib import Path

from tests.tools.prepare.chat.families import FAMILIES, assistant, user
from tests.tools.prepare.test_conversation_writer import planned, settings, write_lines
from torchllm.data.tokenizer import load_tokenizer
from torchllm.tools.prepare.show_conversations import show_examples


def test_each_line_shows_whether_it_is_trained(tmp_path: Path) -> None:
    """Also of a tokenizer that drops the first blank of what it decodes; faults are in their place."""
    for name, shown in (
        (
            "qwen3",
            "  <|im_start|>user↵\n  hello world↵\n  ↵\n  more<|im_end|>↵\n  <|im_start|>assistant↵\n"
            "> <think>↵\n> ↵\n> </think>↵\n> ↵\n> a dog↵\n> é<|im_end|>\n  ↵",
        ),
        ("mistral", "  <s>[INST] hello world↵\n  ↵\n  more[/INST]\n>  a dog↵\n> é</s>"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        data = settings(folder, FAMILIES[name])
        content = json.loads(Path(data.tokenizer).read_text())
        if name == "mistral":
            content["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
            Path(data.tokenizer).write_text(json.dumps(content))
        talk = [user("hello world\n\nmore"), assistant("a dog\né")]
        source = write_lines(folder / "talks.jsonl", [talk, [user("why?")], talk])
        with open(source.path, "a") as file:
            file.write(json.dumps({"messages": "why?"}) + "\n")
        plan = planned(source, data, length=16)
        examples = list(show_examples(plan, load_tokenizer(data.tokenizer)))
        assert [example.is_fault for example in examples] == [False, True, False, True]
        lines = [example.text for example in examples]
        first, _, text = lines[0].partition("\n")
        assert text == shown, name
        assert first.startswith(f"{source.path}:1: ")
        assert first.endswith("; cut to 16 (training.sequence_length)")
        assert lines[1] == f"{source.path}:2: no message of the assistant"
        assert lines[2].startswith(f"{source.path}:3: ")
        assert lines[3].startswith(f"{source.path}:4: no messages: ")
        assert list(islice(show_examples(plan, load_tokenizer(data.tokenizer)), 1)) == examples[:1]
