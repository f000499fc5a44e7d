"""Measure a start to the end of step 1: run_train.sh against a bare loop, in CPU seconds of all processes.

    python -m tests.start_costs [ROUNDS]

The sides take turns. The bare loop has a model and a batch of the same size as train_configs/debug.toml: blocks with
SDPA, SwiGLU and RMSNorm, fused AdamW; on two ranks FSDP2 under torchrun.
"""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from tests.launched import SCRIPT, clean
from tests.tiny_run import ROOT

HIDDEN, HEADS, FFN, BLOCKS, VOCABULARY, SEQUENCES, TOKENS = 160, 8, 432, 4, 264, 16, 128
BARE = [sys.executable, "-m", "tests.start_costs", "bare"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
OURS = [SCRIPT, "--training.steps=1", "--evaluate.interval=0", "--generate.after_training=false"]


class Block(nn.Module):
    """A block of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the shape of `x`: (sequences, tokens, hidden)."""
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def bare() -> None:
    """Take one step, as a rank of torchrun or alone."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    blocks = [Block() for _ in range(BLOCKS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), *blocks, nn.Linear(HIDDEN, VOCABULARY, bias=False))
    if ranks > 1:
        init_process_group("gloo")
        for module in (*blocks, model):
            fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    micro_batches = torch.randint(VOCABULARY, (SEQUENCES // ranks // 2, 2, TOKENS + 1))
    for batch in micro_batches:
        logits = model(batch[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()
    if ranks > 1:
        destroy_process_group()


def seconds(command: Sequence[str], **environment: str) -> float:
    """Return the CPU time of a command and of all processes that it starts, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    variables = clean({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment})
    subprocess.run(command, cwd=ROOT, env=variables, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(rounds: int) -> None:
    """Print the minimum, median and maximum of each side and of the ratios, for one rank and for two."""
    for ranks, command in ((1, BARE), (2, [*TORCHRUN, *BARE[2:]])):
        with tempfile.TemporaryDirectory() as folder:
            ours = [*OURS, f"--data.cache={folder}/cache"]
            seconds([*ours, f"--run.folder={folder}/warm"], NPROC=str(ranks))
            pairs = []
            for number in range(rounds):
                run = Path(folder, f"run-{number}")
                pairs.append((seconds([*ours, f"--run.folder={run}"], NPROC=str(ranks)), seconds(command)))
        ratios = [start / other for start, other in pairs]
        for name, values in zip(("run_train.sh", "bare", "ratio"), (*zip(*pairs, strict=True), ratios), strict=True):
            shown = " / ".join(f"{value:.2f}" for value in (min(values), median(values), max(values)))
            print(f"{ranks} rank{'s' if ranks > 1 else ''}: {name} {shown}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["bare"]:
        bare()
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 5)
