import io
import sys
from pathlib import Path

import pytest

from recipes import generate
from tests.recipes.warm import alone
from tests.tools.generate.test_continue_texts import decoder, recomputed
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.models.decoder import Decoder
from torchllm.tools.hub.weights import load_newest_weights


def trained_decoder(model: Model, folder: Path) -> Decoder:
    made = decoder(model)
    load_newest_weights(folder, "auto", [made])
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
        for text in ("class", "def", "import numpy")
    ]
    assert generate.main(config) == "\n".join(texts)
    with pytest.raises(UserError, match=r"generate\.prompts_file: .*nowhere"):
        generate.main(alone(trained, f"--generate.prompts_file={tmp_path}/nowhere"))


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
