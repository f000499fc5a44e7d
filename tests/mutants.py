"""Breaks what a test names, one expression at a time, and says which tests do not notice.

python -m tests.mutants                      # 60 tests of the default tier, drawn by seed 1
python -m tests.mutants 20 2 tests/optim     # 20 tests of a folder, drawn by seed 2

A test's subject is the functions and classes of the library that its source names, or else the module that its file
mirrors. Only lines that it executes are changed; slow tests and tests that start processes are left out. Tests run in
forks of one process that has imported everything: a mutant is another code object in the place of a function's. One
that its test does not notice runs with the test's whole file, and that of the changed module. These also run without
it: a file that fails either way notices nothing. Exit status 1: one survives that is not in mutants.json, which says
why mutants are equivalent to the library's code.
"""

import ast
import gc
import inspect
import json
import multiprocessing.util
import os
import random
import resource
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from tests import workers

ROOT = Path(__file__).parents[1]
LIBRARY = f"{ROOT}/torchllm/"
SLOW, LIMIT = 3, 120
"""seconds: of CPU time of a test, three times as many with a mutant; of any trial"""
OTHER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
OTHER |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And}
OTHER |= {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
"""operators, and what a mutant has in their place"""
PASSED, FAILED, UNFIT = 0, 1, 2


class Mutant(NamedTuple):
    """One changed expression or statement."""

    text: str
    place: tuple[str, str, int]
    """file, name and first line of its function"""
    code: CodeType
    """of the changed module"""


def changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield a field of a node with another value for it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        yield "ops", [OTHER[type(node.ops[0])](), *node.ops[1:]]
    elif isinstance(node, (ast.BoolOp, ast.BinOp, ast.AugAssign)) and type(node.op) in OTHER:
        yield "op", OTHER[type(node.op)]()
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield "test", ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        yield "value", not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, (ast.Return, ast.Expr)) and node.value and not isinstance(node.value, ast.Constant):
        yield "value", ast.Constant(None)


def mutants(lines: set[tuple[str, int]], names: set[str], mirror: str) -> list[Mutant]:
    """Return the mutants of a test. lines: that it executes. names: in its source. mirror: module of its file."""
    groups: dict[tuple[bool, bool], list[Mutant]] = {}
    for file in sorted({file for file, _ in lines}):
        source = Path(file).read_text()
        tree = ast.parse(source)
        for parent in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
            for function in (node for node in parent.body if isinstance(node, ast.FunctionDef)):
                is_named = bool({function.name, getattr(parent, "name", function.name)} & names)
                place = file, function.name, min(node.lineno for node in [function, *function.decorator_list])
                for node in (node for statement in function.body for node in ast.walk(statement)):
                    if (is_named or file == mirror) and (file, getattr(node, "lineno", 0)) in lines:
                        line = source.splitlines()[node.lineno - 1].strip()
                        groups.setdefault((is_named, file == mirror), []).extend(_of_node(node, tree, place, line))
    return next((groups[key] for key in ((True, True), (True, False), (False, True)) if key in groups), [])


def _of_node(node: ast.AST, tree: ast.Module, place: tuple[str, str, int], line: str) -> Iterator[Mutant]:
    for name, value in changes(node):
        kept, before = getattr(node, name), ast.unparse(node).partition("\n")[0]
        setattr(node, name, value)
        after = ast.unparse(node).partition("\n")[0]
        text = f"{place[0].removeprefix(LIBRARY)} {place[1]}: {before} -> {after} in {line}"
        yield Mutant(text, place, compile(ast.fix_missing_locations(tree), place[0], "exec"))
        setattr(node, name, kept)


def _mirrored(item: pytest.Item) -> str:
    """Return the module of the library that a test's file is about."""
    return f"{LIBRARY}{item.path.relative_to(ROOT / 'tests').with_name(item.path.name.removeprefix('test_'))}"


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_name, code.co_firstlineno


