"""One short training for all tests of the recipes."""

from collections.abc import Iterator

import pytest

from tests.recipes.warm import trained
from tests.tiny_run import process_as_it_was

__all__ = ["trained"]


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    with process_as_it_was():
        yield
