"""A run that takes seconds: train_configs/debug.toml with a smaller model and few steps, for tests from end to end."""

import gc
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEBUG = "train_configs/debug.toml"
STEPS = 8
SMALL = [
    "--run.device=cpu",
    "--model.hidden=32",
    "--model.ffn=64",
    f"--training.steps={STEPS}",
    "--training.sequence_length=32",
    "--schedule.warmup_steps=2",
    "--metrics.log_interval=1",
    "--checkpoint.interval=4",
    "--evaluate.interval=4",
    "--evaluate.sequences=10",
    "--generate.tokens=20",
]


@contextmanager
def process_as_it_was() -> Iterator[None]:
    """Undoes what a recipe does to its process: signal handlers, logging, the hook for errors, garbage collection."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    hook, logs, level = sys.excepthook, logging.root.handlers[:], logging.root.level
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.excepthook, logging.root.handlers = hook, logs
        logging.root.setLevel(level)
        gc.enable()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run folder's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[tuple[Any, ...]]:
    """(step, loss, gradient norm, learning rate, tokens, validation loss or 0) of every logged step: what training
    decides, without what the machine does."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens")
    logged = [record for record in metrics(folder) if "loss" in record]  # not those of profiled steps
    return [(*(record[key] for key in keys), record.get("validation_loss", 0.0)) for record in logged]


def tensor_files(folder: Path, step: int) -> dict[str, Any]:
    """Size and sha256 of the files with a checkpoint's tensors (weights, optimizer, random generators)."""
    files = json.loads((folder / f"checkpoints/step-{step:08d}/manifest.json").read_text())["files"]
    tensors = {name: record for name, record in files.items() if name.endswith(".distcp")}
    assert tensors
    return tensors
