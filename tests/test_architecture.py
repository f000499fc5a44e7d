"""The rules of the house, held by a tool: who imports whom, what is private."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.sizes import core_files, imported_files, size_of, spine_files
from torchllm.config import FAMILIES
from torchllm.models.seams import SEAMS

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("torchllm/**/*.py"), *ROOT.glob("recipes/**/*.py")])

CORE = ["config", "facts", "runtime", "models", "data", "parallel", "optim", "train", "checkpoint", "metrics"]
"""What a fork reads and may change. Each room (a folder or a file of torchllm) imports only itself and rooms above."""
TOOLS = [
    *("tools.resources", "tools.config", "tools.planner", "tools.iterable", "tools.mesh_axes", "tools.torch_names"),
    "tools.continue_texts",
    *("tools.launch", "tools.prepare", "tools.hub", "tools.dry_run", "tools.watch", "tools.adapt", "tools.proof"),
    *("tools.front", "tools.generate"),
]
"""They stand on the core, which imports none of them; each also imports only those above it."""
ROOMS = [*CORE, *TOOLS, "recipe", "cli", "__main__", "recipes"]
TORCH_FREE = {
    *("config", "facts", "tools.resources", "tools.config", "tools.planner"),
    *("tools.front", "recipe", "cli", "__main__"),
}
TORCH_FREE_MODULES = {
    *("runtime.heartbeat", "tools.launch.launcher_notes", "tools.launch.lease"),
    *("tools.launch.take_lease", "checkpoint.manifest", "checkpoint.verify"),
    *("tools.hub.config_json", "tools.hub.files", "tools.hub.model_card", "tools.hub.resolve"),
}
"""in rooms that import torch; a launcher or a check imports them before it"""

PRIVATE = {  # what only TORCH_COMPAT may do, and where else and why
    "torchllm/parallel/recompute.py": {
        "_scaled_dot_product_flash_attention": "a kernel has no other name; if it moves, the import fails",
        "_scaled_dot_product_efficient_attention": "as above",
        "_scaled_dot_product_cudnn_attention": "as above",
        "_scaled_dot_product_flash_attention_for_cpu": "as above",
        "_scaled_mm": "as above, for products in float8",
        "_c10d_functional": "as above, for the collectives",
    },
    "torchllm/models/attention_kernels.py": {
        "_scaled_dot_product_flash_attention_for_cpu": "the public function keeps the log-sum-exp to itself",
        "_scaled_dot_product_flash_attention_for_cpu_backward": "as above",
        "_scaled_dot_product_flash_attention": "as above",
        "_scaled_dot_product_flash_attention_backward": "as above",
        "_scaled_dot_product_efficient_attention": "as above",
        "_scaled_dot_product_efficient_attention_backward": "as above",
    },
    "torchllm/data/loader.py": {"_shutdown_workers": "torchdata has no public way to end its workers in time"},
}
TORCH_COMPAT = {
    "torchllm/runtime/torch_compat.py",
    "torchllm/runtime/torch_operations.py",
    "torchllm/runtime/torch_meshes.py",
    "torchllm/runtime/torch_pipeline.py",
    "torchllm/tools/launch/torch_records.py",
    "torchllm/tools/torch_names.py",
    "torchllm/tools/watch/torch_profile.py",
}
PYTHONS_OWN = {"_current_frames", "_asdict", "_fields", "_replace", "_make", "_exit"}


def module_of(file: Path) -> str:
    """Dotted name below torchllm ("models.head"), or "recipes.pretrain"."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "recipes" else parts[1:])


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    """Every node of a file, in no order that counts."""
    return list(ast.walk(tree(file)))


