"""One short training for all tests of the recipes."""

from collections.abc import Iterator

import pytest

from tests.recipes.warm import trained
from tests.tiny_run import process_as_it_was
from torchllm.config import applied_keys

__all__ = ["trained"]


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(applied_keys, "_training", applied_keys._Training())  # a process trains once, this one often
    with process_as_it_was():
        yield
