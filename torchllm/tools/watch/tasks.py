"""Tasks of lm-evaluation-harness: run them, and write their results. Extra: lm-eval.

RUN_FOLDER/evaluations/step-00000100.json               values per task, versions
RUN_FOLDER/evaluations/step-00000100.documents.jsonl    the scored answers per document: log-likelihoods, or texts
RUN_FOLDER/tensorboard/tasks/                           values as curves, at the step of the checkpoint
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.config import Evaluate
from torchllm.config.errors import UserError
from torchllm.data.tokenizer import Tokenizer, bits_per_byte
from torchllm.tools.watch.text_ranks import TextRanks

EVALUATIONS = "evaluations"
"""folder in the run folder"""
FEWSHOT_SEED = 1234
"""default of the harness's command"""
GOLD = "gold_bits_per_byte"
"""a metric of ours, of tasks whose answers are scored"""
DRAWS = 1000
"""of bootstraps, for standard errors that have no formula"""


class TaskValue(NamedTuple):
    task: str
    metric: str
    """acc, acc_norm, …; with the name of a filter after a slash, if it has one"""
    value: float

    @property
    def key(self) -> str:
        """Its name in metrics.jsonl, TensorBoard and trackers."""
        return f"tasks/{self.task}/{self.metric}"


def task_names(tasks: Sequence[str]) -> list[str]:
    """Return the tasks in the form that the harness knows: names unchanged, and for a folder its YAML files.

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


class Tasks:
    """Tasks with their documents, which are loaded once."""

    def __init__(self, config: Evaluate) -> None:
        """Load them. Raises UserError if one is unknown, or if the harness cannot be imported or load one."""
        self.config = config
        names = task_names(config.tasks)
        has_published = any(not name.endswith(".yaml") for name in names)
        try:
            import lm_eval
            from lm_eval.tasks import TaskManager

            logging.getLogger("lm_eval").setLevel(logging.WARNING)  # it logs each task, at each evaluation
            manager = TaskManager(include_defaults=has_published)  # thousands of files, which takes seconds
            unknown = [name for name in names if not name.endswith(".yaml") and not manager.match_tasks([name])]
            if unknown:
                raise UserError(f"evaluate.tasks: lm-eval {lm_eval.__version__} has no task {', '.join(unknown)}")
            self.loaded = manager.load(names)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"evaluate.tasks: lm-eval cannot load {', '.join(names)}: {error!r}") from error
        for task in self.loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", 0)

    def check_model(self, ranks: TextRanks, tokenizer: Tokenizer) -> None:
        """Raise UserError if the model lacks ids of texts."""
        vocab = ranks.config.model.vocab
        if tokenizer.vocab > vocab:
            raise UserError(
                f"evaluate.tasks: data.tokenizer {tokenizer.name} has {tokenizer.vocab} ids, and model.vocab is "
                f"{vocab}: name the tokenizer of the data"
            )

    def evaluate(self, ranks: TextRanks, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the result of the harness's `evaluate` for the ranks' model. Call it inside of `ranks.lead`.

        Few-shot examples are the same each time. UserError: see `check_model`.
        """
        import lm_eval

        from torchllm.tools.watch.harness_model import HarnessModel  # imports the harness

        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(FEWSHOT_SEED)
        self.check_model(ranks, tokenizer)
        model = HarnessModel(ranks, tokenizer)
        os.environ["DISABLE_MULTIPROC"] = "1"  # of bootstraps: a rank forks no processes
        results: dict[str, Any] = lm_eval.evaluate(
            model, self.loaded, limit=self.config.tasks_limit or None, bootstrap_iters=DRAWS, log_samples=True
        )
        for name, task in self.loaded["tasks"].items():
            if task.OUTPUT_TYPE in ("multiple_choice", "loglikelihood"):
                documents = [right_answers(task, sample) for sample in results["samples"][name]]
                results["results"][name] |= gold_bits_per_byte(documents)
        results["lm_eval_version"] = lm_eval.__version__
        return results


class ScoredAnswer(NamedTuple):
    """A right answer of a document."""

    log_likelihood: float
    """in nats"""
    size: int
    """bytes of the continuation that is scored, its leading space included"""


def right_answers(task: Any, sample: Mapping[str, Any]) -> list[ScoredAnswer]:
    """Return the right answers of a document, of the harness's sample of it; [] if none is among the choices."""
    texts = [arguments[1].strip() for arguments in sample["arguments"]]
    target = sample["target"]
    if len(texts) == 1:
        target = 0
    elif getattr(task, "multiple_input", 0):  # one continuation of several contexts
        target = task.doc_to_text(sample["doc"])
    answers = []
    for right in target if isinstance(target, list) else [target]:
        index = texts.index(right.strip()) if isinstance(right, str) and right.strip() in texts else right
        if isinstance(index, int) and 0 <= index < len(texts):
            continuation = sample["arguments"][index][1]
            answers.append(ScoredAnswer(float(sample["resps"][index][0][0]), len(continuation.encode())))
    return answers


def gold_bits_per_byte(documents: Iterable[Sequence[ScoredAnswer]]) -> dict[str, float]:
    """Return the metric of a task: the mean over documents of the bits per byte of the right answer that costs least.

    It moves long before accuracy does, and compares tokenizers. Documents without a right answer do not count.
    """
    bits = [min(bits_per_byte(-score, size) for score, size in answers) for answers in documents if answers]
    return {f"{GOLD},none": sum(bits) / len(bits)} if bits else {}


def values_of(results: Mapping[str, Any]) -> Iterator[TaskValue]:
    """Yield the values of all tasks, without their standard errors."""
    for task, table in results["results"].items():
        for key, value in table.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, (int, float)) and kind and not metric.endswith("_stderr"):
                yield TaskValue(task, metric if kind == "none" else f"{metric}/{kind}", float(value))


def write_task_results(run_folder: Path, step: int, results: Mapping[str, Any]) -> Path:
    """Write the results of a step into the run folder; return their file."""
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
    return path


def _documents(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the scored answers per document of each task."""
    for task, samples in results.get("samples", {}).items():
        for sample in samples:
            yield {"task": task, "document": sample["doc_id"], "scored": sample["filtered_resps"]}


def _replace(path: Path, text: str) -> None:
    """Write a file that appears whole, in place of an earlier one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_points(run_folder: Path, step: int, results: Mapping[str, Any]) -> None:
    """Write the values of a step's checkpoint as points for TensorBoard, under the names that a run gives them.

    In a separate folder: TensorBoard follows only the newest file of a folder.
    """
    from torch.utils.tensorboard import SummaryWriter  # takes a second to import

    writer = SummaryWriter(str(run_folder / "tensorboard" / "tasks"))
    for value in values_of(results):
        writer.add_scalar(value.key, value.value, step)
    writer.close()
