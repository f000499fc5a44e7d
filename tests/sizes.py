"""Counts what a reader has to read, in lines of the files.

python -m tests.sizes
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from torchllm.recipe import HOMES

ROOT = Path(__file__).parents[1]
FACE = "torchllm.recipe"
TOOLS = ROOT / "torchllm" / "tools"
DOORS = ("__main__.py", "cli.py", "recipe.py")
"""files of torchllm that lead to tools, and are of neither side"""


class Size(NamedTuple):
    """How much there is to read."""

    files: int
    lines: int


def size_of(files: Iterable[Path]) -> Size:
    lengths = [len(file.read_text(encoding="utf-8").splitlines()) for file in files]
    return Size(len(lengths), sum(lengths))


def core_files() -> list[Path]:
    files = ROOT.glob("torchllm/**/*.py")
    return sorted(file for file in files if not file.is_relative_to(TOOLS) and file.name not in DOORS)


def spine_files() -> list[Path]:
    """Return the files that docs/code_map.md tells a reader of a recipe to read first."""
    text = (ROOT / "docs/code_map.md").read_text(encoding="utf-8")
    listed = text.partition("## The spine")[2].partition("\n## ")[0]
    return [ROOT / word for word in dict.fromkeys(listed.split("`")[1::2]) if word.endswith(".py")]


def imported_files(recipe: Path) -> set[Path]:
    """Return the files of this project that importing a recipe loads; not those that a function imports."""
    found: set[Path] = set()
    waiting = [recipe]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += [other for name in imported_names(file) for other in files_of(name)]
    return found


def imported_names(file: Path) -> Iterator[str]:
    """Yield the modules and names that a file imports when it is imported, fully dotted."""
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) or _is_not_run(node):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def _is_not_run(node: ast.AST) -> bool:
    """Return whether a statement is for type checkers, or for a file that is started."""
    return isinstance(node, ast.If) and any(word in ast.unparse(node.test) for word in ("TYPE_CHECKING", "__name__"))


def files_of(name: str) -> Iterator[Path]:
    """Yield the files that importing a module, or a name of a module, loads: its packages, too."""
    module, _, attribute = name.rpartition(".")
    if module == FACE:  # it imports what is asked for
        name = f"{HOMES[attribute]}.{attribute}"
        yield ROOT / "torchllm/recipe.py"
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        path = ROOT.joinpath(*parts[:length])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                yield file


def main() -> None:
    for name in ("pretrain", "finetune", "minimal"):
        print(f"import of recipes/{name}.py", size_of(imported_files(ROOT / "recipes" / f"{name}.py")))
    print("core", size_of(core_files()))
    print("spine", size_of(spine_files()))
    print("library and recipes", size_of([*ROOT.glob("torchllm/**/*.py"), *ROOT.glob("recipes/**/*.py")]))
    print("tests", size_of(ROOT.glob("tests/**/*.py")))


if __name__ == "__main__":
    main()
