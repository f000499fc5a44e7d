import io
import sys
from pathlib import Path

import pytest
import torch

from recipes import generate
from tests.recipes.warm import alone, pretrain
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.checkpoint.weights import load_newest_weights
from torchllm.config import Generate, Model
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.initialize import initialize

VOCAB, END = 258, 257


def decoder(model: Model, folder: Path | None = None) -> Decoder:
    with torch.device("meta"):
        made = build_model(model)
    initialize([made], model, torch.device("cpu"), seed=3)
    if folder is not None:
        load_newest_weights(folder, "auto", [made])
    return made


def continued(
    model: Decoder, prompt: list[int], settings: Generate, end: int = -1, max_length: int = 64, seed: int = 0
) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return generate.continue_text(model, torch.tensor([prompt]), settings, VOCAB, {end}, max_length, generator)


@torch.no_grad()
def recomputed(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """The greedy continuation without a cache: the whole text goes through the model for every token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens]), torch.arange(len(tokens)).unsqueeze(0))[0, -1, :VOCAB]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


GREEDY = Generate(tokens=24, temperature=0.0)
SIZES = {"layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "max_sequence_length": 64, "initial_std": 0.3}


def test_the_cache_changes_nothing() -> None:
    prompt = [256, 100, 101, 102, 32]
    for model in (
        Model(kv_heads=2, **SIZES),
        Model(attention="eager", **SIZES),
        Model(family="gpt", tied_embeddings=True, **SIZES),
        Model(experts=6, shared_experts=1, dense_layers=1, expert_ffn=24, **SIZES),
    ):
        expected = recomputed(decoder(model), prompt, GREEDY.tokens)
        assert len(set(expected)) > 3  # a model that repeats one token would show little
        assert continued(decoder(model), prompt, GREEDY) == expected, model


def test_it_stops_at_the_end_token() -> None:
    model = Model(**SIZES)
    free = continued(decoder(model), [256], GREEDY)
    end = next(token for token in free if token != free[0])
    assert continued(decoder(model), [256], GREEDY, end=end) == free[: free.index(end) + 1]


def test_it_stops_at_the_longest_text() -> None:
    """The begin token, then 10 of text."""
    model = Model(**SIZES)
    prompt = [256, 1, 2]
    assert continued(decoder(model), prompt, GREEDY, max_length=10) == recomputed(decoder(model), prompt, 8)
    assert continued(decoder(model), [256, *range(10)], GREEDY, max_length=10) == []


def test_learned_positions_end_with_their_table() -> None:
    model = Model(family="gpt", **(SIZES | {"max_sequence_length": 12}))
    assert len(continued(decoder(model), [256, 1, 2], GREEDY, max_length=12)) == 10


def test_a_seed_repeats_its_text() -> None:
    model = Model(**SIZES)
    settings = Generate(tokens=40, temperature=1.5, top_k=3)
    first = continued(decoder(model), [256], settings, seed=0)
    assert continued(decoder(model), [256], settings, seed=0) == first
    assert continued(decoder(model), [256], settings, seed=1) != first


def sampled(settings: Generate) -> list[int]:
    """200 tokens from one set of logits, the highest the last."""
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    generator = torch.Generator().manual_seed(0)
    return [generate.sample_token(logits, settings, generator) for _ in range(200)]


def test_samples_keep_to_the_top_and_to_the_temperature() -> None:
    assert set(sampled(Generate(top_k=3, temperature=1.5))) == {1, 2, 3}
    assert set(sampled(Generate(top_k=0, temperature=9.0))) == {0, 1, 2, 3}
    assert set(sampled(Generate(temperature=0.0))) == {3}
    cold = sampled(Generate(top_k=0, temperature=0.1))
    assert cold.count(3) > 190


def test_a_checkpoint_of_two_ranks_speaks_on_one_device(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "dé≠"
    config = alone(trained, "--generate.temperature=0", f"--generate.prompt={prompt}")
    text = generate.main(config)
    assert capsys.readouterr().out == f"--- step 8, 20 tokens at temperature 0 ---\n{text}\n"
    assert generate.main(config) == text
    ids = recomputed(decoder(config.model, trained), [256, *prompt.encode()], 20)
    continuation = bytes(ids).decode(errors="replace")
    assert text.encode(errors="replace") == (prompt + continuation).encode(errors="replace")


@pytest.mark.exhaustive
def test_experts_that_two_ranks_shared_speak_on_one_device(tmp_path: Path) -> None:
    experts = ["--model.experts=8", "--model.shared_experts=1", "--model.router_bias=true", "--parallel.ep=2"]
    assert pretrain(2, tmp_path, *experts) == ["", ""]
    config = alone(tmp_path, "--generate.temperature=0", "--generate.prompt=def ")
    ids = recomputed(decoder(config.model, tmp_path), [256, *b"def "], 20)
    assert generate.main(config) == "def " + bytes(ids).decode(errors="replace")


def test_a_named_checkpoint_is_used_instead_of_the_newest(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate.main(alone(trained, f"--checkpoint.resume={trained}/checkpoints/step-00000004"))
    assert capsys.readouterr().out.startswith("--- step 4, 20 tokens at temperature 0.8 ---\n")


def test_a_terminal_that_cannot_show_it_all_is_no_error(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    generate.main(alone(trained, "--generate.prompt=dé≠"))
    sys.stdout.flush()
    assert b"\nd??" in terminal.getvalue()


def test_no_checkpoint_is_an_error_that_says_where_it_looked(trained: Path, tmp_path: Path) -> None:
    message = f"{tmp_path}/checkpoints holds no checkpoint; name a run folder's config"
    with pytest.raises(CheckpointError, match=message):
        generate.main(alone(trained, f"--run.folder={tmp_path}"))
    with pytest.raises(CheckpointError, match="step-00000009"):
        generate.main(alone(trained, f"--checkpoint.resume={trained}/checkpoints/step-00000009"))
