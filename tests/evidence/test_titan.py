"""`evidence/benchmark titan`: which steps it compares. The comparison itself needs a GPU and torchtitan."""

import pytest
import torch

from evidence.benchmark import titan
from tests.tiny_run import DEBUG
from torchllm.config import Config
from torchllm.tools.config.load import load_config

GPU = torch.device("cuda", 0)


def config(*overrides: str) -> Config:
    """Return the config of the small model with a step that torchtitan can take, but for the overrides."""
    plain = {"training.dtype": "bfloat16", "parallel.dp_shard": "1", "run.dry_run": "true"}
    changed = dict(override.removeprefix("--").split("=") for override in overrides)
    return load_config([str(DEBUG), *(f"--{key}={value}" for key, value in (plain | changed).items())])


def test_what_torchtitan_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titan, "version", lambda name: "0.3.0")
    for overrides in ([], ["--parallel.tp=2", "--recompute.mode=full"], ["--recompute.mode=selective_half"]):
        assert titan.obstacle(config(*overrides), GPU) == ""
    for override, said in (
        ("--training.dtype=float32", "bfloat16"),
        ("--model.family=gpt", "no other family"),
        ("--model.qk_norm=head", "qk_norm"),
        ("--model.head_dim=64", "head_dim"),
        ("--model.tied_embeddings=true", "an untied output projection"),
        ("--parallel.pp=2", "set parallel.pp and parallel.cp to 1"),
        ("--parallel.cp=2", "set parallel.pp and parallel.cp to 1"),
        ("--data.document_mask=true", "data.document_mask = false"),
        ("--recompute.mode=selective", "one of none, full, selective_half"),
    ):
        assert said in titan.obstacle(config(override), GPU)
    assert "pattern" in titan.obstacle(config("--model.pattern=a", "--model.kinds.a.window=9"), GPU)
    assert titan.obstacle(config(), torch.device("cpu")) == "torchtitan needs a GPU"
    monkeypatch.setattr(titan, "version", lambda name: "0.2.2")
    assert "pip install torchtitan==" in titan.obstacle(config(), GPU)
    keys = titan.torchtitan_keys(config("--parallel.tp=2", "--parallel.dp_shard=4", "--recompute.mode=full"))
    assert keys["parallelism.tensor_parallel_degree"] == 2
    assert keys["parallelism.data_parallel_shard_degree"] == 4
