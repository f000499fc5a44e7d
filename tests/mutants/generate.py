"""Makes mutants of a source file: the same file with one small defect, of the kinds that mutmut and cosmic-ray know.

A mutant replaces one piece of the text and leaves the rest of the file as it is. Not made are mutants that can be told
to be the same program, or of which only a reader of texts would know:

- docstrings, annotations, imports, `__all__`, the bodies of protocols;
- what is logged or warned of: calls of `log`, `say` and `warnings`, f-strings, and arguments of exceptions;
- assertions, which tell the type checker what is known;
- what stands under `if __name__ == "__main__"`, which only a started run executes;
- patterns of `match`, and `strict=` of `zip`, which is an assertion;
- exchanged arguments of functions such as `transpose`, for which their order means nothing.
"""

import ast
import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.MatMult: ("@", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
FOR_READERS = {"log", "say", "warnings"}
"""names whose calls are read by people alone"""
SYMMETRIC = {"logaddexp", "max", "maximum", "min", "promote_types", "transpose"}
"""functions that give the same for two arguments in either order"""
OTHER_KINDS_OF_FUNCTION = {"staticmethod", "classmethod", "property", "contextmanager"}
"""decorators without which no call works"""


class Mutant(NamedTuple):
    """One defect in one file."""

    file: str
    """its path in the repository"""
    kind: str
    function: str
    """where it is, as "Class.method"; empty: at the top of the file"""
    original: str
    """the lines that change, as one line"""
    mutated: str
    """the same lines with the defect"""
    occurrence: int
    """how many mutants of the file with the same texts come before it"""
    source: str
    """the whole file with the defect"""

    @property
    def key(self) -> str:
        """Return what tells the mutant from all others, whatever else changes in its file."""
        texts = (self.file, self.function, self.original, self.mutated, str(self.occurrence))
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


class Change(NamedTuple):
    """A piece of a file's text, from `start` to `stop`, and what comes in its place."""

    kind: str
    function: str
    start: int
    stop: int
    replacement: str


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants at random, in random order: a file has its share by the number of its mutants.

    The order depends on each mutant alone, so a change of one file leaves the mutants of the others in the sample, and
    a larger count only adds some.
    """
    in_order = sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest())
    return list(itertools.islice(filter(_is_program, in_order), count))


def _is_program(mutant: Mutant) -> bool:
    """Return whether Python accepts the text; a comma may be one too many."""
    try:
        ast.parse(mutant.source)
    except SyntaxError:
        return False
    return True


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Return all mutants of a source file, in the order of its lines; some may not be programs."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    mutants = []
    occurrences: dict[tuple[str, str, str], int] = {}
    for change in sorted(set(finder.changes), key=lambda change: (change.start, change.stop, change.replacement)):
        mutated_source = source[: change.start] + change.replacement + source[change.stop :]
        original, mutated = _changed_lines(source, change)
        if original == mutated:
            continue
        texts = (change.function, original, mutated)
        occurrence = occurrences.get(texts, 0)
        occurrences[texts] = occurrence + 1
        mutants.append(Mutant(file, change.kind, *texts, occurrence, mutated_source))
    return mutants


def _changed_lines(source: str, change: Change) -> tuple[str, str]:
    """Return the lines that a change touches, before and after it, each as one line."""
    first = source.rfind("\n", 0, change.start) + 1
    end = source.find("\n", change.stop)
    last = len(source) if end < 0 else end
    before, after = source[first : change.start], source[change.stop : last]
    return _one_line(source[first:last]), _one_line(before + change.replacement + after)


def _one_line(text: str) -> str:
    return " ".join(text.split())


class _Finder(ast.NodeVisitor):
    """Collects the changes of one file."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = source.splitlines(keepends=True)
        self.line_starts = [0, *itertools.accumulate(len(line) for line in self.lines)]
        self.changes: list[Change] = []
        self.names: list[str] = []
        """of the classes and functions around the node that is visited"""
        self.first_arguments: list[str] = []
        """of the functions around it"""
        self.imported: set[str] = set()

    def _offset(self, line: int, column: int) -> int:
        """Return a position in the text. line: from 1; column: in bytes, as `ast` counts."""
        return self.line_starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def _start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _stop(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr | ast.keyword) -> str:
        return self.source[self._start(node) : self._stop(node)]

    def _add(self, kind: str, start: int, stop: int, replacement: str) -> None:
        self.changes.append(Change(kind, ".".join(self.names), start, stop, replacement))

    def _replace(self, kind: str, node: ast.expr | ast.stmt, replacement: str) -> None:
        self._add(kind, self._start(node), self._stop(node), replacement)

    def _replace_operator(
        self, kind: str, first_operand: ast.expr, second_operand: ast.expr, operator: str, other: str
    ) -> None:
        """Replace the operator between two operands, where else only brackets, comments and blanks are."""
        start = self.source.index(operator, self._stop(first_operand), self._start(second_operand))
        self._add(kind, start, start + len(operator), other)

    # What is not mutated

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Import(self, node: ast.Import) -> None:
        self.imported |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imported |= {alias.asname or alias.name for alias in node.names}

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_match_case(self, node: ast.match_case) -> None:
        for statement in node.body:
            self.visit(statement)

    # Statements

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = {_last_name(base) for base in node.bases}
        if "Protocol" in bases:
            return
        self.names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for decorator in node.decorator_list:
            if _last_name(decorator) not in OTHER_KINDS_OF_FUNCTION:
                start = self.source.rindex("@", 0, self._start(decorator))
                self._add("decorator dropped", start, self._stop(decorator), "")
        self.names.append(node.name)
        names = [argument.arg for argument in node.args.args if argument.arg not in ("self", "ctx")]
        self.first_arguments.append(names[0] if names else "")
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.first_arguments.pop()
        self.names.pop()

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring
            return
        if not _is_for_readers(node.value):
            self._replace("statement deleted", node, "pass")
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace("statement deleted", node, "pass")

    def visit_Delete(self, node: ast.Delete) -> None:
        self._replace("statement deleted", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace("statement deleted", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace("statement deleted", node, "pass")

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            return
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._replace("statement deleted", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace("statement deleted", node, "pass")
        operator, other = ARITHMETIC[type(node.op)]
        self._replace_operator("operator replaced", node.target, node.value, f"{operator}=", f"{other}=")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._replace("statement deleted", node, "pass")
            return
        if not isinstance(node.value, ast.Constant):
            self._replace("None returned", node.value, "None")
        first = self.first_arguments[-1]
        if first:
            self._replace("first argument returned", node.value, first)
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Compare) and _last_name(node.test.left) == "__name__":
            return
        self._force(node.test)
        self.generic_visit(node)

    # Expressions

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._force(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._force(condition)
        self.generic_visit(node)

    def _force(self, condition: ast.expr) -> None:
        self._replace("condition forced", condition, "True")
        self._replace("condition forced", condition, "False")

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = itertools.pairwise([node.left, *node.comparators])
        for (first_operand, second_operand), operator in zip(operands, node.ops, strict=True):
            self._replace_operator("comparison replaced", first_operand, second_operand, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        operator, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for first_operand, second_operand in itertools.pairwise(node.values):
            self._replace_operator("operator replaced", first_operand, second_operand, operator, other)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._replace_operator("operator replaced", node.left, node.right, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._replace("operator dropped", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace("constant changed", node, str(not value))
        elif isinstance(value, int):
            self._replace("constant changed", node, str(value + 1))
        elif isinstance(value, float):
            self._replace("constant changed", node, str(2.0 * value if value else 1.0))
        elif isinstance(value, str):
            self._replace("constant changed", node, '"mutant"')

    def visit_Call(self, node: ast.Call) -> None:
        name = _last_name(node.func)
        if _is_for_readers(node) or name.endswith("Error"):
            return
        if isinstance(node.func, ast.Attribute) and _first_name(node.func) not in self.imported:
            self._replace("call without effect", node, self._text(node.func.value))
        if name in ("max", "min"):
            for argument in node.args:
                self._replace("call without effect", node, self._text(argument))
        if name != "isinstance":
            self._change_arguments(node)
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg != "strict":
                self.visit(keyword.value)

    def _change_arguments(self, node: ast.Call) -> None:
        """Drop keywords and the last positional argument, and exchange neighbors. The first one stays."""
        arguments = [*node.args, *node.keywords]
        for index, argument in enumerate(arguments):
            if isinstance(argument, ast.keyword):
                if argument.arg != "strict":
                    self._drop("keyword dropped", arguments, index)
            elif index == len(node.args) - 1 > 0:
                self._drop("argument dropped", arguments, index)
        if _last_name(node.func) in SYMMETRIC:
            return
        for argument, following in itertools.pairwise(node.args):
            swapped = (
                self._text(following)
                + self.source[self._stop(argument) : self._start(following)]
                + self._text(argument)
            )
            self._add("arguments swapped", self._start(argument), self._stop(following), swapped)

    def _drop(self, kind: str, arguments: Sequence[ast.expr | ast.keyword], index: int) -> None:
        """Drop an argument of a call, with one of the commas beside it."""
        start, stop = self._start(arguments[index]), self._stop(arguments[index])
        if index > 0:
            start = self._stop(arguments[index - 1])
        elif len(arguments) > 1:
            stop = self._start(arguments[1])
        self._add(kind, start, stop, "")


def _is_for_readers(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _first_name(node.func) in FOR_READERS


def _first_name(node: ast.expr) -> str:
    """Return the `a` of `a.b.c`; empty if there is none."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _last_name(node: ast.expr) -> str:
    """Return the `c` of `a.b.c`, of a call the name of what is called; empty if there is none."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
