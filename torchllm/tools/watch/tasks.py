"""Tasks of lm-evaluation-harness: run them, and write their results. Extra: lm-eval.

RUN_FOLDER/evaluations/step-00000100.json               values per task, versions
RUN_FOLDER/evaluations/step-00000100.documents.jsonl    per document what was scored: log-likelihoods, or texts
RUN_FOLDER/tensorboard/tasks/                           values as curves, at the step of the checkpoint
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.config.errors import UserError

EVALUATIONS = "evaluations"
"""folder in the run folder"""


class TaskValue(NamedTuple):
    task: str
    metric: str
    """acc, acc_norm, …; with the name of a filter after a slash, if it has one"""
    value: float


def task_names(tasks: Sequence[str]) -> list[str]:
    """Return what the harness knows as tasks: names as they are, and of a folder its YAML files.

    Raises UserError for a folder without one.
    """
    names = []
    for task in tasks:
        if not os.path.isdir(task):
            names.append(task)
            continue
        files = sorted(str(path.absolute()) for path in Path(task).glob("*.yaml"))
        if not files:
            raise UserError(f"evaluate.tasks: the folder {task!r} has no .yaml file")
        names += files
    return names


def run_tasks(model: Any, tasks: Sequence[str]) -> dict[str, Any]:
    """Return what the harness gives for a model of its (`lm_eval.api.model.LM`), as its `simple_evaluate` does.

    Raises UserError if the package or a task is missing.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f"evaluate.tasks: needs lm-eval: pip install 'torchllm[lm-eval]' ({error})") from error
    names = task_names(tasks)
    has_published = any(not name.endswith(".yaml") for name in names)
    manager = TaskManager(include_defaults=has_published)  # thousands of files, which takes seconds
    unknown = [name for name in names if not name.endswith(".yaml") and not manager.match_tasks([name])]
    if unknown:
        raise UserError(f"evaluate.tasks: lm-eval {lm_eval.__version__} has no task {', '.join(unknown)}")
    results: dict[str, Any] = lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, log_samples=True)
    results["lm_eval_version"] = lm_eval.__version__
    return results


def values_of(results: Mapping[str, Any]) -> Iterator[TaskValue]:
    """Yield the values of all tasks, without their standard errors."""
    for task, table in results["results"].items():
        for key, value in table.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, (int, float)) and kind and not metric.endswith("_stderr"):
                yield TaskValue(task, metric if kind == "none" else f"{metric}/{kind}", float(value))


def write_task_results(run_folder: Path, step: int, results: Mapping[str, Any]) -> Path:
    """Write the results of a step's checkpoint into the run folder and as points for TensorBoard; return their file."""
    folder = run_folder / EVALUATIONS
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}.json"
    content = {
        "step": step,
        "results": results["results"],
        "versions": results.get("versions", {}),
        "shots": results.get("n-shot", {}),
        "documents": results.get("n-samples", {}),
        "lm_eval": results["lm_eval_version"],
    }
    lines = [json.dumps(document) for document in _documents(results)]
    _replace(path.with_suffix(".documents.jsonl"), "".join(f"{line}\n" for line in lines))
    _replace(path, json.dumps(content, indent=2) + "\n")
    _write_points(run_folder / "tensorboard" / "tasks", step, list(values_of(results)))
    return path


def _documents(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield per document of each task what was scored."""
    for task, samples in results.get("samples", {}).items():
        for sample in samples:
            yield {"task": task, "document": sample["doc_id"], "scored": sample["filtered_resps"]}


def _replace(path: Path, text: str) -> None:
    """Write a file that appears whole, in place of an earlier one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _write_points(folder: Path, step: int, values: Sequence[TaskValue]) -> None:
    """Write a file of points. In a folder of its own: TensorBoard follows only the newest file of a folder."""
    from torch.utils.tensorboard import SummaryWriter  # takes a second to import

    writer = SummaryWriter(str(folder))
    for value in values:
        writer.add_scalar(f"{value.task}/{value.metric}", value.value, step)
    writer.close()
