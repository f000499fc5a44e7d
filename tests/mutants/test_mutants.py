"""What is mutated, and how a mutant is judged."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutants.generate import Mutant, mutants_of, sample
from tests.mutants.relevant import ROOT, mutated_files, relevant_tests
from tests.mutants.results import Explanation, Results, Row, is_explained, markdown_table, read_explanations, rows
from tests.mutants.run import KILLED, MARK, SURVIVED, TIMED_OUT, TestRun, judge, kill_marked, run_tests, try_mutant


def mutants(source: str) -> list[Mutant]:
    return mutants_of("a.py", textwrap.dedent(source))


def mutated(source: str, kind: str = "") -> list[str]:
    """Return what becomes of the lines that change, in the mutants of one kind."""
    return [mutant.mutated for mutant in mutants(source) if kind in mutant.kind]


@pytest.mark.parametrize(
    ("source", "kind", "expected"),
    [
        ("x = a < b <= c", "comparison", ["x = a <= b <= c", "x = a < b < c"]),
        ("x = a is not b", "comparison", ["x = a is b"]),
        ("x = a not in (b)", "comparison", ["x = a in (b)"]),
        (
            "x = (a or b) and c and d",
            "operator",
            ["x = (a and b) and c and d", "x = (a or b) or c and d", "x = (a or b) and c or d"],
        ),
        ("x = (a + b) // c", "operator", ["x = (a - b) // c", "x = (a + b) * c"]),
        ("x += a", "", ["pass", "x -= a"]),
        ("x = not (a or b)", "dropped", ["x = (a or b)"]),
        ("x = -a % 4", "dropped", ["x = (a) % 4"]),
        ("x = [True, 7, None]", "constant", ["x = [False, 7, None]", "x = [True, 8, None]"]),
        (
            "x = [0.0, 0.5, 'pp']",
            "constant",
            ["x = [1.0, 0.5, 'pp']", "x = [0.0, 1.0, 'pp']", 'x = [0.0, 0.5, "mutant"]'],
        ),
        ("x = f(a, b, k=1)", "argument dropped", ["x = f(a, k=1)"]),
        ("x = f(k=1, j=b)", "keyword", ["x = f(j=b)", "x = f(k=1)"]),
        ("x = f(a, b, c)", "swapped", ["x = f(b, a, c)", "x = f(a, c, b)"]),
        ("x = a.transpose(1, 2)", "swapped", []),
        ("x = f(a).item().g", "effect", ["x = f(a).g"]),
        ("import a\nx = a.f(b)", "effect", []),  # the module in place of a result
        ("x = min(a, 1)", "effect", ["x = 1", "x = a"]),
        ("f(a)", "deleted", ["pass"]),
        ("x = [a for a in b if c]", "forced", ["x = [a for a in b if False]", "x = [a for a in b if True]"]),
        ("x = a if b else c", "forced", ["x = a if False else c", "x = a if True else c"]),
        ("def f(a, b):\n    return a + b", "returned", ["return None", "return a"]),
        ("@no_grad()\ndef f(): pass", "decorator", [""]),
        ("@property\ndef f(self): pass", "", []),
        ("é = 'ᵀ' + a\nx = 'ᵀ' + b", "operator", ["é = 'ᵀ' - a", "x = 'ᵀ' - b"]),
    ],
)
def test_kinds(source: str, kind: str, expected: list[str]) -> None:
    assert mutated(source, kind) == expected


NOT_MUTATED = '''
"""A docstring."""

import os
from logging import getLogger

__all__ = ["f"]


class Works(Protocol):
    def f(self, a: int = 1) -> int:
        return a + 1


def f(a: dict["str", 4], b) -> "int":
    """Another."""
    assert a + 1 == 2, "text"
    log.info("text %d", a + 1)
    text = f"{a + 1}"
    match a:
        case "b":
            pass
    for a, b in zip(a, b, strict=True):
        raise ValueError(a + 1)


if __name__ == "__main__":
    f(1 + 2)
'''


def test_what_is_not_mutated() -> None:
    assert mutated(NOT_MUTATED) == ["for a, b in zip(b, a, strict=True):", "for a, b in zip(a, strict=True):", "pass"]


def test_a_mutant_changes_one_piece_of_its_file() -> None:
    source = "def f(a):\n    # why\n    return g(a, 1)  # and how\n"
    swapped = next(mutant for mutant in mutants_of("a.py", source) if mutant.kind == "arguments swapped")
    assert swapped.source == "def f(a):\n    # why\n    return g(1, a)  # and how\n"
    assert (swapped.function, swapped.original) == ("f", "return g(a, 1) # and how")


def test_a_mutant_keeps_its_key_and_its_place_in_the_sample_when_its_file_grows() -> None:
    source = "def f(a):\n    x = a < 1\n    x = a < 1\n    return x\n"
    before = mutants_of("a.py", source)
    after = mutants_of("a.py", "import os\n\n\n" + source + "y = os.path + 1\n")
    assert len({mutant.key for mutant in before}) == len(before)  # of equal lines, too
    assert {mutant.key for mutant in before} < {mutant.key for mutant in after}
    order = [mutant.key for mutant in sample(after, len(after), seed=3)]
    assert [mutant.key for mutant in sample(before, len(before), seed=3)] == [
        key for key in order if key in {mutant.key for mutant in before}
    ]
    assert order != [mutant.key for mutant in sample(after, len(after), seed=4)]


def test_every_mutated_file_has_tests_and_every_explanation_a_mutant() -> None:
    files = {file: mutants_of(file, (ROOT / file).read_text()) for file in mutated_files()}
    for file, of_file in files.items():
        tests = relevant_tests(file)
        assert not of_file or tests, file
        for test in tests:
            assert (ROOT / test.partition("::")[0]).exists(), test
    for explanation in read_explanations():
        assert any(explanation.explains(mutant) for mutant in files[explanation.file]), explanation
        assert explanation.reason


def test_exit_statuses_of_pytest() -> None:
    assert judge(0, "3 passed", 1.0) == TestRun(SURVIVED, "", 1.0)
    assert judge(1, "F\nFAILED tests/a.py::test_b - assert\n", 1.0) == TestRun(KILLED, "tests/a.py::test_b", 1.0)
    assert judge(2, "ERROR tests/a.py - SyntaxError\n", 1.0) == TestRun(KILLED, "tests/a.py", 1.0)
    assert judge(4, "ImportError while loading conftest", 1.0) == TestRun(KILLED, "import", 1.0)
    assert judge(1, "E  Timed out waiting\nFAILED tests/a.py::test_b\n", 1.0) == TestRun(TIMED_OUT, "", 1.0)
    for status, output in ((5, "no tests ran"), (4, "ERROR: file or directory not found: a")):
        with pytest.raises(RuntimeError, match="no test"):
            judge(status, output, 1.0)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository of one file and its test, which hangs where `half` returns None."""
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "halves.py").write_text("def half(x):\n    assert x\n    return x // 2\n")
    (folder / "test_halves.py").write_text(
        textwrap.dedent("""
            import subprocess, sys
            from halves import half

            def test_half():
                if half(4) is None:
                    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
                assert half(4) == 2
        """)
    )
    return folder


