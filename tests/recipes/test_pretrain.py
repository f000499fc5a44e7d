import json
import math
import os
import shutil
import signal
import time
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.recipes.warm import alone, pretrain
from tests.tiny_run import STEPS, curve, metrics, tensor_files
from torchllm.metrics import meter
from torchllm.models.decoder import build_model
from torchllm.parallel.initialize import initialize
from torchllm.tools.launch import stop_requests
from torchllm.tools.watch.launches import read_launches


def from_step_4(trained: Path, folder: Path) -> Path:
    """The run folder as it was when its run was killed after step 5."""
    shutil.copytree(trained / "checkpoints/step-00000004", folder / "checkpoints/step-00000004")
    lines = (trained / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]))
    return folder


def test_resumed_on_the_same_layout_it_is_the_same_run(trained: Path, tmp_path: Path) -> None:
    folder = from_step_4(trained, tmp_path)
    assert pretrain(2, folder) == ["", ""]
    assert curve(folder) == curve(trained)  # bitwise, and no step twice
    assert [record["step"] for record in metrics(folder)] == list(range(1, STEPS + 1))
    assert tensor_files(folder, STEPS) == tensor_files(trained, STEPS)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ["--parallel.dp_shard=1", "--training.micro_batch_size=4"]),
        (2, ["--parallel.dp_shard=1", "--parallel.pp=2", "--parallel.schedule=Interleaved1F1B"]),
    ],
    ids=["1-rank", "pp-2"],
)
def test_resumed_on_another_layout_it_reads_the_same_samples(
    trained: Path, tmp_path: Path, ranks: int, overrides: list[str]
) -> None:
    folder = from_step_4(trained, tmp_path)
    assert pretrain(ranks, folder, *overrides) == [""] * ranks
    for resumed, whole in zip(curve(folder), curve(trained), strict=True):
        # Another order of float32 sums, through four steps of AdamW: 1e-7 has been seen. Other samples: 1e-2.
        assert resumed == pytest.approx(whole, rel=1e-6)
    manifest = last_manifest(folder)
    assert manifest["data"] == last_manifest(trained)["data"]
    assert manifest["world_size"] == ranks


GROWING = (
    "--data.stage=[{until = 3}, {until = 6, sequence_length = 64}, {global_batch_size = 32}]",
    *("--schedule.by_tokens=true", "--schedule.name=linear", "--schedule.warmup_steps=2"),
)
SEQUENCES, LENGTHS = [16] * 6 + [32] * 2, [32] * 3 + [64] * 3 + [32] * 2
"""of the steps"""


