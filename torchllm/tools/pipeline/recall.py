"""Say how much a fine-tuned model recalls of its conversations, and how well it expects answers that it never saw.

    python -m torchllm.tools.pipeline.recall PIPELINE_FOLDER OUTPUT_FOLDER

PIPELINE_FOLDER has corpus, pretrain and finetune of train_configs/pipeline/laptop.toml. OUTPUT_FOLDER gets figures.json
and conversation.txt.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from torchllm.data.packing import IGNORED
from torchllm.data.tokenizer import bits_per_byte
from torchllm.runtime.signs_of_life import show_progress, signs_of_life
from torchllm.runtime.terminal import LogHandler
from torchllm.tools.generate.language_model import LanguageModel, load
from torchllm.tools.pipeline.docstrings import HELD_OUT, TRAIN, Pair, conversation, read_pairs
from torchllm.tools.prepare.chat.examples import ChatFormat
from torchllm.tools.prepare.chat.template import Conversation

KNOWN = ("json.", "random.", "shutil.", "pathlib.", "statistics.", "os.")
"""beginnings of names; of each, the conversation has a question that was answered right"""
BATCH = 64


class Answer(NamedTuple):
    """A question with the right answer, and the model's."""

    pair: Pair
    said: str

    @property
    def is_right(self) -> bool:
        """Whether it is the docstring's sentence, letter by letter."""
        return self.said == self.pair.answer


class Figures(NamedTuple):
    """How good the model is."""

    recalled: int
    trained: int
    bits_before: float
    bits_after: float
    """per byte of the answers about held-out modules, with the weights before and after fine-tuning"""
    held_out: int


def ask(model: LanguageModel, pairs: Sequence[Pair]) -> list[Answer]:
    """Return the model's likeliest answer to each question."""
    questions = [[{"role": "user", "content": pair.question}] for pair in pairs]
    said = model.answers(questions, tokens=80, temperature=0.0, batch_size=BATCH)
    return [Answer(*answered) for answered in zip(pairs, said, strict=True)]


@torch.no_grad()
def bits_of_answers(model: LanguageModel, chat: ChatFormat, pairs: Sequence[Pair]) -> float:
    """Return the bits per byte of UTF-8 of the answers, each after its question in the form of `chat`.

    The token that ends an answer is not counted: pretraining never saw it.
    """
    nats, size = 0.0, 0
    for number, pair in enumerate(pairs):
        show_progress(f"{number:,} of {len(pairs):,} answers rated".format)
        (example,) = chat.examples(Conversation([*conversation(pair)["messages"]])).examples
        ids, is_target = (torch.from_numpy(array).unsqueeze(0) for array in (example.ids, example.is_target))
        labels = ids.long().masked_fill(~is_target, IGNORED)
        labels[0, is_target[0].nonzero()[-1]] = IGNORED
        positions = torch.arange(ids.shape[1] - 1).unsqueeze(0)
        nats += model.model(ids[:, :-1].long(), positions, None, labels[:, 1:]).item()
        size += int(model.tokenizer.byte_lengths[labels[labels != IGNORED].numpy()].sum())
    return bits_per_byte(nats, size)


def conversation_lines(trained: Sequence[Answer], held_out: Sequence[Answer]) -> list[str]:
    """Return a few questions that were answered right, and one that was answered wrong, with the right answer."""
    right = [answer for answer in trained if answer.is_right]
    shown = []
    for name in KNOWN:
        shown += [answer for answer in right if answer.pair.question.split()[2].startswith(name)][:1]
    wrong = [answer for answer in [*held_out, *trained] if not answer.is_right]
    lines = []
    for answer in [*(shown or right[:3]), *wrong[:1]]:
        lines += [f"> {answer.pair.question}", answer.said]
        if not answer.is_right:
            where = "a module that it never saw" if answer in held_out else "a pair that it was trained on"
            lines.append(f"  (wrong; it is about {where}. The docstring says: {answer.pair.answer})")
    return lines


def figure_lines(figures: Figures) -> list[str]:
    share = figures.recalled / figures.trained
    return [
        f"recalled exactly: {figures.recalled:,} of {figures.trained:,} trained first sentences, {share:.1%}",
        f"bits per byte of {figures.held_out:,} answers about held-out modules: {figures.bits_before:.2f} before "
        f"fine-tuning, {figures.bits_after:.2f} after",
    ]


def main() -> None:
    """Print and write the figures and the conversation."""
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    train, held_out = (read_pairs(folder / "corpus" / name) for name in (TRAIN, HELD_OUT))
    before, after = load(folder / "pretrain"), load(folder / "finetune")
    answers = ask(after, [*train, *held_out])
    trained, unseen = answers[: len(train)], answers[len(train) :]
    chat = after.chat_format
    figures = Figures(
        recalled=sum(answer.is_right for answer in trained),
        trained=len(train),
        bits_before=bits_of_answers(before, chat, held_out),
        bits_after=bits_of_answers(after, chat, held_out),
        held_out=len(held_out),
    )
    lines = conversation_lines(trained, unseen)
    output.mkdir(parents=True, exist_ok=True)
    (output / "figures.json").write_text(json.dumps(figures._asdict(), indent=2) + "\n", "utf-8")
    (output / "conversation.txt").write_text("\n".join(lines) + "\n", "utf-8")
    print("\n".join([*lines, "", *figure_lines(figures)]))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[LogHandler()])
    with signs_of_life("evaluate"):
        main()
