"""Write Python's standard library as a corpus, and conversations made from its docstrings; say what a model recalls.

    python train_configs/pipeline/laptop/docstrings.py FOLDER
    python train_configs/pipeline/laptop/docstrings.py PIPELINE_FOLDER OUTPUT_FOLDER

FOLDER gets text.jsonl, train.jsonl and held_out.jsonl. One module in twenty is held out: its source is not in
text.jsonl, its conversations are in held_out.jsonl alone. Modules are read, not imported: the same library gives
the same bytes.

PIPELINE_FOLDER has corpus, pretrain and finetune of train_configs/pipeline/laptop.sh. OUTPUT_FOLDER gets figures.json
and conversation.txt: what the fine-tuned model recalls, and how well it expects answers that it never saw.
"""

import ast
import hashlib
import json
import logging
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchllm.config import Source
from torchllm.runtime.signs_of_life import show_progress, signs_of_life
from torchllm.runtime.terminal import LogHandler
from torchllm.tools.prepare.chosen_files import source_files

if TYPE_CHECKING:
    from torchllm.tools.generate.language_model import LanguageModel
    from torchllm.tools.prepare.chat.examples import ChatFormat

TEXT, TRAIN, HELD_OUT = "text.jsonl", "train.jsonl", "held_out.jsonl"
HELD_OUT_SHARE = 20
"""one module of this many is held out"""
NOT_ASKED = {"distutils", "idlelib", "lib2to3", "turtledemo"}
"""packages without an interface that users are told to import"""
SENTENCE = re.compile(r".{8,158}?[.!?](?=\s|$)")
KNOWN = ("json.", "random.", "shutil.", "pathlib.", "statistics.", "os.")
"""beginnings of names; of each, the conversation has a question that was answered right"""
BATCH = 64


class Module(NamedTuple):
    """A module of the library."""

    name: str
    text: str


class Pair(NamedTuple):
    """A question about a public name, and the first sentence of its docstring."""

    question: str
    answer: str


class LibraryCorpus(NamedTuple):
    """What the three files hold."""

    texts: list[str]
    train: list[Pair]
    held_out: list[Pair]


def build_library(modules: Iterable[Module]) -> LibraryCorpus:
    """Split the modules; each answer stands once, and none of the held-out ones stands in the text.

    A sentence that several names share belongs to the first of them. A module with the text of a held-out one, as
    Debian's two files of build variables, is left out.
    """
    modules = sorted(modules)
    held_out_texts = {module.text for module in modules if is_held_out(module.name)}
    texts, train, held_out = [], dict[str, Pair](), dict[str, Pair]()
    for module in modules:
        is_out = is_held_out(module.name)
        if not is_out and module.text in held_out_texts:
            continue
        if not is_out:
            texts.append(module.text)
        for pair in pairs_of(module):
            (held_out if is_out else train).setdefault(pair.answer, pair)
    flat = " ".join(" ".join(texts).split())
    unseen = [pair for pair in held_out.values() if pair.answer not in flat]
    return LibraryCorpus(texts, list(train.values()), unseen)


def is_held_out(module: str) -> bool:
    """Return whether a module is held out, by a hash of its name."""
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def pairs_of(module: Module) -> Iterator[Pair]:
    """Yield the pairs of the public names of a module; none of a private module, or of one that is no valid Python."""
    parts = module.name.split(".")
    if parts[0] in NOT_ASKED or any(part.startswith("_") for part in parts):
        return
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(module.text)
    except (SyntaxError, ValueError):
        return
    if answer := first_sentence(tree):
        yield Pair(f"What is the module {module.name}?", answer)
    yield from _pairs_inside(tree, module.name)


def _pairs_inside(tree: ast.Module | ast.ClassDef, name: str) -> Iterator[Pair]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            inside = f"{name}.{node.name}"
            is_class = isinstance(node, ast.ClassDef)
            if answer := first_sentence(node):
                yield Pair(f"What is {inside}?" if is_class else f"What does {inside} do?", answer)
            if isinstance(node, ast.ClassDef):
                yield from _pairs_inside(node, inside)


def first_sentence(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the first sentence of a docstring on one line; "" if there is none of 9 to 159 characters."""
    docstring = ast.get_docstring(node) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    match = SENTENCE.match(paragraph)
    return match.group() if match else ""


def standard_library() -> Iterator[Module]:
    """Yield the modules of the running Python, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in source_files(Source(kind="stdlib")):
        path = Path(file.path)
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        try:
            yield Module(name, path.read_text("utf-8"))
        except UnicodeDecodeError:  # a file in another encoding, as runs skip it, too
            continue


def write_library(corpus: LibraryCorpus, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / TEXT, ({"text": text} for text in corpus.texts))
    write_lines(folder / TRAIN, map(conversation, corpus.train))
    write_lines(folder / HELD_OUT, map(conversation, corpus.held_out))


def conversation(pair: Pair) -> dict[str, list[dict[str, str]]]:
    """Return a pair in the form of a data set of conversations."""
    messages = [{"role": "user", "content": pair.question}, {"role": "assistant", "content": pair.answer}]
    return {"messages": messages}


def read_pairs(file: Path) -> list[Pair]:
    lines = file.read_text("utf-8").splitlines()
    return [Pair(*(message["content"] for message in json.loads(line)["messages"])) for line in lines]


def write_lines(file: Path, records: Iterable[Mapping[str, object]]) -> None:
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")


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


def ask(model: "LanguageModel", pairs: Sequence[Pair]) -> list[Answer]:
    """Return the model's likeliest answer to each question."""
    questions = [[{"role": "user", "content": pair.question}] for pair in pairs]
    said = model.answers(questions, tokens=80, temperature=0.0, batch_size=BATCH)
    return [Answer(*answered) for answered in zip(pairs, said, strict=True)]


def bits_of_answers(model: "LanguageModel", chat: "ChatFormat", pairs: Sequence[Pair]) -> float:
    """Return the bits per byte of UTF-8 of the answers, each after its question in the form of `chat`.

    The token that ends an answer is not counted: pretraining never saw it.
    """
    import torch  # not for the corpus

    from torchllm.data.packing import IGNORED
    from torchllm.data.tokenizer import bits_per_byte
    from torchllm.tools.prepare.chat.template import Conversation

    nats, size = 0.0, 0
    for number, pair in enumerate(pairs):
        show_progress(f"{number:,} of {len(pairs):,} answers rated".format)
        (example,) = chat.examples(Conversation([*conversation(pair)["messages"]])).examples
        ids, is_target = (torch.from_numpy(array).unsqueeze(0) for array in (example.ids, example.is_target))
        labels = ids.long().masked_fill(~is_target, IGNORED)
        labels[0, is_target[0].nonzero()[-1]] = IGNORED
        positions = torch.arange(ids.shape[1] - 1).unsqueeze(0)
        with torch.no_grad():
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


def write_figures(folder: Path, output: Path) -> None:
    """Print and write the figures and the conversation."""
    from torchllm.tools.generate.language_model import load

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


def write_corpus(folder: Path) -> None:
    """Write the files of the corpus."""
    corpus = build_library(standard_library())
    write_library(corpus, folder)
    size = sum(len(text.encode()) for text in corpus.texts)
    print(f"{len(corpus.texts):,} modules, {size / 2**20:.1f} MiB of text without the held-out modules")
    print(f"{len(corpus.train):,} conversations to train on, {len(corpus.held_out):,} of held-out modules")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[LogHandler()])
    if len(sys.argv) == 3:
        with signs_of_life("evaluate"):
            write_figures(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        write_corpus(Path(sys.argv[1]))