def test_a_rate_by_tokens_follows_longer_sequences_and_larger_batches(tmp_path: Path) -> None:
    """Also of a run that goes on in mid-stage on another layout; the linear decay ends at 0 with the last token."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert pretrain(1, whole, "--parallel.dp_shard=1", *GROWING) == [""]
    ends = list(accumulate(sequences * length for sequences, length in zip(SEQUENCES, LENGTHS, strict=True)))
    positions = [STEPS * tokens / ends[-1] for tokens in ends]
    rates = [3e-3 * (position / 2 if position <= 2 else (STEPS - position) / (STEPS - 2)) for position in positions]
    records = metrics(whole)
    assert [record["tokens"] for record in records] == ends
    assert [record["learning_rate"] for record in records] == pytest.approx(rates, rel=1e-12, abs=1e-18)
    resumed = from_step_4(whole, parted)
    assert pretrain(2, resumed, *GROWING) == ["", ""]
    assert [record["learning_rate"] for record in metrics(resumed)] == [record["learning_rate"] for record in records]
    for ours, theirs in zip(curve(resumed), curve(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)  # as on other layouts above


def last_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / f"checkpoints/step-{STEPS:08d}/manifest.json").read_text())
    return manifest


def _signal_in_evaluation(patience: float, recipe: Any, rank: int) -> None:
    """patience: seconds that the evaluation may take after the signal."""
    evaluate = recipe.evaluate

    def signalled(*arguments: Any) -> float:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        with mock.patch.object(stop_requests, "EVALUATION_MAY_TAKE", patience):
            return evaluate(*arguments)

    recipe.evaluate = signalled


def test_a_signal_to_one_rank_during_evaluation_stops_all_with_a_checkpoint(trained: Path, tmp_path: Path) -> None:
    # Sent in the evaluation of step 4: the vote after it has it, and is read at step 5.
    assert pretrain(2, tmp_path, change=partial(_signal_in_evaluation, math.inf)) == ["", ""]
    assert json.loads((tmp_path / "stopped.json").read_text()) == {"step": 5}
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000004", "step-00000005"]
    assert pretrain(2, tmp_path) == ["", ""]
    assert not (tmp_path / "stopped.json").exists()
    assert curve(tmp_path) == curve(trained)
    assert tensor_files(tmp_path, STEPS) == tensor_files(trained, STEPS)


@pytest.mark.parametrize(
    ("recipe", "interval", "saved"),
    [
        ("recipes.pretrain", 3, 3),
        pytest.param("recipes.pretrain", STEPS, STEPS, marks=pytest.mark.exhaustive),
        pytest.param("tests.forks.d223729.pretrain", 3, 4, marks=pytest.mark.exhaustive),
    ],
    ids=["in the middle", "in the last step", "in a fork"],
)
def test_an_evaluation_that_would_keep_a_stop_waiting_is_given_up(
    trained: Path, tmp_path: Path, recipe: str, interval: int, saved: int
) -> None:
    overrides = ["--checkpoint.interval=0", f"--evaluate.interval={interval}"]
    change = partial(_signal_in_evaluation, -1.0)
    assert pretrain(2, tmp_path, *overrides, recipe=recipe, change=change) == ["", ""]
    assert os.listdir(tmp_path / "checkpoints") == [f"step-{saved:08d}"]
    assert [record for record in metrics(tmp_path) if "validation_loss" in record] == []
    assert pretrain(2, tmp_path, "--checkpoint.interval=0", recipe=recipe) == ["", ""]
    assert [step[:5] for step in curve(tmp_path)] == [step[:5] for step in curve(trained)]
    assert tensor_files(tmp_path, STEPS) == tensor_files(trained, STEPS)


def _note_what_is_trained(file: Path, recipe: Any, rank: int) -> None:
    """Write what the rank with the head has at the first step: its weight, its chunk, and the type of its input."""

    class NotedStep(recipe.TrainStep):
        def __call__(self, step: int, batches: Any) -> Any:
            (stage,) = self.stages
            if stage.lm_head is None:
                return super().__call__(step, batches)
            weight = stage.lm_head.weight.to_local().detach().clone()
            dtypes = []
            stage.lm_head.register_forward_pre_hook(lambda module, inputs: dtypes.append(inputs[0].dtype))
            result = super().__call__(step, batches)
            torch.save({"weight": weight, "chunk": stage.lm_head.chunk, "dtypes": set(dtypes)}, file)
            return result

    recipe.TrainStep = NotedStep


def test_type_seed_and_chunks_of_the_config_reach_a_pipelines_last_stage(tmp_path: Path) -> None:
    """The evaluation, in which stages receive into memory of their own, has to know the type as well."""
    notes = tmp_path / "notes"
    overrides = [
        *("--training.steps=1", "--schedule.warmup_steps=0", "--checkpoint.interval=0", "--evaluate.sequences=2"),
        *("--parallel.dp_shard=1", "--parallel.pp=2", "--model.layers=2"),
        *("--run.seed=7", "--training.dtype=bfloat16", "--training.loss_chunk=20"),
    ]
    assert pretrain(2, tmp_path / "run", *overrides, change=partial(_note_what_is_trained, notes)) == ["", ""]
    noted = torch.load(notes)
    config = alone(tmp_path / "run")
    model = build_model(config.model)
    initialize([model], config.model, torch.device("cpu"), seed=7)
    assert model.lm_head is not None
    assert torch.equal(noted["weight"], model.lm_head.weight)
    assert noted["chunk"] == 20
    assert noted["dtypes"] == {torch.bfloat16}
    (record,) = [record for record in metrics(tmp_path / "run") if "validation_loss" in record]
    assert record["validation_loss"] == pytest.approx(record["loss"], rel=0.1)


def _note_who_prepares_data(folder: Path, recipe: Any, rank: int) -> None:
    """Put each rank on a node of its own, and write down what the loader is told about preparing data there."""
    os.environ["LOCAL_RANK"] = "0"
    build_loader = recipe.build_loader

    def noted(*arguments: Any) -> Any:
        ranks = arguments[-1]
        (folder / f"rank-{rank}").write_text(json.dumps([ranks.prepares, ranks.preparing_rank]))
        return build_loader(*arguments)

    recipe.build_loader = noted


def test_the_first_rank_on_each_node_prepares_its_data(tmp_path: Path) -> None:
    overrides = ["--training.steps=1", "--schedule.warmup_steps=0", "--checkpoint.interval=0", "--evaluate.interval=0"]
    assert pretrain(2, tmp_path / "run", *overrides, change=partial(_note_who_prepares_data, tmp_path)) == ["", ""]
    for rank in range(2):
        assert json.loads((tmp_path / f"rank-{rank}").read_text()) == [True, rank]


def _slow_last_save(seconds: float, recipe: Any, rank: int) -> None:
    """Let the last save take so long by the clock of the meter."""
    train = recipe.train
    late = SimpleNamespace(seconds=0.0)
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late.seconds)

    class SlowCheckpointer(recipe.Checkpointer):
        def close(self) -> None:
            super().close()
            late.seconds = seconds

    def train_by_the_clock(*arguments: Any) -> None:
        with mock.patch.object(meter, "time", clock):
            train(*arguments)

    recipe.Checkpointer, recipe.train = SlowCheckpointer, train_by_the_clock


def test_the_wait_for_the_last_save_trained_nothing(tmp_path: Path) -> None:
    one_step = ["--training.steps=1", "--schedule.warmup_steps=0", "--parallel.dp_shard=1"]
    assert pretrain(1, tmp_path, *one_step, change=partial(_slow_last_save, 1000.0)) == [""]
    (launch,) = read_launches(tmp_path / "goodput.json")
    assert launch.lost["checkpoint"] > 1000


def test_a_finished_run_started_again_does_nothing(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    assert pretrain(2, tmp_path / "run") == ["", ""]
    assert metrics(tmp_path / "run") == metrics(trained)
    assert tensor_files(tmp_path / "run", STEPS) == tensor_files(trained, STEPS)


def test_a_refused_start_leaves_the_config_as_it_was(trained: Path, tmp_path: Path) -> None:
    folder = from_step_4(trained, tmp_path)
    (folder / "config.toml").write_text("as it was")
    (refusal,) = pretrain(1, folder, "--parallel.dp_shard=1", "--model.hidden=64")
    assert "is of another model or optimizer; use its config" in refusal
    assert (folder / "config.toml").read_text() == "as it was"


def test_what_only_the_machine_can_tell_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    missing = ["--data.sources.0.kind=text", "--data.sources.0.path=/nowhere/a.txt"]
    for overrides, words in (
        (["--model.attention=flex"], 'model.attention = "flex" has no backward on a CPU: use "sdpa"'),
        (missing, "/nowhere/a.txt"),
        (["--data.validation_fraction=1e-9"], "nothing is held out to evaluate on"),
        (["--run.device=cuda"], 'run.device = "cuda", but torch sees no GPU here'),
        (["--checkpoint.resume=/nowhere/step-00000004"], "/nowhere/step-00000004"),
    ):
        first, second = pretrain(2, tmp_path / "run", *overrides)
        assert words in first
        assert first == second
        assert not (tmp_path / "run" / "metrics.jsonl").exists()  # before the first step
