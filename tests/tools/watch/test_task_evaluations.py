"""Tasks that a run evaluates while it trains, on its ranks, without the network."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from recipes import evaluate
from tests.recipes.test_evaluate_tasks import LAYOUTS, task_folder
from tests.recipes.warm import Change, alone, pretrain, trained
from tests.tiny_run import metrics, tensor_digests

__all__ = ["task_folder", "trained"]


def run_with_tasks(folder: Path, tasks: Path, *overrides: str, ranks: int = 2, change: Change | None = None) -> None:
    words = [f"--evaluate.tasks={tasks}", "--evaluate.tasks_interval=4", "--metrics.log_interval=1", *overrides]
    assert pretrain(ranks, folder, *words, change=change) == [""] * ranks


def scored(folder: Path, step: int) -> list[list[list[Any]]]:
    """Return what was scored of each document: per choice a log-likelihood, and whether it is the likeliest."""
    lines = (folder / f"evaluations/step-{step:08d}.documents.jsonl").read_text().splitlines()
    return [[[float(total), str(greedy)] for total, greedy in json.loads(line)["scored"]] for line in lines]


def assert_scored_as_alone(folder: Path, tasks: Path, *overrides: str) -> None:
    """Check the tasks of both checkpoints against one process that evaluates them."""
    for step in (4, 8):
        record = next(record for record in metrics(folder) if record["step"] == step and "loss" not in record)
        ours = scored(folder, step)
        config = alone(folder, f"--checkpoint.resume={folder}/checkpoints/step-{step:08d}", *overrides)
        path = evaluate.evaluate_tasks(config)
        assert path is not None
        for pairs, others in zip(ours, scored(folder, step), strict=True):
            for pair, other in zip(pairs, others, strict=True):
                assert pair == [pytest.approx(other[0], abs=1e-4), other[1]]
        assert record["tasks/tiny_choice/acc"] == json.loads(path.read_text())["results"]["tiny_choice"]["acc,none"]


def test_a_run_scores_as_one_process_and_trains_the_same(trained: Path, task_folder: Path, tmp_path: Path) -> None:
    run_with_tasks(tmp_path / "run", task_folder)
    assert_scored_as_alone(tmp_path / "run", task_folder)
    assert tensor_digests(tmp_path / "run", 8) == tensor_digests(trained, 8)


MORE = {
    "experts": ["--parallel.dp_shard=2", "--parallel.ep=2", "--model.experts=4"],
    "chunks": ["--parallel.dp_shard=2", "--training.loss_chunk=5", "--training.z_loss=0.001"],
    "uneven vocabulary": ["--parallel.tp=2", "--model.vocab=265"],
    "further tokens": ["--parallel.dp_shard=2", "--model.mtp_depth=1"],
    "both ends": ["--parallel.pp=2", "--parallel.schedule=ZBVZeroBubble", "--model.layers=4"],
    "windows": ["--parallel.cp=2", "--model.window=8"],
    "compiled": ["--parallel.dp_shard=2", "--compile.block=true", "--compile.loss=true"],
}
"""what shares or changes the work of the head, of attention or of a stage"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*MORE, *(name for name in LAYOUTS if name != "fsdp")])
def test_each_layout_scores_as_one_process(name: str, task_folder: Path, tmp_path: Path) -> None:
    layout = (LAYOUTS | MORE)[name]
    ranks = 4 if " x " in name else 2
    words = ["--training.micro_batch_size=8", "--parallel.dp_shard=1", *layout]
    run_with_tasks(tmp_path, task_folder, *words, ranks=ranks)
    assert_scored_as_alone(tmp_path, task_folder)


@pytest.mark.exhaustive
def test_the_average_is_evaluated(task_folder: Path, tmp_path: Path) -> None:
    run_with_tasks(tmp_path, task_folder, "--optimizer.ema_decay=0.5", "--evaluate.ema=true")
    assert_scored_as_alone(tmp_path, task_folder)
    averaged = scored(tmp_path, 8)
    config = alone(tmp_path, "--evaluate.ema=false")
    evaluate.evaluate_tasks(config)
    assert abs(averaged[0][0][0] - scored(tmp_path, 8)[0][0][0]) > 1e-3


def break_harness(recipe: Any, rank: int) -> None:
    """Let the harness fail once on rank 0, between the requests of the ranks and the results."""
    import lm_eval

    from torchllm.tools.watch import task_evaluations

    plain = lm_eval.evaluate
    calls = []

    def evaluate_tasks(*arguments: Any, **settings: Any) -> Any:
        calls.append(plain(*arguments, **settings))
        if len(calls) == 1:
            raise ValueError("no such metric")
        return calls[-1]

    lm_eval.evaluate = evaluate_tasks
    lines: list[str] = []
    task_evaluations.log = logging.Logger("tasks")  # the pool has no log
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    task_evaluations.log.addHandler(handler)
    stop = task_evaluations.TaskEvaluations.end

    def end(self: Any) -> None:
        stop(self)
        lm_eval.evaluate = plain
        (self.run.runtime.folder / f"log-{rank}").write_text("\n".join(lines))

    task_evaluations.TaskEvaluations.end = end


def test_a_failure_of_the_harness_ends_nothing(task_folder: Path, tmp_path: Path) -> None:
    run_with_tasks(tmp_path, task_folder, change=break_harness)
    first, second = (tmp_path / "log-0").read_text().splitlines()
    assert first == "evaluate.tasks: step 4 is not evaluated, training goes on: ValueError('no such metric')"
    assert second.startswith("step 8: tasks/tiny_choice/acc 0.")
    assert (tmp_path / "log-1").read_text() == ""
    assert [file.name for file in (tmp_path / "evaluations").glob("*.json")] == ["step-00000008.json"]
