"""recipes/evaluate.py on tasks of lm-evaluation-harness, without the network."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes import evaluate
from tests import workers
from tests.recipes.saved_run import SIZES, save_run
from tests.recipes.test_evaluate import on_ranks
from tests.recipes.warm import rank_of_torchrun
from tests.tiny_run import free_port
from tests.tools.test_continue_texts import decoder
from torchllm.config import Config, Data, Evaluate, Generate, Model, Run, Source, Training
from torchllm.config.errors import UserError
from torchllm.config.schema import Lora
from torchllm.data.tokenizer import load_tokenizer
from torchllm.tools.config.load import load_config
from torchllm.tools.continue_texts import continue_texts
from torchllm.tools.front.preflight import inspect_evaluation, inspect_training
from torchllm.tools.front.resolve import load_run
from torchllm.tools.hub.export import export_model
from torchllm.tools.watch.tasks import Tasks, task_names, values_of, write_points, write_task_results
from torchllm.tools.watch.text_ranks import TextRanks

TASK = """\
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {documents}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
DOCUMENTS = [
    {"question": f"{number} + 1 = ?", "choices": [str(number + 1), "none", "of these"], "answer": number % 3}
    for number in range(7)
]


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one task of seven questions, and a cache of its own for what the harness makes of it."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    (folder / "tiny_choice.yaml").write_text(TASK.format(documents=documents))
    return folder


def config_of(run: Path, *overrides: str) -> Config:
    return load_run([str(run / "config.toml"), *overrides], one_device=True, inspect=inspect_evaluation)


def log_likelihood(model: "transformers.PreTrainedModel", context: list[int], continuation: list[int]) -> float:
    tokens = torch.tensor([context + continuation])
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.log_softmax(-1)
    targets = torch.tensor(continuation)
    return float(logits[0, -len(continuation) :].gather(-1, targets[:, None]).sum())


