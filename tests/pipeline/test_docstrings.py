"""The corpus and the conversations of the laptop's pipeline."""

from pathlib import Path

import pytest

from train_configs.pipeline.laptop.docstrings import (
    HELD_OUT,
    TEXT,
    TRAIN,
    LibraryCorpus,
    Module,
    Pair,
    build_library,
    is_held_out,
    pairs_of,
    read_pairs,
    standard_library,
    write_library,
)

SOURCE = '''"""A module.  It does things."""
class Box:
    """Holds
    one thing. And more."""
    def open(self):
        """Return the thing, e.g. a pen?"""
    def _shut(self):
        """Shut it for good."""
async def fetch():
    """No full stop"""
def short():
    """Short."""
def bare(): pass
'''


@pytest.fixture(scope="module")
def library() -> LibraryCorpus:
    return build_library(standard_library())


def test_pairs_are_the_first_sentences_of_public_docstrings() -> None:
    assert list(pairs_of(Module("a.b", SOURCE))) == [
        Pair("What is the module a.b?", "A module."),
        Pair("What is a.b.Box?", "Holds one thing."),
        Pair("What does a.b.Box.open do?", "Return the thing, e.g."),
    ]
    for name, text in (("a._b", SOURCE), ("idlelib.help", SOURCE), ("a", "def f(:"), ("a", "\0")):
        assert not list(pairs_of(Module(name, text)))


def test_held_out_modules_are_nowhere_in_training(library: LibraryCorpus) -> None:
    """Neither their source, nor their names' questions, nor a sentence that a trained module has, too."""
    modules = {module.name: module.text for module in standard_library()}
    out = {name for name in modules if is_held_out(name)}
    assert 0.02 < len(out) / len(modules) < 0.1
    assert not set(library.texts) & {modules[name] for name in out}
    asked = {pair for name in out for pair in pairs_of(Module(name, modules[name]))}
    assert set(library.held_out) <= asked
    assert not asked & set(library.train)
    text = " ".join(" ".join(library.texts).split())
    assert library.held_out
    assert not [pair for pair in library.held_out if pair.answer in text]
    for pairs in (library.train, library.held_out):
        assert len({pair.answer for pair in pairs}) == len(pairs)
    assert len(library.train) > 2000


def test_a_held_out_sentence_that_training_has_is_dropped() -> None:
    out, kept = (next(f"m{i}" for i in range(999) if is_held_out(f"m{i}") is wanted) for wanted in (True, False))
    shared = Module(kept, '# Return the\n"""Not the sentence."""\nx = "Return the\\n value."')
    module = Module(out, '"""Return the value."""\ndef f():\n    """Only here."""')
    assert len(build_library([module]).held_out) == 2
    seen = shared._replace(text=shared.text.replace("\\n", ""))
    assert build_library([module, seen]).held_out == [Pair(f"What does {out}.f do?", "Only here.")]
    assert build_library([module, Module(kept, module.text)]) == build_library([module])


def test_the_files_are_the_same_each_time(library: LibraryCorpus, tmp_path: Path) -> None:
    some = list(standard_library())[::10]
    for folder in ("one", "two"):
        write_library(build_library(some), tmp_path / folder)
    for name in (TEXT, TRAIN, HELD_OUT):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    write_library(library, tmp_path / "all")
    assert read_pairs(tmp_path / "all" / TRAIN) == library.train
