"""The face of the library: each name is that of its module, documented, and loaded only where it is used."""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

from tests.test_architecture import imports, tree
from tests.tiny_run import ROOT
from torchllm import recipe

pytestmark = pytest.mark.quick

TRAINING = ("pretrain", "minimal", "finetune")
RENAMED = {"AddedParameter": "PartParameter"}
"""names of before that stay for one version"""


def test_every_name_is_that_of_its_module() -> None:
    assert 30 <= len(recipe.__all__) <= 62
    for name, module in recipe.HOMES.items():
        value = getattr(recipe, name)
        assert value is getattr(import_module(module), name)
        if name in RENAMED:
            assert value is getattr(recipe, RENAMED[name])
        else:
            assert getattr(value, "__module__", module) == module  # defined there, not imported
    with pytest.raises(AttributeError, match=r"module 'torchllm.recipe' has no attribute 'build_modle'"):
        recipe.build_modle  # noqa: B018  # reading it is the test


def test_type_checkers_see_every_name() -> None:
    for node in recipe._IMPORTS:
        assert all(alias.name == alias.asname for alias in node.names)  # or it is not exported


def test_every_name_is_documented() -> None:
    documented = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.M)
    assert sorted(documented) == sorted(f"{module}.{name}" for name, module in recipe.HOMES.items())


@pytest.mark.parametrize("name", TRAINING)
def test_a_recipe_that_trains_imports_nothing_else_of_the_library(name: str) -> None:
    modules = {dotted.rpartition(".")[0] for dotted in imports(ROOT / f"recipes/{name}.py")}
    assert {module for module in modules if module.startswith("torchllm")} == {"torchllm.recipe"}


def calls_of_old_recipes() -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of names of the face in the recipes of the last contract."""
    for file in (ROOT / "tests/forks").rglob("*.py"):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in recipe.HOMES:
                yield node.func.id, node


MADE_BY_KEYWORD = ("Config", "DataRanks", "Runtime", "TrainLoader")
"""classes that a recipe does not make, or by keyword"""


def test_calls_of_old_recipes_still_fit_and_new_parameters_are_keyword_only() -> None:
    most = dict.fromkeys(recipe.__all__, 4) | {"IterableLoader": 5}
    """positional arguments, by name"""
    for name, call in calls_of_old_recipes():
        signature = inspect.signature(getattr(recipe, name))
        given = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        signature.bind(*(None for _ in call.args), **given)  # TypeError if it does not fit
        most[name] = max(most[name], len(call.args))
    assert most["parallelize"] == 8
    for name in set(recipe.__all__) - {*MADE_BY_KEYWORD, "IGNORED", "KEYS_OF_ATTENTION", "UserError"}:
        parameters = inspect.signature(getattr(recipe, name)).parameters.values()
        positional = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        assert len(positional) <= most[name], f"{name}: a new parameter is keyword-only"