def imports(file: Path) -> Iterator[str]:
    """Every module or name that a file imports anywhere, fully dotted."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = "".join(f"{part}." for part in file.relative_to(ROOT).parts[:-1]) if node.level else ""
            yield from (f"{package}{node.module}.{alias.name}" for alias in node.names)


MODULES = {module_of(file): file for file in FILES if file.name != "__init__.py"}


REGISTERING = ROOT / "torchllm/recipe.py"
"""imports `torchllm.tools`, by which tools register what they read"""


def own_imports(file: Path) -> set[str]:
    found = set()
    for name in imports(file):
        if name.split(".")[0] in ("torchllm", "recipes"):
            inside = name.removeprefix("torchllm.")
            if inside == "__version__" or (inside == "tools" and file == REGISTERING):
                continue
            found.add(inside if inside in MODULES or inside in ROOMS else inside.rpartition(".")[0])
    return found


def room_of(module: str) -> str:
    """The room a module stands in: "models.head" stands in "models"."""
    parts = module.split(".")
    room = ".".join(parts[:2]) if parts[0] == "tools" else parts[0]
    assert room in ROOMS, f"{module} is in no room: add {room} to ROOMS (and to the house plan)"
    return room


# -- rules of which every file is free of offences: each yields those of one file


def imports_from_below(module: str, file: Path) -> Iterator[str]:
    """A room imports only rooms above it."""
    allowed = ROOMS[: ROOMS.index(room_of(module)) + 1]
    yield from (other for other in own_imports(file) if room_of(other) not in allowed)


def tools_by_name(module: str, file: Path) -> Iterator[str]:
    """The core does not reach a tool by a name in a string either: tools register themselves (`data/registry.py`)."""
    if room_of(module) in CORE:
        texts = (node.value for node in nodes(file) if isinstance(node, ast.Constant) and isinstance(node.value, str))
        yield from (text for text in texts if text.startswith("torchllm.tools"))


def ranks_in_models(module: str, file: Path) -> Iterator[str]:
    """Models know nothing of ranks."""
    if module.startswith("models."):
        used = {ast.unparse(node) for node in nodes(file) if isinstance(node, ast.Attribute)}
        yield from (name for name in used.union(imports(file)) if name.startswith("torch.distributed"))


def privates(file: Path) -> Iterator[tuple[str, int]]:
    """Private names of other libraries that a file touches, and where: in imports, and attributes not defined by us."""
    for node in nodes(file):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for dotted in (f"{module}.{alias.name}" for alias in node.names):
                parts = dotted.strip(".").split(".")
                if parts[0] not in ("torchllm", "__future__"):
                    yield from ((part, node.lineno) for part in parts if _private(part))
        elif (
            isinstance(node, ast.Attribute)
            and _private(node.attr)
            and node.attr not in our_private_names() | PYTHONS_OWN
        ):
            yield node.attr, node.lineno


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(file: Path) -> Iterator[str]:
    for node in nodes(file):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@functools.cache
def our_private_names() -> frozenset[str]:
    return frozenset(name for file in FILES for name in _defined(file) if _private(name))


def unexplained_private_names(module: str, file: Path) -> Iterator[str]:
    """Private names of other libraries are in TORCH_COMPAT, or explained in PRIVATE."""
    name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else ""
    if name not in TORCH_COMPAT:
        yield from (f"{line}: {private}" for private, line in privates(file) if private not in PRIVATE.get(name, {}))


def axes_spelled(module: str, file: Path) -> Iterator[str]:
    """A mesh dimension is asked for by name in mesh.py only; config and planner speak of degrees, without torch.

    tools/mesh_axes.py names the groups of a mesh in reports.
    """
    if room_of(module) not in TORCH_FREE and module not in ("parallel.mesh", "tools.mesh_axes"):
        constants = [node for node in nodes(file) if isinstance(node, ast.Constant)]
        yield from (f"{node.lineno}: {node.value}" for node in constants if node.value in AXES)


AXES = {"pp", "dp_replicate", "dp_shard", "cp", "tp", "fsdp"}
LAYOUT = {"parallel", "pp", "dp_replicate", "dp_shard", "cp", "tp", "zero_stage", "sequence_parallel", "recompute"}


def conditions_on_the_layout(module: str, file: Path) -> Iterator[str]:
    """Recipes have none."""
    if module.startswith("recipes."):
        for node in nodes(file):
            if isinstance(node, ast.If | ast.IfExp | ast.While):
                words = {n.attr for n in ast.walk(node.test) if isinstance(n, ast.Attribute)}
                words |= {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
                if words & LAYOUT:
                    yield f"{node.lineno}: {ast.unparse(node.test)}"


def families_by_name(module: str, file: Path) -> Iterator[str]:
    """Code asks for a feature (`model.features.gated_ffn`), or a third family would silently be built as a second."""
    for node in nodes(file):
        if isinstance(node, ast.Compare | ast.MatchValue):
            compared = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            if compared & FAMILIES.keys():
                yield f"{node.lineno}: {ast.unparse(node)}"


OF_A_PART = re.compile(
    r"is_mtp|mtp_\w+|latent_\w+|gated_delta|delta_\w+|dense_beside|experts_beside|shared_gate|expert_biases|sinks"
    r"|attention_gate|v_norm|keys_as_values|block_scale|eh_proj"
)
"""keys of [model], and names of modules, that say which parts a block has"""
ASK_FOR_PARTS = {
    "config.schema": "the keys, and what a view has of them",
    "facts.parts": "declarations",
    "models.attention": "options of attention, in its own file",
    "models.experts": "options of experts, in their own file",
    "models.parts": "modules of parts",
    "tools.config.rare_parts": "lora.rank, another section, and blocks of multi-token prediction",
    "tools.hub.files": "whether files have these blocks, which their config.json does not say",
}


def conditions_on_a_part(module: str, file: Path) -> Iterator[str]:
    """A part is declared in `facts/parts`, and code reads its declaration: it does not ask which part it is."""
    if module.startswith(tuple(ASK_FOR_PARTS)):
        return
    for node in nodes(file):
        tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else getattr(node, "ifs", [])
        for test in [*tests, *([node] if isinstance(node, ast.Compare | ast.BoolOp) else [])]:
            words = {n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute) and ast.unparse(n.value) != "self"}
            words |= {
                n.value.strip(".") for n in ast.walk(test) if isinstance(n, ast.Constant) and type(n.value) is str
            }
            if any(OF_A_PART.fullmatch(word) for word in words):
                yield f"{node.lineno}: {ast.unparse(test)}"


SET_ON_MODULES = {
    "arriving": "an exchange of tokens that is under way",
    "recompile_limit": "of torch's compiler",
    "embed_positions": "a stage has no such end",
    "embed_tokens": "as above",
    "embeds": "as above",
    "lm_head": "as above",
    "norm": "as above",
    "grad": "of a tied embedding, or one that was deferred",
    "grad_dtype": "as above",
    "recomputes_logits": "a number of the layout",
    "weight": "a parameter, sharded",
}
"""attributes that files of torchllm/parallel set on other objects, beyond the seams, and what they are"""


def exchanges(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the attributes that a file sets on another object than itself and autograd's context, and where."""
    for node in nodes(file):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in ("self", "ctx"):
                yield target.attr, node.lineno


