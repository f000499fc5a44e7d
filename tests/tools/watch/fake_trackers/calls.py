"""Write down what a tracker's library is called with; fail or block where the environment says so."""

import json
import os
import time
from typing import Any


def call(name: str, *arguments: Any) -> None:
    """Append a call to the file FAKE_CALLS."""
    with open(os.environ["FAKE_CALLS"], "a") as file:
        file.write(json.dumps([name, *arguments], default=str) + "\n")


def log(step: int, values: dict[str, float]) -> None:
    """Take the values of a step. At step FAKE_FAILS it raises, at step FAKE_BLOCKS it does not return."""
    if os.environ.get("FAKE_FAILS") == str(step):
        raise RuntimeError("the tracker has failed")
    while os.environ.get("FAKE_BLOCKS") == str(step):
        time.sleep(1)
    call("log", step, values)
