"""recipes/finetune.py from end to end: a small model learns 64 conversations, on any number of ranks."""

import difflib
import io
import json
import re
import shutil
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import torchllm
from recipes import generate
from tests.recipes.warm import alone, pretrain
from tests.tiny_run import ROOT, curve, metrics, tensor_digests
from tests.tools.hub.published import save_published
from tests.tools.prepare.chat.families import QWEN25, assistant, user, write_tokenizer
from torchllm.checkpoint.manifest import read_manifest, step_folders
from torchllm.data.batch import Batch
from torchllm.tools.hub.export import export_model

WORDS = ["quick", "brown", "lazy", "general", "hello", "world", "three", "two"]
TALKS = [(f"how {WORDS[n // 8]} {WORDS[n % 8]}?", f"{WORDS[(n + 3) % 8]} {WORDS[n // 8 ^ 5]}") for n in range(64)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that name 64 conversations and their tokenizer."""
    folder = tmp_path_factory.mktemp("talks")
    tokenizer = write_tokenizer(folder, QWEN25._replace(template=QWEN25.template.replace("You are helpful.", "hello")))
    lines = [json.dumps({"messages": [user(question), assistant(answer)]}) for question, answer in TALKS]
    (folder / "talks.jsonl").write_text("\n".join(lines))
    return [
        f"--data.tokenizer={tokenizer}",
        "--data.sources.0.kind=jsonl",
        f"--data.sources.0.path={folder / 'talks.jsonl'}",
        "--data.sources.0.messages_key=messages",
        "--data.document_mask=true",
        f"--data.cache={folder / 'cache'}",
        "--data.validation_fraction=0",
        "--evaluate.interval=0",
        "--model.vocab=512",
        "--training.sequence_length=64",
        "--training.global_batch_size=16",
        "--schedule.name=linear",
        "--schedule.final_fraction=0.1",
    ]


def test_the_loop_is_that_of_pretraining() -> None:
    """All that finetune.py adds to pretrain.py are the conversations and the steps of finetune.epochs."""
    pretraining, finetuning = (ROOT / f"recipes/{name}.py" for name in ("pretrain", "finetune"))
    loop, own = (
        re.findall(r"^def train.*?(?=\n\n\ndef )", file.read_text(), re.M | re.S)[0].splitlines()
        for file in (pretraining, finetuning)
    )
    changes = [line for line in difflib.ndiff(loop, own) if line[0] in "+-"]
    assert changes == ["+         config.finetune,", "+     config = set_steps(config, data)"]
    ends = [file.read_text().partition("\ndef main(")[2] for file in (pretraining, finetuning)]
    assert ends[0] == ends[1] != ""


def finetune(ranks: int, folder: Path, *overrides: str, **arguments: Any) -> list[str]:
    """Train on warm ranks; of a key that is given twice the last value counts."""
    values = dict(override.split("=", 1) for override in overrides)
    keys = (f"{key}={value}" for key, value in values.items())
    return pretrain(ranks, folder, *keys, recipe="recipes.finetune", **arguments)


def test_a_small_model_learns_64_conversations_and_answers_them(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = ["--model.hidden=64", "--model.ffn=128", "--model.layers=2", "--model.heads=4"]
    rate = ["--optimizer.learning_rate=6e-3", "--optimizer.weight_decay=0", "--schedule.warmup_steps=5"]
    run = ["--finetune.epochs=40", "--metrics.log_interval=20", "--checkpoint.interval=0"]
    assert finetune(1, tmp_path, *data, *size, *rate, *run, "--training.micro_batch_size=16") == [""]
    last = metrics(tmp_path)[-1]
    greedy = ["--generate.temperature=0", "--generate.tokens=20"]
    config = alone(tmp_path, *greedy, "--generate.prompt=")
    assert config.generate.chat
    assert last["step"] == config.training.steps
    assert last["loss"] < 0.02
    assert 0 < last["targets_per_second"] < last["tokens_per_second"]
    manifest = read_manifest(step_folders(tmp_path / "checkpoints")[0])
    assert manifest.data["chat"]["template"] == QWEN25.template.replace("You are helpful.", "hello")
    again = ["--training.steps=1", "--schedule.warmup_steps=1", f"--checkpoint.initial={tmp_path}"]
    assert finetune(1, tmp_path / "again", *data, *size, *again) == [""]
    assert metrics(tmp_path / "again")[0]["loss"] < 0.02
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TALKS[0][0]}\n"))
    assert generate.main(config) == TALKS[0][1]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TALKS[0][0]}\n{TALKS[1][0]}\n"))
    alone_each = alone(tmp_path, *greedy, "--generate.prompt=", "--generate.history=false")
    assert generate.main(alone_each) == f"{TALKS[0][1]}\n{TALKS[1][1]}"
    questions = [[{"role": "user", "content": question}] for question, _ in TALKS]
    answers = torchllm.load(tmp_path).answers(questions, temperature=0.0, tokens=20)
    assert answers == [answer for _, answer in TALKS]


def test_a_run_that_goes_on_is_the_same_run_on_any_number_of_ranks(data: list[str], tmp_path: Path) -> None:
    """It has the same bits on two ranks, and the same sequences on one."""
    size = ["--model.hidden=32", "--model.ffn=64", "--model.layers=1", "--training.steps=4", "--checkpoint.interval=2"]
    whole = tmp_path / "whole"
    assert finetune(2, whole, *data, *size) == ["", ""]
    for ranks in (2, 1):
        resumed = tmp_path / f"resumed on {ranks}"
        shutil.copytree(whole / "checkpoints/step-00000002", resumed / "checkpoints/step-00000002")
        assert finetune(ranks, resumed, *data, *size) == [""] * ranks
        if ranks == 2:
            assert tensor_digests(resumed, 4) == tensor_digests(whole, 4)
        for line, expected in zip(curve(resumed), curve(whole)[2:], strict=True):
            assert line[1] == pytest.approx(expected[1], rel=1e-5)
            assert (line[0], line[4]) == (expected[0], expected[4]), "other tokens were trained"


def conversations(batch: Batch) -> set[tuple[int, ...]]:
    """The tokens of each conversation that begins and ends in a sequence with targets."""
    found = set()
    for tokens, labels, positions in zip(batch.tokens, batch.labels, batch.positions, strict=True):
        starts = (positions == 0).nonzero().flatten().tolist() if (labels >= 0).any() else []
        found |= {tuple(tokens[start:end].tolist()) for start, end in pairwise(starts)}
    return found


def _note_conversations(folder: Path, recipe: Any, rank: int) -> None:
    """Write which conversations a rank trains, and which it evaluates."""
    noted: dict[str, set[tuple[int, ...]]] = {"trained": set(), "evaluated": set()}
    evaluate = recipe.evaluate

    class NotedStep(recipe.TrainStep):
        def __call__(self, step: int, batches: Any) -> Any:
            noted["trained"].update(*map(conversations, batches))
            return super().__call__(step, batches)

    def noted_evaluate(forward_backward: Any, batches: Any, *arguments: Any) -> float:
        held_out = list(batches)
        noted["evaluated"].update(*map(conversations, held_out))
        torch.save(noted, folder / f"noted-{rank}")
        return evaluate(forward_backward, held_out, *arguments)

    recipe.TrainStep, recipe.evaluate = NotedStep, noted_evaluate


def test_held_out_conversations_are_evaluated(data: list[str], tmp_path: Path) -> None:
    size = ["--model.hidden=32", "--model.ffn=64", "--model.layers=1", "--training.steps=4"]
    held_out = ["--data.validation_fraction=0.3", "--evaluate.interval=4", "--evaluate.sequences=4"]
    note = partial(_note_conversations, tmp_path)
    assert finetune(2, tmp_path / "run", *data, *size, *held_out, change=note) == ["", ""]
    assert 0 < curve(tmp_path / "run")[-1][-1] < 10
    noted = [torch.load(tmp_path / f"noted-{rank}") for rank in range(2)]
    trained, evaluated = (noted[0][name] | noted[1][name] for name in ("trained", "evaluated"))
    assert len(trained) > len(evaluated) > 2
    assert not trained & evaluated


@pytest.mark.exhaustive
def test_a_published_model_is_fine_tuned_whole_and_by_low_rank_updates(data: list[str], tmp_path: Path) -> None:
    """Both start from its weights; what is frozen is exported as it was."""
    save_published("qwen3", tmp_path / "published", vocab_size=512)
    file = tmp_path / "run.toml"
    file.write_text(f'[run]\ndevice = "cpu"\n[model]\nfrom_hf = "{tmp_path / "published"}"\n')
    run = ["--finetune.epochs=2", "--schedule.warmup_steps=1", "--metrics.log_interval=1"]
    run += ["--optimizer.learning_rate=1e-2", "--optimizer.weight_decay=0", "--training.micro_batch_size=8"]
    lora = ["--lora.rank=8", "--lora.alpha=32", "--parallel.tp=2"]
    losses = []
    for name, ranks, settings in (("whole", 1, []), ("updates", 2, lora)):
        assert finetune(ranks, tmp_path / name, *data, *run, *settings, config=file, settings=[]) == [""] * ranks
        losses.append([record["loss"] for record in metrics(tmp_path / name)])
        assert losses[-1][-1] < 0.9 * losses[-1][0]
        export_model(alone(tmp_path / name), tmp_path / f"{name} exported")
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-6)  # B is zero, and tp sums otherwise
    before = load_file(tmp_path / "published/model.safetensors")
    tuned = load_file(tmp_path / "whole exported/model.safetensors")
    merged = load_file(tmp_path / "updates exported/model.safetensors")
    assert not any(torch.equal(before[key], tuned[key]) for key in before)
    changed = {key for key in before if not torch.equal(before[key], merged[key])}
    assert changed == {key for key in before if "_proj." in key}
    assert generate.main(alone(tmp_path / "updates", "--generate.tokens=3", f"--generate.prompt={TALKS[0][0]}"))
