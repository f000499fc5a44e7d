"""The counts of costs besides the step, and that none of them grows faster than it may."""

from tests.growth.growth import TABLES, fitted_exponent


def test_no_count_grows_faster_than_it_may() -> None:
    wrong = {}
    for count in (count for table in TABLES for count in table.rows):
        counts = {size: count.measure(size) for size in count.small}
        if fitted_exponent(counts) > count.limit + 0.01 or min(counts.values()) <= 0:
            wrong[count.work, count.unit] = counts
        assert (count.measure.__doc__ or "").startswith("Count ")
    assert not wrong
