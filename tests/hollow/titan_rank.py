"""Takes steps of one rank of torchtitan on the hollow GPU, and reports them as `one_rank` does. For torchtitan 0.2.2.

Standard input: the keys of its JobConfig that differ, as JSON: {"training.seq_len": 8192}. Its own trainer builds
everything and takes the step; only tokens and process group are made here.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer

from tests.hollow.one_rank import join_absent_ranks, prepare, report

RANKS = 8
NEVER = 1_000_000
"""steps between two lines of its log, which wait for the GPU"""


class OneRank(Trainer):
    """torchtitan's trainer as rank 0 of a job whose other ranks do not exist."""

    def init_distributed(self) -> ParallelDims:
        join_absent_ranks(0, RANKS)
        degrees = self.job_config.parallelism
        return ParallelDims(
            dp_replicate=degrees.data_parallel_replicate_degree,
            dp_shard=degrees.data_parallel_shard_degree,
            cp=degrees.context_parallel_degree,
            tp=degrees.tensor_parallel_degree,
            pp=degrees.pipeline_parallel_degree,
            ep=1,
            etp=1,
            world_size=RANKS,
        )


def batches(config: JobConfig) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Yield micro batches without end; like torchtitan's loader, on the host."""
    shape = (config.training.local_batch_size, config.training.seq_len)
    while True:
        tokens = torch.zeros(shape, dtype=torch.int64)
        yield {"input": tokens}, tokens.clone()


def job_config(changes: dict[str, Any]) -> JobConfig:
    """Return torchtitan's defaults with some keys changed."""
    config = JobConfig()
    for key, value in {"model.name": "synthetic", "metrics.log_freq": NEVER, **changes}.items():
        section, name = key.split(".")
        assert hasattr(getattr(config, section), name), key
        setattr(getattr(config, section), name, value)
    return config


def main() -> None:
    """Print the report of the last step."""
    config = job_config(json.load(sys.stdin))
    os.environ["LOCAL_RANK"] = "0"
    prepare()
    # It asks for cuDNN's kernel first, which cannot run here; this is the next one that it asks for.
    ScaledDotProductAttentionWrapper.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    spec = replace(get_train_spec("llama3"), build_tokenizer_fn=None, build_dataloader_fn=lambda **_: None)
    register_train_spec("synthetic", spec)
    trainer = OneRank(config)
    data = trainer.batch_generator(batches(config))

    def take_step() -> None:
        trainer.step += 1
        trainer.train_step(data)

    print(json.dumps(asdict(report(take_step))), flush=True)
    os._exit(0)  # without the destructors of process groups whose peers do not exist


if __name__ == "__main__":
    main()
