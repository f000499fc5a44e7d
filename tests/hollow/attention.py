"""Asks torch, on each architecture of the hollow GPU, which kernel its attention takes, for the table of the docs.

    python -m tests.hollow.attention             print the table
    python -m tests.hollow.attention --write     write it into docs/hollow_gpu.md

Nothing runs: torch chooses by shapes and types. cuDNN's kernel can be chosen too, though it cannot run here.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from tests.faults.run import write_table
from tests.hollow.bed import ARCHITECTURES, ROOT, Machine, environment

PAGE = ROOT / "docs" / "hollow_gpu.md"
BEGIN, END = "<!-- attention -->\n", "<!-- /attention -->\n"


class Case(NamedTuple):
    """What decides which kernel torch takes, beside the GPU."""

    documents: bool
    """whether a token sees its own document only"""
    grouped: bool
    """whether several query heads share a key-value head"""
    dtype: str
    deterministic: bool
    """`run.deterministic`"""


def cases() -> list[Case]:
    return [Case(*values) for values in product((False, True), (False, True), ("bfloat16", "float32"), (False, True))]


def choose(case: Case) -> str:
    """Return the kernel for the heads of Llama 3 8B. For a process on the hollow GPU."""
    from dataclasses import replace

    import torch

    from torchllm.config import Model, Parallel
    from torchllm.tools.watch.chosen_kernel import attention_kernel

    model = replace(Model(), heads=32, kv_heads=8 if case.grouped else 32, hidden=4096)
    torch.use_deterministic_algorithms(case.deterministic)
    dtype = getattr(torch, case.dtype)
    return attention_kernel(model, Parallel(), 8192, case.documents, dtype, torch.device("cuda", 0))


def choices(architecture: str) -> list[str]:
    """Return the kernels of `cases()` on an architecture."""
    machine = Machine(architecture)
    with tempfile.TemporaryDirectory() as messages:
        variables = {**environment(machine, Path(messages)), "TORCH_CUDNN_SDPA_DEPRIORITIZED": "0"}
        command = [sys.executable, "-m", "tests.hollow.attention", "--here"]
        done = subprocess.run(command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def table() -> str:
    lines = [
        f"| documents | heads | dtype | deterministic | {' | '.join(ARCHITECTURES)} |",
        f"|{'---|' * (4 + len(ARCHITECTURES))}",
    ]
    columns = [choices(architecture) for architecture in ARCHITECTURES]
    for case, kernels in zip(cases(), zip(*columns, strict=True), strict=True):
        words = (
            "yes" if case.documents else "no",
            "grouped" if case.grouped else "ungrouped",
            case.dtype,
            "yes" if case.deterministic else "no",
        )
        lines.append(f"| {' | '.join((*words, *kernels))} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Print the table, or the choices of this process."""
    if "--here" in arguments:
        print(json.dumps([choose(case) for case in cases()]))
        return
    made = table()
    print(made)
    if "--write" in arguments:
        write_table(PAGE, made, BEGIN, END)


if __name__ == "__main__":
    main(sys.argv[1:])