def run(items: Sequence[pytest.Item], mutant: Mutant | None = None) -> int:
    """Run tests in this process, up to one that fails, perhaps with a mutant in its function's place."""
    if mutant is not None:
        codes = [mutant.code]
        for code in codes:
            codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        (other,) = (code for code in codes if _place(code) == mutant.place)
        functions = [function for function in gc.get_objects() if isinstance(function, FunctionType)]
        functions = [function for function in functions if _place(function.__code__) == mutant.place]
        for function in functions:
            function.__code__ = other
        if not functions:
            return UNFIT
    for item in items:
        if any(report.outcome == "failed" for report in runtestprotocol(item, log=False, nextitem=None)):
            return FAILED
    return PASSED


def trace(item: pytest.Item, file: Path) -> int:
    """Run a test, and write the lines of the library that it executes into a file."""
    lines: set[tuple[str, int]] = set()

    def follow(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return follow if frame.f_code.co_filename.startswith(LIBRARY) else None

    def leave_out(*arguments: object) -> NoReturn:
        os._exit(UNFIT)

    sys.addaudithook(lambda event, _: leave_out() if event in ("subprocess.Popen", "os.fork") else None)
    multiprocessing.util.spawnv_passfds = leave_out  # type: ignore[attr-defined]  # starts its processes
    sys.settrace(follow)
    status = run([item])
    sys.settrace(None)
    file.write_text(repr(lines))
    return status


def in_fork(work: Callable[[], int], cpu_seconds: int) -> int:
    """Return what `work` returns in a fork of this process; FAILED if it takes too long."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.setsid()
            signal.alarm(LIMIT)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
            for descriptor in range(3):
                os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            os._exit(work())
        os._exit(FAILED)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that it has left
    shutil.rmtree(workers.POOL.folder, ignore_errors=True)  # else another fork's ranks would look for those of this one
    return status if status >= 0 else FAILED


class Trials:
    """Plugin of pytest: a trial for each of the drawn tests in the place of its run."""

    def __init__(self, tests: int, seed: int) -> None:
        self.tests, self.seed, self.lines = tests, seed, ROOT / ".night/mutant_lines"
        self.equivalent = json.loads(Path(__file__).with_suffix(".json").read_text())
        self.outcomes: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Draw tests until enough of them had a mutant: a new test, or a changed one, changes no other draw."""
        self.lines.parent.mkdir(exist_ok=True)
        functions = [item for item in session.items if isinstance(item, pytest.Function)]
        for item in sorted(functions, key=lambda item: random.Random(f"{self.seed} {item.nodeid}").random()):
            if len(self.outcomes) < self.tests and in_fork(lambda item=item: trace(item, self.lines), SLOW) == PASSED:
                self.try_one(item, functions)
        print("; ".join(f"{self.outcomes.count(name)} {name}" for name in sorted(set(self.outcomes))))
        return True

    def try_one(self, item: pytest.Function, others: Sequence[pytest.Function]) -> None:
        """Note and print the outcome of one mutant of a test. others: all tests."""
        source = ast.parse(textwrap.dedent(inspect.getsource(item.function)))
        names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(source)} - {""}
        choices = mutants(ast.literal_eval(self.lines.read_text()), names, _mirrored(item))
        if not choices:
            return
        mutant = random.Random(f"{self.seed} {item.nodeid}").choice(choices)
        status = in_fork(lambda: run([item], mutant), 3 * SLOW)
        outcome = "noticed"
        if status == UNFIT:
            return
        if status == PASSED and mutant.text in self.equivalent:
            outcome = "equivalent"
        elif status == PASSED:
            files = [other for other in others if other.path == item.path or _mirrored(other) == mutant.place[0]]
            with_mutant = in_fork(lambda: run(files, mutant), 20 * SLOW)
            without = in_fork(lambda: run(files), 20 * SLOW)
            outcome = "SURVIVED" if with_mutant == without else "noticed by its file"
        self.outcomes.append(outcome)
        print(f"{outcome}: {item.nodeid}\n    {mutant.text}", flush=True)


if __name__ == "__main__":
    tests, seed, *paths = sys.argv[1:] or ["60", "1"]
    trials = Trials(int(tests), int(seed))
    failed = pytest.main(["-n", "0", "-q", "-s", "-p", "no:cacheprovider", *paths], plugins=[trials])
    sys.exit(int(failed) if not trials.outcomes else int("SURVIVED" in trials.outcomes))