def test_a_mutant_is_killed_survives_or_times_out(copy: Path) -> None:
    original = (copy / "halves.py").stat()
    source = (copy / "halves.py").read_text()

    def outcome(text: str, replacement: str, limit: float = 60.0) -> TestRun:
        mutant = Mutant("halves.py", "", "half", text, replacement, 0, source.replace(text, replacement))
        return try_mutant(copy, mutant, ["test_halves.py"], limit)

    assert outcome("//", "*")[:2] == (KILLED, "test_halves.py::test_half")
    assert outcome("assert x", "pass")[:2] == (SURVIVED, "")
    assert outcome("x // 2", "None", limit=2.0)[:2] == (TIMED_OUT, "")
    assert (copy / "halves.py").read_text() == source
    assert (copy / "halves.py").stat().st_mtime_ns == original.st_mtime_ns
    assert not [path for path in copy.rglob("*") if path.suffix in (".pyc", ".original")]
    with pytest.raises(RuntimeError, match="found no test"):
        run_tests(copy, ["test_other.py"], 60.0)


def test_processes_of_other_sessions_are_killed_and_nothing_else() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    marked = subprocess.Popen(command, env=os.environ | {MARK: "m1"}, start_new_session=True)
    other = subprocess.Popen(command, env=os.environ | {MARK: "m2"})
    try:
        kill_marked("m1")
        assert marked.wait(10) < 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def three() -> Sequence[Mutant]:
    return mutants_of("torchllm/optim/a.py", "x = a + b\ny = a < b\nz = a or b\n")


def test_results_are_read_again_and_summed_up(tmp_path: Path) -> None:
    killed, survivor, other = three()
    results = Results(tmp_path / "results.jsonl")
    results.add_passing("digest")
    results.add_outcome(killed, TestRun(SURVIVED, "", 1.0))
    results.add_outcome(killed, TestRun(KILLED, "tests/a.py", 1.0))  # the second time
    results.add_outcome(survivor, TestRun(SURVIVED, "", 1.0))
    results = Results(tmp_path / "results.jsonl")
    assert results.passing == {"digest"}
    assert [results.outcome(mutant) for mutant in three()] == [KILLED, SURVIVED, ""]
    explanation = Explanation("torchllm/optim/a.py", "y = a < b", "y = a <= b", "they are never equal")
    assert is_explained(survivor, [explanation])
    assert not is_explained(other, [explanation])
    table = rows(three(), results, [explanation])
    assert table == [Row("torchllm/optim", 2, 1, 0, 1, 1), Row("all", 2, 1, 0, 1, 1)]
    assert markdown_table(table).splitlines()[-1] == "| all | 2 | 1 | 0 | 1 | 1 |"
