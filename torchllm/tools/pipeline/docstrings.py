"""Write the Python of this machine's standard library as a corpus, and conversations made from its docstrings.

    python -m torchllm.tools.pipeline.docstrings FOLDER

FOLDER gets text.jsonl, train.jsonl and held_out.jsonl. One module in twenty is held out: its source is not in
text.jsonl, its conversations are in held_out.jsonl alone. Modules are read, not imported: the same library gives
the same bytes.
"""

import ast
import hashlib
import json
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torchllm.config import Source
from torchllm.tools.prepare.chosen_files import source_files

TEXT, TRAIN, HELD_OUT = "text.jsonl", "train.jsonl", "held_out.jsonl"
HELD_OUT_SHARE = 20
"""one module of this many is held out"""
NOT_ASKED = {"distutils", "idlelib", "lib2to3", "turtledemo"}
"""packages without an interface that users are told to import"""
SENTENCE = re.compile(r".{8,158}?[.!?](?=\s|$)")


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


def main() -> None:
    """Write the files to the folder of the command line."""
    corpus = build_library(standard_library())
    write_library(corpus, Path(sys.argv[1]))
    size = sum(len(text.encode()) for text in corpus.texts)
    print(f"{len(corpus.texts):,} modules, {size / 2**20:.1f} MiB of text without the held-out modules")
    print(f"{len(corpus.train):,} conversations to train on, {len(corpus.held_out):,} of held-out modules")


if __name__ == "__main__":
    main()
