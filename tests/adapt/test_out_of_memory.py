"""Out of memory: who, and what would help."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchllm.adapt.out_of_memory import explain_out_of_memory, is_out_of_memory
from torchllm.config import Cluster, Config, Model, Parallel, Training
from torchllm.config.errors import UserError

CPU = torch.device("cpu")
LLAMA = Config(
    cluster=Cluster("dgx_a100"),
    model=Model(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000),
    training=Training(micro_batch_size=4, global_batch_size=64, sequence_length=2048),
    parallel=Parallel(dp_shard=8),
)


def test_a_cpus_allocator(tmp_path: Path) -> None:
    """A real one: 2^60 bytes."""
    with pytest.raises(UserError) as raised, explain_out_of_memory(LLAMA, tmp_path, 3, CPU):
        torch.empty(2**60, dtype=torch.uint8)
    first, second, *settings = str(raised.value).splitlines()
    assert first.startswith("rank 3 is out of memory: ")
    assert "can't allocate memory" in first
    assert second == "the settings that would free most, by the planner's figures, each alone:"
    assert len(settings) == 3
    assert settings[0].startswith("  --recompute.mode=full frees ")


def test_on_a_machine_that_is_not_known_it_says_what_to_set(tmp_path: Path) -> None:
    unknown = replace(LLAMA, cluster=Cluster(), parallel=Parallel(dp_shard=4))  # this_cpu is of eight ranks
    with pytest.raises(UserError, match=r"set cluster\.name"), explain_out_of_memory(unknown, tmp_path, 0, CPU):
        torch.empty(2**60, dtype=torch.uint8)


def test_other_errors_pass(tmp_path: Path) -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not is_out_of_memory(error)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError, match="shapes") as raised, explain_out_of_memory(LLAMA, tmp_path, 0, CPU):
        raise error
    assert raised.value is error