EXCHANGED: dict[str, set[str]] = {}
"""attribute of a seam -> the files that exchange it"""
for seam in SEAMS:
    EXCHANGED.setdefault(seam.attribute, set()).update(seam.exchanged_by)


def unlisted_exchanges(module: str, file: Path) -> Iterator[str]:
    """Seams are exchanged by the files that torchllm/models/seams.py lists, and torchllm/parallel sets nothing else."""
    for attribute, line in exchanges(file):
        if attribute in EXCHANGED and module.startswith(("models.", "parallel.", "optim.", "train.", "tools.")):
            if file.name not in EXCHANGED[attribute]:
                yield f"{line}: {attribute} is exchanged, but torchllm/models/seams.py does not say so"
        elif module.startswith("parallel.") and attribute not in SET_ON_MODULES:
            yield f"{line}: {attribute} is no seam: add it to torchllm/models/seams.py"


RULES: dict[Callable[[str, Path], Iterator[str]], tuple[str, str]] = {
    imports_from_below: ("config.other", "from torchllm.tools.planner import case"),
    tools_by_name: ("data.other", "READERS = {'text': 'torchllm.tools.prepare.readers:RawReader'}"),
    ranks_in_models: ("models.other", "import torch\ntorch.distributed.barrier()"),
    unexplained_private_names: ("train.other", "from torch._utils import other"),
    axes_spelled: ("train.other", "mesh['tp']"),
    conditions_on_the_layout: ("recipes.other", "if config.parallel.pp > 1: pass"),
    families_by_name: ("train.other", "model.family == 'gpt'"),
    conditions_on_a_part: ("parallel.other", "if name.endswith('.eh_proj') or view.dense_beside: pass"),
    unlisted_exchanges: ("parallel.other", "stage.other = 1"),
}
"""and a module with its text that breaks it"""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_file_breaks_a_rule(rule: Callable[[str, Path], Iterator[str]], tmp_path: Path) -> None:
    """What is wrong: the rule's docstring."""
    assert [f"{module}: {offence}" for module, file in MODULES.items() for offence in rule(module, file)] == []
    module, text = RULES[rule]
    (tmp_path / "other.py").write_text(text)
    assert list(rule(module, tmp_path / "other.py"))


