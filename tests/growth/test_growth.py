"""The counts of costs besides the step, and that none of them grows faster than it may."""

import math

import pytest
import torch

from tests.growth.counting import host_bytes, lines_run, peak_bytes
from tests.growth.growth import TABLES, fitted_exponent


def test_no_count_grows_faster_than_it_may() -> None:
    wrong = {}
    for count in (count for table in TABLES for count in table.rows):
        counts = {size: count.measure(size) for size in count.small}
        if fitted_exponent(counts) > count.limit + 0.01 or min(counts.values()) <= 0:
            wrong[count.work, count.unit] = counts
        assert (count.measure.__doc__ or "").startswith("Count ")
    assert not wrong


def test_the_exponent_is_that_of_the_power() -> None:
    assert fitted_exponent({size: 3 * size**1.5 for size in (64, 1024, 16384)}) == pytest.approx(1.5)
    assert fitted_exponent({64: 7, 1024: 7}) == 0
    assert fitted_exponent({64: 0, 1024: 0}) == 0


def test_lines_of_python_are_counted_in_loops_and_calls() -> None:
    def work(count: int) -> None:
        for _ in range(count):
            math.sqrt(2.0)

    assert lines_run(lambda: work(1000)) - lines_run(lambda: work(500)) == 1000  # the head of the loop and its body


def test_the_peaks_of_memory_are_counted() -> None:
    def work() -> None:
        torch.ones(1000, 1000).sum()  # freed before the next line
        torch.ones(500, 1000).sum()

    assert 4_000_000 <= peak_bytes(work) < 4_010_000
    assert 8_000_000 <= host_bytes(lambda: [None] * 1_000_000) < 8_010_000
