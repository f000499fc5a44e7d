"""How much a fine-tuned model recalls: the figures, the conversation, and a tiny pipeline from end to end."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.launched import clean
from tests.tiny_run import ROOT
from torchllm.cli import main
from torchllm.models.head import IGNORED
from torchllm.tools.prepare.chat.examples import Example
from torchllm.tools.prepare.chat.template import Conversation
from train_configs.pipeline.laptop.docstrings import (
    BATCH,
    Answer,
    Figures,
    Pair,
    ask,
    bits_of_answers,
    conversation_lines,
    figure_lines,
)

PAIRS = [Pair(f"What does {name} do?", f"It is {name}.") for name in ("json.dumps", "random.choice", "a.b", "c.d")]


def test_every_question_is_asked_once_and_compared_letter_by_letter() -> None:
    def answers(questions: list[Any], **settings: Any) -> list[str]:
        assert settings["temperature"] == 0.0
        assert settings["batch_size"] == BATCH  # all questions at once, so that the progress counts all of them
        return [f"It is {messages[0]['content'].split()[2]}." for messages in questions]

    many = [*PAIRS * 40, Pair("What does e do?", "it is e.")]
    asked = ask(SimpleNamespace(answers=answers), many)  # a model that knows all
    assert [answer.pair for answer in asked] == many
    assert [answer.is_right for answer in asked] == [True] * 160 + [False]


def test_bits_of_answers_count_the_answer_without_its_end() -> None:
    """A model whose every token of an answer costs as many nats as its id says."""

    def model(ids: Tensor, positions: Tensor, documents: None, labels: Tensor) -> Tensor:
        assert ids.shape == positions.shape == labels.shape
        assert torch.equal(positions[0], torch.arange(ids.shape[1]))
        return labels[labels != IGNORED].sum().float()

    def examples(talk: Conversation) -> SimpleNamespace:
        assert [message["role"] for message in talk.messages] == ["user", "assistant"]
        ids, is_target = np.array([5, 6, 7, 1, 2, 9, 4]), np.array([False, False, False, True, True, True, False])
        return SimpleNamespace(examples=[Example(ids, is_target)])

    pairs = [Pair("a", "é"), Pair("b", "xyz")]
    with_bytes = SimpleNamespace(model=model, tokenizer=SimpleNamespace(byte_lengths=np.array([9, 1, 3, *[9] * 7])))
    bits = bits_of_answers(with_bytes, SimpleNamespace(examples=examples), pairs)
    assert bits == pytest.approx(2 * (1 + 2) / math.log(2) / (2 * (1 + 3)))


def test_the_conversation_has_right_answers_and_says_which_is_wrong() -> None:
    trained = [Answer(pair, pair.answer if pair is not PAIRS[2] else "no") for pair in PAIRS]
    held_out = [Answer(Pair("What is m?", "A thing."), "Another.")]
    assert conversation_lines(trained, held_out) == [
        *("> What does json.dumps do?", "It is json.dumps."),
        *("> What does random.choice do?", "It is random.choice."),
        *("> What is m?", "Another."),
        "  (wrong; it is about a module that it never saw. The docstring says: A thing.)",
    ]
    assert conversation_lines(trained, [])[-1].startswith("  (wrong; it is about a pair that it was trained on.")
    assert conversation_lines([], []) == []


def test_the_figures_in_words() -> None:
    assert figure_lines(Figures(5, 10, 2.345, 1.5, 3)) == [
        "recalled exactly: 5 of 10 trained first sentences, 50.0%",
        "bits per byte of 3 answers about held-out modules: 2.35 before fine-tuning, 1.50 after",
    ]


FEW = 'module.name < "bd" or module.name.startswith("asyncio")'
SMALLER = {
    "pretrain.toml": {
        "layers = 4": "layers = 1",
        "hidden = 192": "hidden = 48",
        "vocab = 4096": "vocab = 512",
        "validation_fraction = 0.02": "validation_fraction = 0.1",
        "steps = 220": "steps = 24",
    },
    "finetune.toml": {"epochs = 7.0": "epochs = 2.0"},
    "docstrings.py": {
        "build_library(standard_library())": f"build_library(module for module in standard_library() if {FEW})"
    },
}


def test_the_scripts_are_told_by_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("torchllm.cli.start", started.append)
    main(["pipeline", "laptop", "out"])
    assert started == [["bash", str(ROOT / "train_configs/pipeline/laptop.sh"), "out"]]
    for words in ([], ["stages"], ["laptop.toml"], ["8gpu", "out", "more"]):
        with pytest.raises(SystemExit, match="2"):
            main(["pipeline", *words])
        assert "usage: torchllm pipeline {8gpu,laptop} [FOLDER]" in capsys.readouterr().err


def test_a_stage_runs_once_and_a_failure_ends_the_pipeline(tmp_path: Path) -> None:
    script = tmp_path / "mine.sh"
    script.write_text(
        f"source {ROOT}/train_configs/pipeline/stages.sh out\n"
        'stage first bash -c "echo $WORD >>out/log"\nWORD=b stage second python mine.py\ntalk out/config.toml\n'
    )

    def run() -> "subprocess.CompletedProcess[str]":
        environment = clean({"PYTHON": sys.executable, "WORD": "a"})
        return subprocess.run(
            ["bash", str(script)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=environment,
            stdin=subprocess.DEVNULL,
        )

    (tmp_path / "mine.py").write_text("raise SystemExit(75)")
    assert run().returncode == 75
    (tmp_path / "mine.py").write_text("import os; print(os.environ['WORD'], file=open('out/log', 'a'))")
    for _ in range(2):
        done = run()
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out/log").read_text() == "a\nb\n"
        assert done.stdout.endswith("now: torchllm generate out/config.toml\n")
    assert done.stdout.count("done earlier") == 2


@pytest.mark.exhaustive
def test_a_tiny_pipeline_from_nothing_to_a_model_that_answers(tmp_path: Path) -> None:
    """The laptop's stages on fewer modules and steps; a second call does nothing."""
    shutil.copytree(ROOT / "train_configs/pipeline", tmp_path / "train_configs/pipeline")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    scripts = tmp_path / "train_configs/pipeline"
    for name, changes in SMALLER.items():
        text = (scripts / "laptop" / name).read_text()
        for old, new in changes.items():
            assert old in text, old
            text = text.replace(old, new)
        (scripts / "laptop" / name).write_text(text)
    script = (scripts / "laptop.sh").read_text()
    (scripts / "laptop.sh").write_text(script.replace("--tokenizer.size=4096", "--tokenizer.size=512"))
    environment = clean({"PYTHONPATH": str(ROOT), "PYTHON": sys.executable})
    command = ["bash", str(scripts / "laptop.sh"), "small"]
    for _ in range(2):
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done earlier") == 8
    runs = tmp_path / "small"
    assert not (tmp_path / "runs").exists()
    figures = Figures(**json.loads((runs / "evaluate/figures.json").read_text()))
    assert 0 <= figures.recalled < figures.trained
    assert 0 < figures.bits_after < figures.bits_before
    assert "wrong; it is about" in (runs / "evaluate/conversation.txt").read_text()
    assert (runs / "export/model.safetensors").is_file()