@pytest.mark.parametrize(
    "lora",
    [Lora(), pytest.param(Lora(rank=3), marks=pytest.mark.exhaustive)],
    ids=["all weights", "LoRA"],
)
def test_documents_are_scored_as_transformers_does(
    lora: Lora, task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save_run(run, Model(kv_heads=2, **(SIZES | {"max_sequence_length": 128})), steps=(3,), lora=lora)
    config = config_of(run, f"--evaluate.tasks={task_folder}")
    path = evaluate.evaluate_tasks(config)
    assert path == run / "evaluations" / "step-00000003.json"
    results = json.loads(path.read_text())
    accuracy = results["results"]["tiny_choice"]["acc,none"]
    assert f"step 3  tiny_choice  acc {accuracy:.4f}\n" in capsys.readouterr().out
    assert sorted(entry.name for entry in run.iterdir()) == ["checkpoints", "config.toml", "evaluations", "tensorboard"]

    folder = export_model(config, tmp_path / "model").folder
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lines = path.with_suffix(".documents.jsonl").read_text().splitlines()
    right, bits = 0, 0.0
    for line, document in zip(map(json.loads, lines), DOCUMENTS, strict=True):
        context = [256, *f"Question: {document['question']}\nAnswer:".encode()]
        expected = [log_likelihood(model, context, [*f" {choice}".encode()]) for choice in document["choices"]]
        scored = [float(pair[0]) for pair in line["scored"]]
        assert scored == pytest.approx(expected, abs=1e-4)
        right += int(torch.tensor(expected).argmax()) == document["answer"]
        gold = document["choices"][document["answer"]]
        bits -= expected[document["answer"]] / math.log(2) / len(f" {gold}")
    assert accuracy == pytest.approx(right / len(DOCUMENTS))
    found = results["results"]["tiny_choice"]["gold_bits_per_byte,none"]
    assert found == pytest.approx(bits / len(DOCUMENTS), rel=1e-5)

    first = evaluate.evaluate_tasks(config_of(run, f"--evaluate.tasks={task_folder}", "--evaluate.tasks_limit=3"))
    assert first is not None
    documents = first.with_suffix(".documents.jsonl").read_text().splitlines()
    assert [json.loads(line)["document"] for line in documents] == [0, 1, 2]

    harness = run_hf(folder, task_folder)
    assert [value.value for value in values_of(harness)] == pytest.approx([accuracy])
    for sample, line in zip(harness["samples"]["tiny_choice"], map(json.loads, lines), strict=True):
        theirs = [float(pair[0]) for pair in sample["filtered_resps"]]
        assert theirs == pytest.approx([float(pair[0]) for pair in line["scored"]], abs=1e-4)


def run_hf(folder: Path, task_folder: Path) -> dict[str, Any]:
    """Return what the harness gives with its own model of an exported folder."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    results: dict[str, Any] = lm_eval.simple_evaluate(
        "hf",
        {"pretrained": str(folder), "dtype": "float32"},
        task_names([str(task_folder)]),
        batch_size=3,
        device="cpu",
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
    )
    return results


MORE_TASKS = {
    "no_context": ("multiple_choice", '""', "acc", 'doc_to_choice: "{{choices}}"'),
    "long": ("multiple_choice", '"{{question * 30}}"', "acc", 'doc_to_choice: "{{choices}}"'),
    "continued": (
        "generate_until",
        '"{{question}}"',
        "exact_match",
        "generation_kwargs: {until: [h, d], max_gen_toks: 12}",
    ),
}
"""name -> what the harness asks for, text, metric and the rest"""


def write_more_tasks(task_folder: Path, *names: str) -> None:
    head = (task_folder / "tiny_choice.yaml").read_text().split("output_type")[0]
    for name in names:
        kind, text, metric, rest = MORE_TASKS[name]
        lines = [head.replace("tiny_choice", name) + f"output_type: {kind}", "test_split: test", f"doc_to_text: {text}"]
        lines += ['doc_to_target: "{{answer}}"', rest, f"metric_list: [{{metric: {metric}}}]"]
        (task_folder / f"{name}.yaml").write_text("\n".join(lines))


def test_texts_are_rated_and_continued_as_the_harness_does(task_folder: Path, tmp_path: Path) -> None:
    """Without a context, over the end of the model's context, and as continuations."""
    write_more_tasks(task_folder, *MORE_TASKS)
    (task_folder / "tiny_choice.yaml").unlink()
    run = tmp_path / "run"
    save_run(run, Model(kv_heads=2, **(SIZES | {"max_sequence_length": 128})), steps=(3,))
    config = config_of(run, f"--evaluate.tasks={task_folder}")
    stages, device, *_ = evaluate.restore_model(config)
    ranks, tokenizer = TextRanks(stages, config, device), load_tokenizer("bytes")
    folder = export_model(config, tmp_path / "model").folder
    ours, theirs = (
        Tasks(config.evaluate).evaluate(ranks, tokenizer)["samples"],
        run_hf(folder, task_folder)["samples"],
    )
    assert ours.keys() == theirs.keys() == MORE_TASKS.keys()
    for name, samples in ours.items():
        for sample, expected in zip(samples, theirs[name], strict=True):
            if name == "continued":
                assert sample["resps"] == expected["resps"]
                continue
            for rated, other in zip(sample["filtered_resps"], expected["filtered_resps"], strict=True):
                assert float(rated[0]) == pytest.approx(float(other[0]), abs=1e-4)
                assert str(rated[1]) == str(other[1])

    exported = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    long = [*(DOCUMENTS[0]["question"] * 40).encode()][:300]  # 128 tokens, 128 and 44
    windows = [([256], long[:128]), (long[127:128], long[128:256]), (long[171:256], long[256:])]
    expected = [
        log_likelihood(exported, [256], [*b"abc"]),
        sum(log_likelihood(exported, *window) for window in windows),
    ]
    requests = [SimpleNamespace(args=("abc",)), SimpleNamespace(args=(bytes(long).decode(),))]
    from torchllm.tools.watch.harness_model import HarnessModel

    assert HarnessModel(ranks, tokenizer).loglikelihood_rolling(requests) == pytest.approx(
        expected, abs=1e-3
    )  # of 300 tokens


def test_a_task_whose_answers_leave_no_room_for_its_text_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("lm_eval")
    from torchllm.tools.watch.harness_model import HarnessModel

    asked: list[list[int]] = []

    def ask(work: str, prompts: list[list[int]], *settings: Any) -> list[list[int]]:
        asked.extend(prompts)
        return [[] for _ in prompts]

    ranks: Any = SimpleNamespace(longest=8, config=Config(), ask=ask)
    model = HarnessModel(ranks, load_tokenizer("bytes"))

    def continued(tokens: int) -> list[str]:
        return model.generate_until([SimpleNamespace(args=("0123456789", {"until": ["x"], "max_gen_toks": tokens}))])

    with pytest.raises(UserError, match=r"by up to 8 tokens \(max_gen_toks\), and the model's context is 8: raise"):
        continued(8)
    continued(5)
    assert asked == [[*b"789"]]
    assert "1 of 1 texts are cut to their last 3 tokens" in caplog.text


def test_each_prompt_of_all_batches_has_its_own_seed() -> None:
    """A task that takes several samples of a text asks for it as often."""
    config = Config(model=Model(**SIZES), training=Training(micro_batch_size=2), run=Run(seed=7))
    model, prompts = decoder(config.model), [[256, 1, 2], [256], [256, 1, 2], [256], [256, 1, 2]]
    settings = Generate(tokens=8, temperature=1.5)
    answers = TextRanks([model], config, torch.device("cpu")).answer(prompts, settings, 258, set())
    assert answers == continue_texts(
        model, prompts, settings, vocab=258, ends=set(), longest=config.longest_text, seeds=range(7, 12)
    )
    assert len({tuple(answer) for answer in answers}) == 5


def test_a_task_is_told_that_top_p_is_omitted(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("lm_eval")
    from torchllm.tools.watch.harness_model import HarnessModel

    ranks: Any = SimpleNamespace(longest=99, config=Config(), ask=lambda work, prompts, *rest: [[] for _ in prompts])
    model = HarnessModel(ranks, load_tokenizer("bytes"))
    for temperature in (0.0, 0.2):
        assert not caplog.records
        wanted = {"until": ["x"], "max_gen_toks": 5, "temperature": temperature, "top_p": 0.95}
        model.generate_until([SimpleNamespace(args=("0123456789", wanted))] * 3)
    assert [record.message for record in caplog.records] == [
        "top_p 0.95 of a task is omitted: its answers are sampled by temperature and top_k"
    ]


LAYOUTS = {
    "fsdp": ["--parallel.dp_shard=2"],
    "pp": ["--parallel.pp=2", "--parallel.dp_shard=1"],
    "tp": ["--parallel.tp=2", "--parallel.sequence_parallel=true"],
    "ring": ["--parallel.cp=2"],
    "ulysses": ["--parallel.cp=2", "--parallel.cp_method=ulysses"],
    "pp2 x tp2": ["--parallel.pp=2", "--parallel.tp=2"],
}


def scored_on_rank(arguments: list[str], port: int) -> None:
    with rank_of_torchrun(port):
        on_ranks(evaluate.evaluate_tasks, load_config(arguments))


@pytest.mark.parametrize(
    "layouts", [["fsdp", "pp"], pytest.param(["tp", "ring", "ulysses", "pp2 x tp2"], marks=pytest.mark.exhaustive)]
)
def test_ranks_score_together_as_transformers_does(layouts: list[str], task_folder: Path, tmp_path: Path) -> None:
    """As many texts as no layout divides, of several lengths; some are continued."""
    write_more_tasks(task_folder, *MORE_TASKS)
    run = tmp_path / "run"
    save_run(run, Model(kv_heads=2, **(SIZES | {"max_sequence_length": 128})), steps=(3,))
    expected = run_hf(export_model(config_of(run), tmp_path / "model").folder, task_folder)
    for layout in layouts:
        words = [str(run / "config.toml"), "--run.device=cpu", f"--evaluate.tasks={task_folder}", *LAYOUTS[layout]]
        workers.run(scored_on_rank, 4 if " x " in layout else 2, words, free_port())
        file = run / "evaluations/step-00000003.json"
        for name, values in json.loads(file.read_text())["results"].items():
            metric = "exact_match,none" if name == "continued" else "acc,none"
            assert values[metric] == expected["results"][name][metric], (layout, name)
        documents = map(json.loads, file.with_suffix(".documents.jsonl").read_text().splitlines())
        for document in documents:
            theirs = expected["samples"][document["task"]][document["document"]]["filtered_resps"]
            if document["task"] == "continued":
                assert document["scored"] == theirs
                continue
            for pair, other in zip(document["scored"], theirs, strict=True):
                assert float(pair[0]) == pytest.approx(float(other[0]), abs=1e-4), (layout, document)
                assert str(pair[1]) == str(other[1])
        file.unlink()


def test_values_are_points_of_tensorboard(tmp_path: Path) -> None:
    for step, accuracy in ((8, 0.5), (4, 0.25)):  # an older checkpoint may be evaluated later
        table = {"acc,none": accuracy, "acc_stderr,none": 0.1, "alias": "easy", "f1,strict": 0.75}
        results = {"results": {"easy": table}, "lm_eval_version": "0.4.13"}
        write_task_results(tmp_path, step, results)
        write_points(tmp_path, step, results)
    board = EventAccumulator(str(tmp_path / "tensorboard" / "tasks")).Reload()
    assert board.Tags()["scalars"] == ["tasks/easy/acc", "tasks/easy/f1/strict"]
    points = {point.step: point.value for point in board.Scalars("tasks/easy/acc")}
    assert points == {4: 0.25, 8: 0.5}
    assert sorted(path.name for path in (tmp_path / "evaluations").glob("*.json")) == [
        "step-00000004.json",
        "step-00000008.json",
    ]


def test_what_is_missing_is_told_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    save_run(run, Model(**SIZES))
    monkeypatch.setattr("torchllm.tools.front.preflight.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        config_of(run, f"--evaluate.tasks={tmp_path}")
    message = capsys.readouterr().err
    assert "--evaluate.tasks: need the package lm-eval: pip install 'torchllm[lm-eval]'" in message
    assert f"--evaluate.tasks: the folder '{tmp_path}' has no .yaml file" in message
    data = Data(sources=(Source(kind="synthetic"),))
    training = Config(data=data, evaluate=Evaluate(tasks=("arc_easy",), tasks_interval=4))
    problems = [problem.message for problem in inspect_training(training).problems]
    assert "need the package lm-eval: pip install 'torchllm[lm-eval]'" in problems
    assert "are texts, and the model has no tokenizer: its data are random tokens" in problems
