"""Time limits of tests: generous, for a loaded machine is no failure. TEST_TIME_SCALE=3 makes all of them longer."""

import os

SCALE = float(os.environ.get("TEST_TIME_SCALE", "1"))


def patience(seconds: float) -> float:
    """Return a time limit in seconds, scaled for a slow machine."""
    return seconds * SCALE
