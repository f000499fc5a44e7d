"""The files of the library that a call enters: what a reader opens to follow it. docs/code_map.md lists five walks.

python -m tests.walks [CONFIG.toml] [--section.key=value ...]      prints those of a run's own check, in their order
"""

import contextlib
import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
LIBRARY = f"{ROOT}/torchllm/"


def files_entered(call: Callable[[], Any]) -> list[str]:
    """Return the files of the library with a function that a call enters, in all threads that it starts.

    What an import runs, and what prints the lines of the log, is no part of a walk.
    """
    entered: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(LIBRARY) and file not in entered and not _is_imported(frame):
            entered[file] = None

    logging.disable()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        logging.disable(logging.NOTSET)
    return [file.removeprefix(LIBRARY) for file in entered]


def _is_imported(frame: FrameType | None) -> bool:
    """Return whether a frame runs while a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def walk_of_the_map(name: str) -> list[str]:
    """Return the files of torchllm that docs/code_map.md lists in a walk, "a save"; an error if there is none."""
    text = (ROOT / "docs/code_map.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^\| {name}\b.*", text, re.M)
    return [file for file in re.findall(r"`([\w/]+\.py)`", line) if not file.startswith("recipes/")]


def files_of_a_check(arguments: list[str]) -> list[str]:
    """Return the files of `load_configs(ARGUMENTS --check)`, in a process that has not called it."""
    from torchllm.tools.front.start import load_configs

    def call() -> None:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            load_configs([*arguments, "--check"])

    return files_entered(call)


if __name__ == "__main__":
    os.environ.setdefault("NPROC", "2")
    print("\n".join(files_of_a_check(sys.argv[1:])))
