"""Import the fork that RECIPE names: its `train`, its config, its kinds of blocks and its mixers."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from torchllm.config import Config, Model
from torchllm.config.errors import UserError
from torchllm.facts.block_kinds import block_kind, is_registered
from torchllm.facts.parts.registry import mixer, problem_of_mixer

if TYPE_CHECKING:
    from torchllm.tools.proof.record import RecipeTrain

C = TypeVar("C", bound=Config)

MODULE = "recipe_under_proof"
"""name under which the file of the recipe is imported, on all ranks"""


class ImportedRecipe(NamedTuple):
    """The parts of a recipe that can be proven."""

    train: "RecipeTrain"
    schema: type[Any]
    """Config, or the fork's subclass of it with its own sections"""


def import_recipe(file: Path) -> ImportedRecipe:
    """Import the file of a recipe; modules in its folder can be imported by it.

    UserError if it does not exist or has no `train(config, runtime, monitor)`.
    """
    module = import_fork(file)
    train = getattr(module, "train", None)
    if not callable(train):
        raise UserError(
            f"RECIPE={file}: has no train(config, runtime, monitor), which a copy of recipes/pretrain.py has"
        )
    return ImportedRecipe(train, find_schema(file, vars(module)))


def import_fork(file: Path) -> ModuleType:
    """Import a file; modules in its folder can be imported by it. UserError if it is not a Python file."""
    if not file.is_file():
        raise UserError(f"RECIPE={file}: there is no such file")
    module = sys.modules.get(MODULE)
    if module is None or module.__file__ != str(file):
        specification = importlib.util.spec_from_file_location(MODULE, file)
        if specification is None or specification.loader is None:
            raise UserError(f"RECIPE={file}: is no Python file")
        module = importlib.util.module_from_spec(specification)
        sys.modules[MODULE] = module
        sys.path.insert(0, str(file.parent))
        specification.loader.exec_module(module)
    return module


def schema_of_fork(schema: type[C], environment: Mapping[str, str] = os.environ) -> type[C]:
    """Return a config with the sections of the fork that RECIPE names, too; the same one without RECIPE.

    UserError if RECIPE names no recipe.
    """
    if not environment.get("RECIPE"):
        return schema
    file = Path(environment["RECIPE"]).resolve()
    of_fork = find_schema(file, vars(import_fork(file)))
    if issubclass(schema, of_fork):
        return schema
    bases = (of_fork,) if issubclass(of_fork, schema) else (schema, of_fork)
    return cast(type[C], make_dataclass(of_fork.__name__, [], bases=bases, frozen=True))


def lines_on_fork(schema: type[Any], table: Mapping[str, Any]) -> list[str]:
    """Return a line on RECIPE if it names none, and a config's table has sections or keys that only a fork may have."""
    unknown = [name for name in table if name not in schema.__dataclass_fields__]
    if not unknown or os.environ.get("RECIPE"):
        return []
    return [f"{', '.join(unknown)}: if a fork has it, set RECIPE to the fork's file"]


def import_parts(model: Model) -> None:
    """Import the recipe that RECIPE names if a block or a mixer is of a fork that this process has not imported."""
    file = os.environ.get("RECIPE")
    if file and (not is_registered(model) or any(map(problem_of_mixer, model.views))):
        import_fork(Path(file).resolve())


def find_parts(model: Model) -> None:
    """Call `import_parts`. UserError if `model.block` or a mixer is not registered afterwards."""
    import_parts(model)
    block_kind(model)
    for view in model.views:
        mixer(view)


def find_schema(file: Path, names: dict[str, Any]) -> type[Any]:
    """Return the class of a recipe's config: the most derived of its subclasses of Config, else Config.

    UserError if two subclasses have no common one.
    """
    schemas = {value for value in names.values() if isinstance(value, type) and issubclass(value, Config)}
    if not schemas:
        return Config
    derived = []
    for schema in schemas:
        if not any(other is not schema and issubclass(other, schema) for other in schemas):
            derived.append(schema)
    if len(derived) > 1:
        listed = " and ".join(sorted(schema.__name__ for schema in derived))
        raise UserError(f"RECIPE={file}: which config does it read? {listed} are both subclasses of Config")
    return derived[0]
