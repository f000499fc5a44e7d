"""Which faults `pytest` tries: a sample of a few minutes. `--trials=2` or more tries every one."""

import pytest


def skip_unless_sampled(trials: int, is_sampled: bool = False) -> None:
    """Skip a case that is not in the sample, where each fault is tried once."""
    if trials == 1 and not is_sampled:
        pytest.skip("not in the sample of `pytest`; --trials=2 tries it")
