"""Tasks that a run evaluates while it trains, on its ranks, without the network."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes import evaluate
from tests.recipes.test_evaluate_tasks import LAYOUTS, task_folder, write_more_tasks
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
    write_more_tasks(task_folder, "no_context")  # of a few tokens
    layout = (LAYOUTS | MORE)[name]
    ranks = 4 if " x " in name else 2
    words = ["--training.micro_batch_size=8", "--parallel.dp_shard=1", *layout]
    run_with_tasks(tmp_path, task_folder, *words, ranks=ranks)
    assert_scored_as_alone(tmp_path, task_folder)


@pytest.mark.exhaustive
def test_the_average_is_evaluated_and_the_weights_are_trained(task_folder: Path, tmp_path: Path) -> None:
    """No unit keeps the average, gathered, for the next step."""
    averages = ["--optimizer.ema_decay=0.5", "--evaluate.ema=true", "--evaluate.interval=0"]
    folder, other = tmp_path / "run", tmp_path / "other"
    run_with_tasks(folder, task_folder, *averages)
    assert pretrain(2, other, *averages[:1], "--evaluate.interval=0") == ["", ""]
    assert tensor_digests(folder, 8) == tensor_digests(other, 8)
    assert_scored_as_alone(folder, task_folder)
    averaged = scored(folder, 8)
    config = alone(folder, "--evaluate.ema=false")
    evaluate.evaluate_tasks(config)
    assert abs(averaged[0][0][0] - scored(folder, 8)[0][0][0]) > 1e-3


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("broken", "lm-eval cannot load {folder}/broken.yaml"),
        pytest.param("no_such", "lm-eval has no task no_such", marks=pytest.mark.exhaustive),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_the_first_step(
    task: str, reason: str, task_folder: Path, tmp_path: Path
) -> None:
    write_more_tasks(task_folder, "continued")
    (task_folder / "broken.yaml").write_text((task_folder / "continued.yaml").read_text().replace(".jsonl", ".no"))
    name = task if task == "no_such" else str(task_folder / f"{task}.yaml")
    words = [f"--evaluate.tasks={name}", "--evaluate.tasks_interval=4", "--training.micro_batch_size=8"]
    problems = pretrain(2, tmp_path / "run", *words, "--parallel.pp=2", "--parallel.dp_shard=1")
    assert len(set(problems)) == 1
    assert f"evaluate.tasks: {reason.format(folder=task_folder)}" in problems[0].replace(" 0.4.13", "")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def break_harness(recipe: Any, rank: int) -> None:
    """Let the harness fail at its first evaluation, when the ranks have computed, and write down what is logged."""
    import lm_eval

    from torchllm.tools.watch import task_evaluations

    plain, log, train = lm_eval.evaluate, task_evaluations.log, recipe.train
    results: list[Any] = []
    lines: list[str] = []

    def evaluate_once(*arguments: Any, **settings: Any) -> Any:
        results.append(plain(*arguments, **settings))
        if len(results) == 1:
            raise ValueError("no such metric")
        return results[-1]

    def note(message: str, *arguments: object) -> None:
        lines.append(message % arguments)

    def train_and_restore(config: Any, runtime: Any, monitor: Any) -> None:
        lm_eval.evaluate = evaluate_once
        task_evaluations.log = SimpleNamespace(info=note, warning=note)
        try:
            train(config, runtime, monitor)
        finally:
            lm_eval.evaluate, task_evaluations.log = plain, log
        (runtime.folder / f"log-{rank}").write_text("\n".join(lines))

    recipe.train = train_and_restore


@pytest.mark.exhaustive
def test_a_failure_of_the_harness_ends_nothing(task_folder: Path, tmp_path: Path) -> None:
    run_with_tasks(tmp_path, task_folder, change=break_harness)
    first, second = (tmp_path / "log-0").read_text().splitlines()
    assert first == "evaluate.tasks: step 4 is not evaluated, training goes on: ValueError('no such metric')"
    assert second.startswith("step 8: tasks/tiny_choice/acc 0.")
    assert (tmp_path / "log-1").read_text() == ""
    assert [file.name for file in (tmp_path / "evaluations").glob("*.json")] == ["step-00000008.json"]


def stop_urgently(recipe: Any, rank: int) -> None:
    """Let the run be asked to stop so long ago that no evaluation may go on."""
    start = recipe.start_runtime

    def start_runtime(*arguments: Any) -> Any:
        runtime = start(*arguments)

        def should_give_up() -> bool:
            runtime.has_given_up = True
            return True

        runtime.should_give_up = should_give_up
        return runtime

    recipe.start_runtime = start_runtime


def test_tasks_are_given_up_by_all_ranks_if_the_run_must_save(task_folder: Path, tmp_path: Path) -> None:
    run_with_tasks(tmp_path, task_folder, "--evaluate.tasks_interval=1", "--evaluate.interval=0", change=stop_urgently)
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert not (tmp_path / "evaluations").exists()
