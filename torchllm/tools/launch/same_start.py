"""Refuse a job whose nodes differ in their config, torchllm or torch.

Nothing else would tell: a job whose second node has another learning rate trains to its end, and its weights are those
of neither.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchllm import __version__
from torchllm.config import Config
from torchllm.config.errors import RefusedStart
from torchllm.config.toml import toml_value
from torchllm.runtime.process import gather_texts, same_on_all_ranks
from torchllm.tools.config.by_key import values_by_key

SHOWN = 20
"""differences that the error lists at most"""
PACKAGE = Path(__file__).parents[2]


def refuse_different_starts(configs: Sequence[Config], group: dist.ProcessGroup) -> None:
    """Raise RefusedStart on every rank if configs, code or torch of one differ from rank 0's.

    The error names each key that differs, with both values. All ranks must call it; if they agree they exchange
    32 bytes, whatever their number.
    """
    facts = facts_of_start(configs)
    if same_on_all_ranks(json.dumps(facts), group):
        return
    of_rank_0: list[Any] = [facts]
    dist.broadcast_object_list(of_rank_0, group_src=0, group=group)
    differences = json.dumps(compare_starts(of_rank_0[0], facts))
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(gather_texts(differences, group)):
        if text and json.loads(text):
            ranks_of.setdefault(text, []).append(rank)
    lines = []
    for text, ranks in ranks_of.items():
        differing = f"rank {ranks[0]}" if len(ranks) == 1 else f"rank {ranks[0]} and {len(ranks) - 1} more"
        lines += [f"{difference} on {differing}" for difference in json.loads(text)]
    if len(lines) > SHOWN:
        lines[SHOWN:] = ["..."]
    listed = "\n  ".join(lines)
    raise RefusedStart(
        f"the ranks did not start the same job: start every node with the same config, code and torch\n  {listed}"
    )


def facts_of_start(configs: Sequence[Config]) -> dict[str, str]:
    """Return the facts that must agree on all ranks, by name: each key of the configs as TOML, and the versions."""
    facts = {}
    for number, config in enumerate(configs):
        prefix = f"layout {number + 1}: " if number else ""  # of those that parallel.layout = "tune" measures
        for key, value in values_by_key(asdict(config)).items():
            facts[prefix + key] = toml_value(value)
    facts["torchllm"] = f"{__version__} ({hash_of_code()})"
    facts["torch"] = str(torch.__version__)
    return facts


def hash_of_code() -> str:
    """Return a hash of torchllm's own files and of the recipe that runs: a version may have been edited."""
    digest = hashlib.sha256()
    recipe = Path(sys.argv[0])
    for file in [*sorted(PACKAGE.rglob("*.py")), recipe]:
        if file.is_file():
            name = file.relative_to(PACKAGE).as_posix() if file.is_relative_to(PACKAGE) else file.name
            digest.update(f"{name} {file.stat().st_size}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def compare_starts(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return a line for each fact that differs; `first`: of rank 0."""
    differences = []
    for name in {**first, **second}:
        on_first, here = first.get(name, "missing"), second.get(name, "missing")
        if on_first != here:
            differences.append(f"{name}: {on_first} on rank 0, {here}")
    return differences
