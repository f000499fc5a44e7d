"""Calls functions in separate processes. A killed one is noticed: `multiprocessing.Pool` would wait forever."""

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

from torchllm.config.errors import UserError


def in_processes(
    context: BaseContext, function: Callable[..., Any], arguments: Sequence[Any], at_once: int
) -> Iterator[Any]:
    """Call `function` with each argument in a new process, and yield (index of the argument, result) as they end.

    at_once: processes that run at the same time. Raises the exception of a call, and UserError if a process was killed,
    as by the system when memory is short.
    """
    left = deque(enumerate(arguments))
    running: dict[Connection, tuple[int, Any]] = {}
    try:
        while left or running:
            while left and len(running) < at_once:
                index, argument = left.popleft()
                receiver, sender = context.Pipe(duplex=False)
                call = sender, function, argument
                process = context.Process(target=_call, args=call)  # type: ignore[attr-defined]  # subclasses have it
                process.start()
                sender.close()  # so that the receiver ends when the process does
                running[receiver] = index, process
            ready = wait(list(running))
            for receiver in [receiver for receiver in running if receiver in ready]:
                index, process = running.pop(receiver)
                try:
                    result, error = receiver.recv()
                except EOFError:
                    process.join()
                    raise UserError(
                        f"a process of the dry run was killed (exit status {process.exitcode}): if memory was short, "
                        "run it where there is more, or with fewer cores at once (taskset)"
                    ) from None
                process.join()
                if error is not None:
                    raise error
                yield index, result
    finally:
        for _, process in running.values():
            process.terminate()


def _call(sender: Connection, function: Callable[..., Any], argument: Any) -> None:
    """Send the result of a call, or its exception with the traceback as a note."""
    try:
        sender.send((function(argument), None))
    except Exception as error:
        text = traceback.format_exc()
        error.add_note(text)
        try:
            sender.send((None, error))
        except Exception:  # not every exception can be pickled
            sender.send((None, RuntimeError(text)))
