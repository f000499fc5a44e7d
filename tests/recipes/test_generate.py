import io
import json
import sys
from functools import partial
from pathlib import Path

import pytest

import torchllm
from recipes import generate
from tests.config.conftest import refusal
from tests.recipes.saved_run import SIZES, save_run
from tests.recipes.warm import alone
from tests.tools.test_continue_texts import decoder, recomputed
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.models.decoder import Decoder
from torchllm.tools.front.preflight import inspect_generation
from torchllm.tools.front.resolve import load_model
from torchllm.tools.hub.weights import load_newest_weights, load_weights


def trained_decoder(model: Model, folder: Path) -> Decoder:
    made = decoder(model)
    load_newest_weights(folder, partial(load_weights, stages=[made]))
    return made


def test_a_checkpoint_of_two_ranks_speaks_on_one_device(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "dé≠"
    config = alone(trained, "--generate.temperature=0", f"--generate.prompt={prompt}")
    text = generate.main(config)
    assert capsys.readouterr().out == f"--- step 8, up to 20 tokens at temperature 0 ---\n{text}\n"
    assert generate.main(config) == text
    ids = recomputed(trained_decoder(config.model, trained), [256, *prompt.encode()], 20)
    continuation = bytes(ids).decode(errors="replace")
    assert text.encode(errors="replace") == (prompt + continuation).encode(errors="replace")
    capsys.readouterr()
    generate.main(alone(trained, f"--checkpoint.resume={trained}/checkpoints/step-00000004"))
    assert capsys.readouterr().out.startswith("--- step 4, up to 20 tokens at temperature 0.8 ---\n")


def test_prompts_of_a_file_are_continued_together(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("def\nimport numpy\n")
    greedy = ["--generate.temperature=0", "--generate.prompt=class"]
    config = alone(trained, *greedy, f"--generate.prompts_file={file}")
    model = trained_decoder(config.model, trained)
    texts = [
        text + bytes(recomputed(model, [256, *text.encode()], 20)).decode(errors="replace")
        for text in ("def", "import numpy")
    ]
    assert generate.main(config) == "\n".join(texts)
    with pytest.raises(UserError, match=r"generate\.prompts_file: .*nowhere"):
        generate.main(alone(trained, f"--generate.prompts_file={tmp_path}/nowhere"))


def test_samples_of_each_prompt_go_into_a_file_without_the_prompts_words(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "texts.jsonl"
    words = ["--generate.prompt=class", "--generate.samples=2", f"--generate.output={output}"]
    texts = generate.main(alone(trained, *words))
    records = [json.loads(line) for line in output.read_text().split("\n") if line]
    assert [record["prompt"] for record in records] == ["class", "class"]
    assert len({record["answer"] for record in records}) == 2
    assert "\n".join(record["prompt"] + record["answer"] for record in records) == texts


def test_what_is_wrong_is_said_before_a_model_is_made(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.jsonl").write_text("mine")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = [
        f"--generate.output={tmp_path}/old.jsonl",
        "--generate.prompts_file=nowhere",
        "--generate.temperature=1e-40",
    ]
    lines = refusal(capsys, lambda: load_model([str(trained), *words], inspect=inspect_generation))
    assert len(lines) == 4
    assert any("exists, and nothing is overwritten" in line for line in lines)
    assert any("generate.prompts_file: nowhere cannot be read" in line for line in lines)
    assert any("--generate.temperature: must be 0, for the likeliest tokens, or" in line for line in lines)
    assert any("a launcher has started 2 processes: start it without one" in line for line in lines)
    lines = refusal(capsys, lambda: load_model([str(tmp_path)]))
    assert lines == [
        f"{tmp_path}: is neither a run, which has a config.toml, nor a published model, which has a config.json"
    ]


def test_the_moving_average_speaks_if_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the weights times 0: the likeliest id is then always the first."""
    save_run(tmp_path / "run", Model(**SIZES), ema_factor=0.0001)
    words = ["--generate.prompt=a", "--generate.temperature=0", "--generate.tokens=3"]
    weights = load_model([str(tmp_path / "run"), *words])
    average = load_model([str(tmp_path / "run"), *words, "--generate.ema=true", "--optimizer.ema_decay=0.5"])
    assert generate.main(weights) != generate.main(average)
    assert torchllm.load(tmp_path / "run", ema=False).loss(["a"]) == torchllm.load(tmp_path / "run").loss(["a"])
    capsys.readouterr()
    line = "--generate.ema: does nothing in this run: it needs optimizer.ema_decay over 0; or remove it"
    assert refusal(capsys, lambda: load_model([str(tmp_path / "run"), "--generate.ema=true"])) == [line]


def test_a_terminal_that_cannot_show_it_all_is_no_error(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    generate.main(alone(trained, "--generate.prompt=dé≠"))
    sys.stdout.flush()
    assert b"\nd??" in terminal.getvalue()


def test_no_checkpoint_is_an_error_that_says_where_it_looked(trained: Path, tmp_path: Path) -> None:
    message = f"{tmp_path}/checkpoints holds no checkpoint; name a run, or checkpoint"
    with pytest.raises(CheckpointError, match=message):
        generate.main(alone(trained, f"--run.folder={tmp_path}"))
    with pytest.raises(CheckpointError, match="step-00000009"):
        generate.main(alone(trained, f"--checkpoint.resume={trained}/checkpoints/step-00000009"))
