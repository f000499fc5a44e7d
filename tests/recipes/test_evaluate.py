import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from recipes import evaluate, generate
from tests import workers
from tests.recipes.warm import alone, pretrain, rank_of_torchrun
from tests.tiny_run import free_port, metrics
from torchllm.config import Config
from torchllm.recipe import Runtime, start_runtime
from torchllm.tools.config.load import load_config

Result = TypeVar("Result")

LARGE = ["--training.micro_batch_size=8"]
"""fewer micro batches: ranks that share layers send many small messages for each"""
FIRST_CHECKPOINT = "--checkpoint.resume={}/checkpoints/step-00000004"


@pytest.mark.parametrize(("step", "overrides"), [(8, []), (4, [FIRST_CHECKPOINT])])
def test_it_is_what_pretrain_logged(
    trained: Path, capsys: pytest.CaptureFixture[str], step: int, overrides: list[str]
) -> None:
    logged = {record["step"]: record.get("validation_loss") for record in metrics(trained)}
    assert logged[8] < logged[4] < math.log(264)
    arguments = [override.format(trained) for override in overrides]
    config = alone(trained, *arguments)
    loss = evaluate.main(config)
    assert loss == pytest.approx(logged[step], rel=1e-6)  # a float64 sum of float32 losses, over 1 rank instead of 2
    perplexity = math.exp(loss)
    line = f"step {step}  validation loss {loss:.4f} nats/token  perplexity {perplexity:.3f}"
    bits = {record["step"]: record.get("validation_bits_per_byte") for record in metrics(trained)}[step]
    assert loss.bits_per_byte == pytest.approx(bits, rel=1e-6)
    assert capsys.readouterr().out == f"{line}  {bits:.4f} bits/byte\n"
    assert abs(evaluate.main(alone(trained, *arguments, "--evaluate.sequences=1")) - loss) > 1e-3


@pytest.mark.exhaustive
def test_a_run_with_low_rank_updates_is_what_pretrain_logged(tmp_path: Path) -> None:
    """Its frozen weights, which no checkpoint holds, are made again."""
    assert pretrain(2, tmp_path, "--lora.rank=4", *LARGE, "--parallel.tp=2", "--parallel.dp_shard=1") == ["", ""]
    (logged,) = (record["validation_loss"] for record in metrics(tmp_path) if record["step"] == 8)
    assert evaluate.main(alone(tmp_path)) == pytest.approx(logged, rel=1e-6)
    arguments = [str(tmp_path / "config.toml"), "--run.device=cpu", "--parallel.tp=1", "--parallel.dp_shard=2"]
    losses = workers.run(evaluate_on_rank, 2, arguments, free_port())
    assert losses == pytest.approx([logged] * 2, rel=1e-6)
    assert generate.main(alone(tmp_path, "--generate.tokens=3"))


@pytest.mark.exhaustive
def test_tokens_go_to_the_experts_that_they_went_to_in_training(tmp_path: Path) -> None:
    """In bfloat16 too: a router whose weights or bias were rounded to it would choose others."""
    experts = [
        "--model.experts=8",
        "--model.router_bias=true",
        "--model.router_score=sigmoid",
        "--training.dtype=bfloat16",
        "--training.steps=4",
        *LARGE,
    ]
    assert pretrain(2, tmp_path, *experts, "--model.router_bias_rate=0.003", "--parallel.ep=2") == ["", ""]
    (logged,) = (record["validation_loss"] for record in metrics(tmp_path) if record["step"] == 4)
    assert evaluate.main(alone(tmp_path)) == pytest.approx(logged, rel=1e-6)
    arguments = [str(tmp_path / "config.toml"), "--run.device=cpu", "--parallel.ep=1"]
    assert workers.run(evaluate_on_rank, 2, arguments, free_port()) == pytest.approx([logged] * 2, rel=1e-6)


def on_ranks(work: Callable[[Config, Runtime], Result], config: Config) -> Result:
    """Let the recipe's function work on ranks that torchrun has started."""
    runtime = start_runtime(config.run, [config], reads_only=True)
    result = work(config, runtime)
    runtime.close()
    return result


def evaluate_on_rank(arguments: list[str], port: int) -> float:
    with rank_of_torchrun(port):
        return on_ranks(evaluate.main, load_config(arguments))


def test_stages_of_a_pipeline_evaluate_together(trained: Path) -> None:
    *_, logged = (record["validation_loss"] for record in metrics(trained) if "validation_loss" in record)
    arguments = [str(trained / "config.toml"), "--run.device=cpu", "--parallel.dp_shard=1", "--parallel.pp=2"]
    losses = workers.run(evaluate_on_rank, 2, arguments, free_port())
    assert losses == pytest.approx([logged] * 2, rel=1e-6)  # float32 sums in another order
