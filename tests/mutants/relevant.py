"""Which files are mutated, and which tests are judged to see a mutant of each: those that take the least time first."""

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ("recipes/pretrain.py", "recipes/minimal.py", "recipes/finetune.py")
EVERYTHING = ("tests",)
"""what a survivor of its relevant tests is tried against: the whole default tier"""


def mutated_files() -> list[str]:
    """Return the paths of all files that are mutated: the library, and the recipes that people fork first."""
    library = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "torchllm").rglob("*.py"))
    return [*library, *RECIPES]


def relevant_tests(file: str) -> list[str]:
    """Return the files of tests of a source file, as arguments of pytest, in the order in which they run.

    First the one that mirrors it, then those that import it, then the others of its folder, then those of its room.
    """
    path = Path(file)
    parts = path.parts[1:] if path.parts[0] == "torchllm" else path.parts
    mirrored = Path("tests", *parts[:-1], f"test_{path.name}")
    module = ".".join(path.with_suffix("").parts).removeprefix("recipes.")
    package = re.escape(module.rpartition(".")[0])
    imports = re.compile(rf"\b{re.escape(module)}\b|from {package} import .*\b{path.stem}\b")
    texts = texts_of_tests()
    ordered = [test for test in texts if test == str(mirrored)]
    ordered += [test for test, text in texts.items() if imports.search(text)]
    if len(parts) > 1:
        ordered += [test for test in texts if Path(test).parent == mirrored.parent]
        room = Path("tests", *parts[: 2 if parts[0] == "tools" else 1])
        ordered += [test for test in texts if Path(test).is_relative_to(room)]
    return list(dict.fromkeys(ordered)) or list(EVERYTHING)


@functools.cache
def texts_of_tests() -> dict[str, str]:
    """Return the text of each file of tests, by its path."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    apart = ("hollow", "slurm", "gpu")
    return {str(file.relative_to(ROOT)): file.read_text() for file in files if file.parent.name not in apart}
