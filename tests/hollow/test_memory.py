"""The dry run's peak against the true one: torch's allocator, on steps of whole models."""

import pytest

from tests.hollow.memory import WITHIN, Choice, rows, sample

pytestmark = [pytest.mark.hollow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("choice", sample(), ids=lambda choice: ", ".join(choice))
def test_the_dry_run_predicts_the_peak_of_a_real_step(choice: Choice) -> None:
    for row in rows(choice):
        assert abs(row.difference) <= WITHIN, row
