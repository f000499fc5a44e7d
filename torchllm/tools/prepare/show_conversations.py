"""Show examples of conversations as text, with their trained parts marked, before anything is written."""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from torchllm.data.tokenizer import Tokenizer
from torchllm.tools.prepare.chat.examples import Example
from torchllm.tools.prepare.chat.plan import chat_format
from torchllm.tools.prepare.conversation_writer import make_examples
from torchllm.tools.prepare.open_source import open_raw_source
from torchllm.tools.prepare.plan import CorpusPlan
from torchllm.tools.prepare.records import TextRecord

LINE_END = "↵"
"""stands for a line end of the text: a part that is trained may begin or end within a line"""


class Shown(NamedTuple):
    """An example as text, or the fault of a bad conversation."""

    text: str
    is_fault: bool


def show_examples(plan: CorpusPlan, tokenizer: Tokenizer) -> Iterator[Shown]:
    """Yield the examples of a source of conversations, in their order; of a bad conversation its fault."""
    assert plan.chat is not None
    chat = chat_format(tokenizer.name, plan.chat, reads_calls=plan.reads_calls)
    source = open_raw_source(plan.source, plan.files)
    for record in source.records(source.cut_shards(1)[0]):
        where = record.origin.describe()
        made = record if record.fault else make_examples(record, chat, plan.drops_absent_keys)
        if isinstance(made, TextRecord):
            yield Shown(f"{where}: {made.fault}{made.detail}", is_fault=True)
            continue
        for example in made.examples:
            described = _describe(example, plan.chat.sequence_length)
            yield Shown(f"{where}: {described}\n{show_mask(example, tokenizer)}", is_fault=False)


def _describe(example: Example, longest: int) -> str:
    tokens = len(example.ids)
    cut = f"; cut to {longest:,} (training.sequence_length)" if tokens > longest else ""
    return f"{tokens:,} tokens, {int(example.is_target.sum()):,} of them trained{cut}"


def show_mask(example: Example, tokenizer: Tokenizer) -> str:
    """Return the text of an example, in lines: those that begin with > are trained."""
    lines = []
    ids = example.ids.tolist()
    end = 0
    for is_target, group in groupby(example.is_target.tolist()):
        start, end = end, end + len(list(group))
        # A decoder may drop the first blank of a text: so each part is decoded with all before it.
        text = tokenizer.decode(ids[:end])[len(tokenizer.decode(ids[:start])) :]
        for line in text.replace("\n", f"{LINE_END}\n").removesuffix("\n").split("\n"):
            lines.append(f"{'>' if is_target else ' '} {line}")
    return "\n".join(lines)
