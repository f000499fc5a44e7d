"""Recognize the folders of torchllm's own output: a source that holds them is not trained on them."""

import os
import re
from collections.abc import Collection

RUN_PARTS = {
    *("checkpoints", "config.toml", "evaluations", "experts.jsonl", "goodput.json", "hang", "lease", "metrics.jsonl"),
    *("profile", "report.html", "stop", "stopped.json", "tensorboard", "trackers"),
}
"""files and folders in a run folder"""
_TAKEN = re.compile(r"\d{6}")
"""name of a file in the lease of a run"""
_OUTPUTS = {
    "a checkpoint": re.compile(r".*\.distcp"),
    "tokens": re.compile(r"shards\.bin|\d{5}\.(train|validation)\.bin"),
    "a cache": re.compile(r"[a-z]+-[0-9a-f]{16}(\.json)?|[0-9a-f]{16}-[0-9a-f]{8}|\S+--\S+@\S+"),
    "a model": re.compile(r".*\.safetensors"),
}
"""kind of output -> name of a file or folder in it"""


def output_in(folder: str, names: Collection[str]) -> str:
    """Return the kind of output in a folder with these files and folders, such as "a run"; "" if there is none."""
    if is_run(folder, names):
        return "a run"
    return next((kind for kind, name in _OUTPUTS.items() if any(map(name.fullmatch, names))), "")


def is_run(folder: str, names: Collection[str]) -> bool:
    """Return whether a folder with these files and folders is a run folder; a run that starts has but its lease."""
    if {"config.toml", "metrics.jsonl"} <= set(names):
        return True
    lease = os.path.join(folder, "lease")
    return "lease" in names and os.path.isdir(lease) and any(map(_TAKEN.fullmatch, os.listdir(lease)))
