"""The advice for a rank that ran out of memory."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchllm.config import Cluster, Config, Model, Parallel, Training
from torchllm.tools.adapt.out_of_memory import explain, is_out_of_memory

RUNTIME: Any = SimpleNamespace(rank=3, device=torch.device("cpu"))
LLAMA = Config(
    cluster=Cluster("dgx_a100"),
    model=Model(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000),
    training=Training(micro_batch_size=4, global_batch_size=64, sequence_length=2048),
    parallel=Parallel(dp_shard=8),
)


def out_of_memory() -> RuntimeError:
    """A real error of torch's allocator for CPUs."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    return raised.value


def test_it_names_the_rank_and_three_settings() -> None:
    first, second, *settings = explain(out_of_memory(), LLAMA, RUNTIME).splitlines()
    assert first.startswith("rank 3 is out of memory: ")
    assert "can't allocate memory" in first
    assert second == "settings that would free most memory, by the planner's estimate, each alone:"
    assert len(settings) == 3
    assert settings[0].startswith("  --recompute.mode=full frees ")
    sparse = replace(LLAMA, model=replace(LLAMA.model, experts=8, expert_ffn=1408))
    assert len(explain(out_of_memory(), sparse, RUNTIME).splitlines()) == 2 + 3
    unknown = replace(LLAMA, cluster=Cluster(), parallel=Parallel(dp_shard=4))  # this_cpu is of eight ranks
    assert "set cluster.name (train_configs/clusters) to see " in explain(out_of_memory(), unknown, RUNTIME)


def test_only_a_lack_of_memory_is_out_of_memory() -> None:
    assert is_out_of_memory(out_of_memory())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
