"""Compares a step of torchllm with one of torchtitan 0.3.0 on the hollow GPU: memory, and launches.

    PYTHONPATH=FOLDER_OF_TORCHTITAN python -m tests.hollow.compare

Llama 3 8B, one rank of 8, micro batches of 8,192 tokens in bfloat16, no chunks of the loss, expandable segments,
FlexAttention with documents in both, and without CUDA graphs. Prints a table in Markdown; without torchtitan
(`pip install torchtitan==0.3.0`) only this library's half of it. Exit status 1 where a
goal of `GOALS` is missed.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tests.hollow.bed import ROOT, Machine, environment
from tests.hollow.launches import Report, measure
from tests.hollow.layouts import Arguments, Settings, as_arguments

CONFIG = "train_configs/llama3_8b_8gpu.toml"
SETTINGS: Settings = {
    "model.vocab": 128256,
    "model.attention": "flex",
    "data.document_mask": True,  # torchtitan always masks
    "training.loss_chunk": 0,
    "parallel.keep_last_block": False,  # torchtitan gathers it again, too
}
VARIABLES = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
MACHINE = Machine(gib=160)  # eager steps without recomputation need more than 80 GiB with what the allocator keeps


class Case(NamedTuple):
    """One row: the same layout in both."""

    name: str
    compiled: bool
    recompute: str
    dp_replicate: int = 1
    dp_shard: int = 8
    tp: int = 1
    batch: int = 8
    """sequences of the whole step"""

    def arguments(self) -> Arguments:
        """Return the row's command line, of either."""
        keys = {
            "training.global_batch_size": self.batch,
            "recompute.mode": self.recompute,
            "compile.block": self.compiled,
            "compile.loss": self.compiled,
            "parallel.dp_replicate": self.dp_replicate,
            "parallel.dp_shard": self.dp_shard,
            "parallel.tp": self.tp,
            "parallel.sequence_parallel": self.tp > 1,
        }
        return as_arguments(CONFIG, SETTINGS, keys)


CASES = (
    Case("FSDP 8", True, "none"),
    Case("FSDP 8, eager", False, "none"),
    Case("FSDP 8, full", True, "full"),
    Case("HSDP 2 x 4", True, "none", dp_replicate=2, dp_shard=4),
    Case("tp 2 x FSDP 4", True, "none", dp_shard=4, tp=2, batch=4),
    Case("FSDP 8, selective", True, "selective_half"),
)


class Goal(NamedTuple):
    """How many times torchtitan's figure this library's may be."""

    launches: float
    live: float = 1.0


GOALS = {True: Goal(launches=1.00), False: Goal(launches=1.10)}
"""of compiled steps, and of eager ones"""


def measure_titan(case: Case) -> Report:
    """Return the report of torchtitan's step. CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as messages:
        variables = {**environment(MACHINE, Path(messages)), **VARIABLES}
        variables["PYTHONPATH"] += f":{ROOT / 'recipes'}"  # evidence/benchmark/titan.py imports from recipes/benchmark
        done = subprocess.run(
            [sys.executable, "-m", "tests.hollow.titan_rank", *case.arguments()],
            env=variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def missed(case: Case, ours: Report, titan: Report) -> Iterator[str]:
    """Yield the goals that a row misses, with the figures."""
    goal = GOALS[case.compiled]
    launches = ours["launches"] / titan["launches"]
    live = ours["live"] / titan["live"]
    if launches > goal.launches:
        yield f"{case.name}: launches are {launches:.2f} times torchtitan's, goal {goal.launches:.2f}"
    if round(live, 3) > goal.live:
        yield f"{case.name}: live memory is {live:.3f} times torchtitan's, goal {goal.live:.2f}"


def main() -> int:
    has_titan = find_spec("torchtitan") is not None
    print("| layout | live / reserved GiB: torchtitan | here | launches per step: torchtitan | here |")
    print("|---|--:|--:|--:|--:|", flush=True)
    problems = []
    for case in CASES:
        [ours] = measure({case.name: case.arguments()}, MACHINE, **VARIABLES).values()
        if "error" in ours:
            raise RuntimeError(ours["error"])
        cells = ["", ""]
        if has_titan:
            titan = measure_titan(case)
            cells = [f"{titan['live']:.1f} / {titan['reserved']:.1f}", f"{titan['launches']:,}"]
            problems += missed(case, ours, titan)
        memory, launches = f"{ours['live']:.1f} / {ours['reserved']:.1f}", f"{ours['launches']:,}"
        print(f"| {case.name} | {cells[0]} | {memory} | {cells[1]} | {launches} |", flush=True)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