def test_what_is_listed_is_still_so() -> None:
    for name, reasons in PRIVATE.items():
        assert {private for private, _ in privates(ROOT / name)} >= reasons.keys(), name
    used = {(attribute, file.name) for file in MODULES.values() for attribute, _ in exchanges(file)}
    assert {(seam.attribute, name) for seam in SEAMS for name in seam.exchanged_by} <= used


def test_imports_have_no_cycle() -> None:
    assert own_imports(MODULES["train.step"]) >= {"config", "models.decoder", "optim.grad_norm"}
    TopologicalSorter({module: own_imports(file) for module, file in MODULES.items()}).prepare()  # CycleError names it


def test_each_file_that_a_library_might_replace_has_its_reason() -> None:
    page = (ROOT / "docs/ours.md").read_text(encoding="utf-8")
    for room in ("launch", "prepare"):
        folder = ROOT / "torchllm/tools" / room
        for file in folder.rglob("[!_]*.py"):
            name = file.relative_to(folder).as_posix()
            assert f"`{name}`" in page or f"`{Path(name).parts[0]}/`" in page, f"{file}: add a row to docs/ours.md"


def test_config_layout_and_planner_need_no_torch() -> None:
    names = [
        f"torchllm.{module}" for module in MODULES if room_of(module) in TORCH_FREE or module in TORCH_FREE_MODULES
    ]
    assert {"torchllm.config.schema", *(f"torchllm.{module}" for module in TORCH_FREE_MODULES)} <= set(names)
    assert "torchllm.facts.flops" in names
    program = f"""
import importlib, sys
sys.modules["torch"] = None  # importing it fails
for name in {names}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_holds_its_version() -> None:
    """`import torchllm` takes no time: every other file of the package is imported by its own name."""
    docstring, typing, types, version, lazy = tree(ROOT / "torchllm/__init__.py").body
    assert isinstance(docstring, ast.Expr)
    assert ast.unparse(typing) == "from typing import TYPE_CHECKING"
    assert isinstance(types, ast.If)
    assert ast.unparse(types.test) == "TYPE_CHECKING"  # mypy and editors know torchllm.load
    assert isinstance(version, ast.Assign)
    assert ast.unparse(version.targets[0]) == "__version__"
    assert isinstance(version.value, ast.Constant)
    assert isinstance(lazy, ast.FunctionDef)
    assert lazy.name == "__getattr__"  # of torchllm.load


def path_of(module: str) -> Path:
    """The file of a module, or the folder of a room."""
    return MODULES.get(module, ROOT / "torchllm" / module.replace(".", "/"))


FOLDERS = sorted({file.parent for file in FILES} - {ROOT / "torchllm", ROOT / "torchllm/tools", ROOT / "recipes"})


def imports_beyond(folder: Path) -> set[str]:
    """The modules and rooms outside of a folder that its files import, and those of its folders."""
    imported = {other for file in FILES if file.is_relative_to(folder) for other in own_imports(file)}
    return {other for other in imported if not path_of(other).is_relative_to(folder)}


def test_the_docstring_of_a_folder_says_what_it_imports() -> None:
    """As its `Imports:` has it, so that a reader of the folder, and of a change to it, sees a new arrow."""
    assert len(FOLDERS) > 25
    for folder in FOLDERS:
        rooms = {room_of(other) for other in imports_beyond(folder)}
        listed = ", ".join(other.replace("tools.", "tools/") for other in ROOMS if other in rooms)
        docstring = ast.get_docstring(tree(folder / "__init__.py")) or ""
        assert " ".join(docstring.split()).endswith(f"Imports: {listed or 'no other folder'}."), folder
        assert docstring.partition("Imports:")[0].count(".") > 1, f"{folder}: what lives there, and what does not?"


def test_folders_have_no_circle() -> None:
    arrows: dict[str, set[str]] = {}
    for file in MODULES.values():
        folder = file.parent.relative_to(ROOT).as_posix()
        others = {path_of(other) for other in own_imports(file)}
        reached = {(path.parent if path.is_file() else path).relative_to(ROOT).as_posix() for path in others}
        arrows.setdefault(folder, set()).update(other for other in reached - {folder})
    TopologicalSorter(arrows).prepare()  # CycleError names one


REPEATED = {
    "main": "what runs when a recipe or the console command is started",
    "train": "the loop of a recipe that trains: pretrain.py and finetune.py",
}
"""public names that may be defined in several files, and why"""


def public_definitions(file: Path) -> set[str]:
    names = set()
    for node in tree(file).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            names.add(node.name)
    return names


def test_a_public_name_means_one_thing() -> None:
    """A reader who meets a class or function in a traceback finds it by its name."""
    files_of: dict[str, list[str]] = {}
    for file in FILES:
        for name in public_definitions(file):
            files_of.setdefault(name, []).append(str(file.relative_to(ROOT)))
    assert len(files_of["main"]) > 1
    repeated = {name: files for name, files in files_of.items() if len(files) > 1 and name not in REPEATED}
    assert not repeated, f"rename all but one of each: {repeated}"


def test_what_a_reader_has_to_read_does_not_grow() -> None:
    """Lower a limit with the size; raise one only with a reason."""
    minimal, pretrain = (size_of(imported_files(ROOT / "recipes" / name)) for name in ("minimal.py", "pretrain.py"))
    assert minimal.files <= 55  # one of 40 lines describes errors of the system, two register what tools read
    assert minimal.lines <= 6_671  # 19: keys that do nothing, as it is told; 291: what parts of blocks declare
    assert pretrain.files <= 118
    assert pretrain.lines <= 14_404  # 25: the same keys, shares of stages; 25: no capacities; 35: slow copies
    # with {facts,models}/frozen.py, facts/block_kinds.py and parallel/added_parameters.py,
    # which no recipe here imports, and checkpoint/read_plan.py, which loads import: bytes read once
    # 345: heads of files that few runs import; 62: norms without weights, squared ReLU; 66: a ring, gloo, flash-attn-4
    # 8: sums of checkpoints and corpora of format 2; 32: experts in chunks; 13: objects below a name
    # 57: copies that are whole, made again, and no hang; 22: room in the cache, held-out parts of documents; 37: faults
    # 25: experts that are gathered once for all chunks; 15: averages on the host; 75: copies that are slow or last, 39:
    # documents that all cores count
    assert size_of(core_files()).lines <= 24_800
    assert 5_000 < size_of(spine_files()).lines <= 6_551  # the schema says what a key needs, and what a family has


def test_low_rank_updates_are_a_use_of_trained_parameters() -> None:
    """Others ask `TrainedParameters`, which parameters are trained and which matrices have updates."""
    assert sum("lora" in file.read_text(encoding="utf-8").lower() for file in FILES) <= 10
