"""Calls in processes of their own."""

import multiprocessing
import os
import signal

import pytest

from torchllm.config.errors import UserError
from torchllm.tools.dry_run.apart import in_processes


def square(number: int) -> int:
    if number == 3:
        raise KeyError("three")
    if number == 8:
        raise ValueError(lambda: "not to be pickled")
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_results_errors_and_killed_processes_arrive() -> None:
    context = multiprocessing.get_context("fork")
    assert dict(in_processes(context, square, [7, 1, 2, 5, 6], at_once=2)) == {0: 49, 1: 1, 2: 4, 3: 25, 4: 36}
    with pytest.raises(KeyError, match="three") as error:
        list(in_processes(context, square, [1, 3], at_once=2))
    assert "in square" in error.value.__notes__[0]
    with pytest.raises(RuntimeError, match="ValueError: <function"):
        list(in_processes(context, square, [8], at_once=1))
    with pytest.raises(UserError, match=r"was killed \(exit status -9\): if memory was short"):
        list(in_processes(context, square, [1, 4, 2], at_once=1))
