"""A run that takes seconds: train_configs/debug.toml with a smaller model and few steps, for tests from end to end."""

import gc
import hashlib
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch

from torchllm.checkpoint.index import Region
from torchllm.checkpoint.state import Part, TensorSharding
from torchllm.checkpoint.tensors import load_tensors, open_checkpoint
from torchllm.tools.launch.lease import release_leases
from torchllm.tools.launch.stop_requests import STOP_SIGNALS

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
QUIET = ["--metrics.tensorboard=false", "--generate.after_training=false", "--data.workers=0"]


def changed(settings: Sequence[str], *changes: str) -> list[str]:
    """Return the last setting of each key."""
    by_key = {word.partition("=")[0]: word for word in (*settings, *changes)}
    return list(by_key.values())


ENDLESS = changed(SMALL, *QUIET, "--training.steps=100000", "--evaluate.interval=0")
"""a run that is stopped or killed"""


@contextmanager
def process_as_it_was() -> Iterator[None]:
    """Undoes what a recipe does to its process: signal handlers, logging, the hook for errors, garbage collection, and
    the lease of a run folder that a failed run still holds."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    frozen = gc.get_freeze_count()
    hook, logs, level = sys.excepthook, logging.root.handlers[:], logging.root.level
    try:
        yield
    finally:
        release_leases()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.excepthook, logging.root.handlers = hook, logs
        logging.root.setLevel(level)
        logging.captureWarnings(False)
        gc.enable()
        if gc.get_freeze_count() > frozen:  # a run's model among what is frozen
            gc.unfreeze()
            gc.collect()
            gc.freeze()


def free_port() -> int:
    """Return a port that nobody listens at.

    It lies below those that Linux gives to whoever asks for any: no other test is given it before it is used.
    """
    while True:
        port = SystemRandom().randrange(20_000, 32_000)  # a test's seed must not make it the same for all
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
        return port


def metrics(folder: Path) -> list[dict[str, Any]]:
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


def assert_same_run(folder: Path, undisturbed: Path, steps: int = STEPS) -> None:
    """Check the losses of all steps and the tensors of the last checkpoint, bitwise."""
    assert curve(folder) == curve(undisturbed)
    assert tensor_files(folder, steps) == tensor_files(undisturbed, steps)


def assert_same_losses(folder: Path, undisturbed: Path) -> None:
    """Check losses that other numbers of ranks have summed, in another order, and the rest of the curve bitwise."""
    for step, expected in zip(curve(folder), curve(undisturbed), strict=True):
        assert abs(step[1] - expected[1]) < 1e-6
        assert abs(step[5] - expected[5]) < 1e-6
        assert step[3:5] == expected[3:5]  # rate and tokens


def tensor_digests(folder: Path, step: int) -> dict[str, str]:
    """The sha256 of every whole tensor of a checkpoint by key; of random generators, by key and rank."""
    stored = open_checkpoint(None, folder / f"checkpoints/step-{step:08d}")
    parts = {}
    for key, entry in stored.index.tensors.items():
        shape = entry.grid.shape
        whole = Region((0,) * len(shape), shape)
        parts[key] = Part(torch.empty(shape, dtype=getattr(torch, entry.dtype)), whole, TensorSharding(shape, None, ()))
    load_tensors(None, stored, parts)
    digests = {}
    for key, part in parts.items():
        if key.startswith("rng."):
            for rank, state in enumerate(part.local):
                digests[f"{key}.{rank}"] = hashlib.sha256(state.numpy().tobytes()).hexdigest()
        else:
            digests[key] = hashlib.sha256(part.local.numpy().tobytes()).hexdigest()
    return digests
