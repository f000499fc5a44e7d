"""The modules that a rank imports up to the end of its first step: each costs a part of every start, on every rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

from torchllm.config.environment import HANDED
from torchllm.data.loader import DataRanks, build_loader
from torchllm.tools.config.load import load_config
from torchllm.tools.config.refuse import hand_over

ROOT = Path(__file__).parents[1]
MOST = 167
"""modules over `BASE`; lower it with their number, raise it only with a reason"""
UNUSED = (
    *("torch.distributed.checkpoint", "torch.distributed.pipelining", "torch.distributed.elastic"),
    *("datasets", "jinja2", "tokenizers", "torchao", "transformers"),
    *("torchllm.tools.planner", "torchllm.tools.dry_run", "torchllm.tools.proof", "torchllm.tools.prepare.chat"),
    *("torchllm.models.experts", "torchllm.optim.muon", "torchllm.parallel.ring", "torchllm.parallel.tensor"),
    *("torchllm.tools.adapt.tune", "torchllm.tools.launch.hang_watch"),
)
"""a run without a pipeline, on one rank and on bytes, neither saves nor loads through them, nor uses them"""

BASE = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""
RANK = """
import sys
from torchllm.recipe import load_configs
configs = load_configs(sys.argv[1:])
from recipes import pretrain
class Checkpointer(pretrain.Checkpointer):
    def save(self, step, data):  # after the first step, which is logged
        report()
pretrain.Checkpointer = Checkpointer
pretrain.main(*configs)
"""
REPORT = """
def report():
    import json, os, sys
    print(json.dumps(sorted(sys.modules)), flush=True)
    os._exit(0)
"""


def test_a_rank_imports_what_it_uses(tmp_path: Path) -> None:
    words = [
        str(ROOT / "train_configs/debug.toml"),
        *("--parallel.dp_shard=1", "--parallel.zero_stage=3", "--training.steps=1", "--evaluate.interval=0"),
        *("--run.device=cpu", f"--run.folder={tmp_path / 'run'}", "--training.global_batch_size=2"),
        "--metrics.tensorboard=false",  # 170 modules of TensorBoard, on rank 0
    ]
    config = load_config(words)
    build_loader(config.data, config.training, config.model, config.run.seed, DataRanks())  # the rank finds the corpus
    handed = tmp_path / "handed.json"
    handed.touch()
    environment = os.environ | {HANDED: str(handed), "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    os.environ[HANDED] = str(handed)
    try:
        hand_over([config], {}, words)
    finally:
        del os.environ[HANDED]
    programs = [REPORT + BASE + "report()", REPORT + RANK]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        for program in programs
    ]
    base, rank = (set(json.loads(process.communicate()[0].splitlines()[-1])) for process in running)
    assert [name for name in sorted(rank) if name.startswith(UNUSED)] == []
    added = sorted(rank - base)
    assert len(added) <= MOST, added
