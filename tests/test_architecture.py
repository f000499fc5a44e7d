"""The rules of the house, held by a tool: who imports whom, what is private, how long a file may get."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("torchllm/**/*.py"), *ROOT.glob("recipes/*.py")])

LAYERS = [  # each imports only itself and what is left of (above) it; a prefix "x." covers a package, "x*" its siblings
    ["config*", "layout", "errors", "metrics.flops", "planner."],
    ["runtime", "hang_watch*", "mesh", "torch_compat", "phase"],
    ["models.", "data.", "initialize"],
    ["parallel."],
    ["optim.", "grad_norm"],
    ["train_step"],
    ["dry_run."],
    ["checkpoint*", "metrics.", "evaluate", "adapt", "trial", "tune"],
    ["recipes.", "launch"],
]
TORCH_FREE = LAYERS[0]

LONGEST = 330
LONGER = {"torchllm/config.py": "the settings: a field and a line of help each, read from top to bottom by users"}
BUDGET = 16_500

PRIVATE = {  # what only torch_compat.py may do, and where else and why
    "torchllm/parallel/recompute.py": {
        "_scaled_dot_product_flash_attention": "a kernel has no other name; if it moves, the import fails",
        "_scaled_dot_product_efficient_attention": "as above",
        "_scaled_dot_product_cudnn_attention": "as above",
        "_scaled_dot_product_flash_attention_for_cpu": "as above",
        "_c10d_functional": "as above, for the collectives",
    },
    "torchllm/parallel/attention_kernels.py": {
        "_scaled_dot_product_flash_attention_for_cpu": "the public function keeps the log-sum-exp to itself",
        "_scaled_dot_product_flash_attention_for_cpu_backward": "as above",
        "_scaled_dot_product_flash_attention": "as above",
        "_scaled_dot_product_flash_attention_backward": "as above",
        "_scaled_dot_product_efficient_attention": "as above",
        "_scaled_dot_product_efficient_attention_backward": "as above",
    },
    "recipes/benchmark_context.py": {"_python_dispatch": "no public way to see what is sent"},
    "torchllm/data/loader.py": {"_shutdown_workers": "torchdata has no public way to end its workers in time"},
}
PYTHONS_OWN = {"_current_frames", "_asdict", "_fields", "_replace", "_make", "_exit"}


def module_of(file: Path) -> str:
    """Dotted name below torchllm ("models.head"), or "recipes.pretrain"."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "recipes" else parts[1:])


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file: Path) -> Iterator[str]:
    """Every module or name that a file imports anywhere, fully dotted."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = {module_of(file): file for file in FILES if file.name != "__init__.py"}


def own_imports(file: Path) -> set[str]:
    """Modules of torchllm that a file imports."""
    found = set()
    for name in imports(file):
        if name.split(".")[0] in ("torchllm", "recipes"):
            inside = name.removeprefix("torchllm.")
            found.add(inside if inside in MODULES else inside.rpartition(".")[0])
    return found


def layer_of(module: str) -> int:
    """The first layer that names the module."""
    for index, patterns in enumerate(LAYERS):
        for pattern in patterns:
            exact = module == pattern
            if exact or (pattern[-1] == "." and module.startswith(pattern)):
                return index
            if pattern[-1] == "*" and (module == pattern[:-1] or module.startswith(pattern[:-1] + "_")):
                return index
    raise AssertionError(f"{module} is in no layer: add it to LAYERS (and to the plan)")


def test_the_files_are_found() -> None:
    assert {"config", "mesh", "models.decoder", "parallel.fsdp", "train_step", "recipes.pretrain"} <= MODULES.keys()
    assert own_imports(MODULES["train_step"]) >= {"config", "models.decoder", "grad_norm"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_to_the_left(module: str) -> None:
    wrong = [other for other in own_imports(MODULES[module]) if layer_of(other) > layer_of(module)]
    assert not wrong, f"{module} may not import {wrong}"


def test_imports_have_no_cycle() -> None:
    TopologicalSorter({module: own_imports(file) for module, file in MODULES.items()}).prepare()  # CycleError names it


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("models.")])
def test_models_know_nothing_of_ranks(module: str) -> None:
    assert not [name for name in imports(MODULES[module]) if name.startswith("torch.distributed")]
    used = {ast.unparse(node) for node in ast.walk(tree(MODULES[module])) if isinstance(node, ast.Attribute)}
    assert not [name for name in used if name.startswith("torch.distributed")]


def test_config_layout_and_planner_need_no_torch() -> None:
    names = [f"torchllm.{module}" for module in MODULES if layer_of(module) == 0]
    assert "torchllm.config" in names
    assert "torchllm.metrics.flops" in names
    program = f"""
import importlib, sys
sys.modules["torch"] = None  # importing it fails
for name in {names}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def privates(file: Path) -> Iterator[tuple[str, int]]:
    """Private names of other libraries that a file touches, and where: in imports, and attributes not defined by us."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for dotted in (f"{module}.{alias.name}" for alias in node.names):
                parts = dotted.strip(".").split(".")
                if parts[0] not in ("torchllm", "__future__"):
                    yield from ((part, node.lineno) for part in parts if _private(part))
        elif isinstance(node, ast.Attribute) and _private(node.attr) and node.attr not in OURS | PYTHONS_OWN:
            yield node.attr, node.lineno


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(file: Path) -> Iterator[str]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


OURS = {name for file in FILES for name in _defined(file) if _private(name)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_private_names_of_others_are_in_torch_compat_or_explained(file: Path) -> None:
    name = str(file.relative_to(ROOT))
    if name == "torchllm/torch_compat.py":
        assert {"_flatten", "_checkpoint", "_utils"} <= {private for private, _ in privates(file)}
        return
    unexplained = {private: line for private, line in privates(file) if private not in PRIVATE.get(name, {})}
    assert not unexplained, f"{name}: move through torchllm/torch_compat.py: {unexplained}"


def test_explained_private_names_are_still_used() -> None:
    for name, reasons in PRIVATE.items():
        assert {private for private, _ in privates(ROOT / name)} >= reasons.keys(), name


def test_axes_are_spelled_in_one_file() -> None:
    """A mesh dimension is asked for by name in mesh.py only; config and planner speak of degrees, without torch."""
    axes = {"pp", "dp_replicate", "dp_shard", "cp", "tp", "fsdp"}
    for module, file in MODULES.items():
        if layer_of(module) and module != "mesh":
            spelled = [n.value for n in ast.walk(tree(file)) if isinstance(n, ast.Constant) and n.value in axes]
            assert not spelled, module


def test_recipes_have_no_if_on_the_layout() -> None:
    degrees = {"parallel", "pp", "dp_replicate", "dp_shard", "cp", "tp", "zero_stage", "sequence_parallel", "recompute"}
    conditions = 0
    for file in ROOT.glob("recipes/*.py"):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.If | ast.IfExp | ast.While):
                conditions += 1
                words = {n.attr for n in ast.walk(node.test) if isinstance(n, ast.Attribute)}
                words |= {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
                assert not words & degrees, f"{file.name}:{node.lineno}: {ast.unparse(node.test)}"
    assert conditions > 5


def lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def test_files_are_short_and_the_house_is_small() -> None:
    for file in FILES:
        name = str(file.relative_to(ROOT))
        assert (lines(file) > LONGEST) == (name in LONGER), f"{name}: {lines(file)} lines; which second job moved in?"
    total = sum(map(lines, FILES))
    assert total < BUDGET, f"{total} lines: what could go?"


def test_the_package_itself_is_empty() -> None:
    assert (ROOT / "torchllm/__init__.py").read_text() == ""
