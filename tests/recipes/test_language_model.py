"""torchllm.load, on a trained run and on its export."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

import torchllm
from recipes import export
from tests.recipes.warm import alone
from torchllm.config.errors import UserError
from torchllm.tools.front.resolve import load_run
from torchllm.tools.generate.language_model import LanguageModel
from torchllm.tools.launch import compile_cache

PROMPTS = ["def ", "class Ä", ""]
TEXTS = ["import numpy", "dé≠ x = 1\n"]


@pytest.fixture(scope="module")
def model(trained: Path) -> LanguageModel:
    return torchllm.load(trained, dtype="float32")


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "model"
    export.main(alone(trained, f"--export.folder={folder}"))
    return folder


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, torchllm; print('torch' in sys.modules, torchllm.load.__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False load True\n"
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        torchllm.lode  # noqa: B018  # the error is wanted


def test_code_that_is_compiled_comes_from_the_users_own_folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's default is a folder of /tmp that another user may have made first."""
    monkeypatch.setenv(compile_cache.VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(compile_cache.VARIABLE)
    config = str(trained / "config.toml")
    load_run([config], one_device=True)
    assert compile_cache.VARIABLE not in os.environ
    load_run([config, "--model.attention=flex"], one_device=True)
    assert compile_cache.is_private(Path(os.environ[compile_cache.VARIABLE]))


def test_texts_do_not_depend_on_each_other(model: LanguageModel) -> None:
    for temperature in (0.0, 1.0):
        texts = model.generate(PROMPTS, tokens=20, temperature=temperature, seed=7)
        assert [text.startswith(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)] == [True] * 3
        for i, prompt in enumerate(PROMPTS):
            assert model.generate([prompt], tokens=20, temperature=temperature, seed=7 + i) == [texts[i]]


def test_an_export_has_the_losses_of_transformers_and_the_texts_of_the_run(
    model: LanguageModel, exported: Path
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    published = torchllm.load(exported, dtype="float32")
    assert published.manifest is None
    expected = []
    for text in TEXTS:
        ids = torch.tensor([[256, *text.encode()]])
        with torch.no_grad():
            expected.append(F.cross_entropy(theirs(ids).logits[0, :-1], ids[0, 1:]).item())
    assert published.loss(TEXTS) == pytest.approx(expected, rel=1e-5)  # float32, other kernels
    assert published.bits_per_byte(TEXTS) == pytest.approx([loss / math.log(2) for loss in expected], rel=1e-5)
    assert published.generate(PROMPTS, tokens=20, temperature=0.0) == model.generate(
        PROMPTS, tokens=20, temperature=0.0
    )


def test_a_step_folder_is_loaded(trained: Path, model: LanguageModel) -> None:
    """The loss of a run's model counts the rows without a token, as training does; an export cuts them."""
    step = torchllm.load(trained / "checkpoints/step-00000004", dtype="float32")
    assert step.manifest is not None
    assert step.manifest.step == 4
    assert step.loss(TEXTS) != model.loss(TEXTS)
    newest = torchllm.load(trained / "checkpoints/step-00000008", dtype="float32")
    assert newest.loss(TEXTS) == model.loss(TEXTS)


def test_errors_say_what_is_wrong(model: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a list of texts"):
        model.generate("def ")
    with pytest.raises(UserError, match="text 1 has 0 tokens"):
        model.loss(["a", ""])
    with pytest.raises(UserError, match="must be at least 1"):
        model.generate(["a"], tokens=0)
    with pytest.raises(UserError, match="not trained on conversations"):
        model.chat([{"role": "user", "content": "a"}])
    with pytest.raises(UserError, match="nothing"):
        torchllm.load(tmp_path / "nothing")
