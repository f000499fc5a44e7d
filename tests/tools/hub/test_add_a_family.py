"""The family of docs/add_a_family.md, which the library does not have: the page's code passes the tests of a family."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.test_docs import ROOT
from tests.tools.hub import published, test_config_json, test_import
from torchllm.tools.hub import config_json
from torchllm.tools.hub.families.family import HubFamily
from torchllm.tools.hub.families.registry import HUB_FAMILIES

CODE, ROW = re.findall(r"```python\n(.*?)```", (ROOT / "docs/add_a_family.md").read_text(), re.S)
NAME = "flex-olmo"


@pytest.fixture
def family() -> Iterator[HubFamily]:
    """The page's family, alone in the tables that the tests go through."""
    namespace: dict[str, Any] = {}
    exec(compile(CODE, "docs/add_a_family.md", "exec"), namespace)
    row = eval(ROW, vars(published))
    family = namespace["FLEX_OLMO"]
    assert family.model_type not in HUB_FAMILIES
    families = {family.model_type: family}
    config_json.fields_of_families.cache_clear()
    with mock.patch.dict(HUB_FAMILIES, families, clear=True), mock.patch.dict(published.CONFIGS, row, clear=True):
        yield family
    config_json.fields_of_families.cache_clear()


OF_A_FAMILY: list[Callable[[], None]] = [
    test_config_json.test_a_missing_field_is_the_default_of_its_class,
    test_config_json.test_each_field_may_be_missing,
    test_config_json.test_what_is_written_is_read_alike_by_transformers_and_here,
    test_config_json.test_each_field_that_transformers_reads_is_known_or_refused,
]


def test_the_family_of_the_page_passes_the_tests_of_a_family(family: HubFamily, tmp_path: Path) -> None:
    for test in OF_A_FAMILY:
        test()
    test_config_json.test_the_table_names_every_tensor_of_transformers_model_with_its_shape(tmp_path)
    test_import.test_logits_are_those_of_transformers([(NAME, ""), (NAME, "stacked")], tmp_path)


def test_another_score_of_its_experts_would_be_seen(family: HubFamily, tmp_path: Path) -> None:
    sigmoid = mock.patch.dict(family.features, {"router_score": "sigmoid"})
    with sigmoid, pytest.raises(AssertionError, match=NAME):
        test_import.test_logits_are_those_of_transformers([(NAME, "")], tmp_path)
