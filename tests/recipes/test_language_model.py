"""torchllm.load, on a trained run and on its export."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

import torchllm
from recipes import export
from tests.recipes.saved_run import SIZES
from tests.recipes.warm import alone
from tests.tools.test_continue_texts import decoder
from torchllm.config import Config, Model
from torchllm.config.errors import UserError
from torchllm.data.tokenizer import load_tokenizer
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


@pytest.mark.exhaustive
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


def test_multi_token_prediction_changes_no_loss() -> None:
    """The losses are of the next tokens alone."""
    config, tokenizer = Config(model=Model(**SIZES)), load_tokenizer("bytes")
    deep = replace(config, model=replace(config.model, mtp_depth=2))
    plain, predicting = (LanguageModel(c, decoder(c.model), tokenizer, None) for c in (config, deep))
    assert predicting.loss(TEXTS) == plain.loss(TEXTS)
    assert predicting.bits_per_byte(TEXTS) == plain.bits_per_byte(TEXTS)


def test_a_step_folder_is_loaded(trained: Path, model: LanguageModel) -> None:
    """The loss of a run's model counts the rows without a token, as training does; an export cuts them."""
    step = torchllm.load(trained / "checkpoints/step-00000004", dtype="float32")
    assert step.manifest is not None
    assert step.manifest.step == 4
    assert step.loss(TEXTS) != model.loss(TEXTS)
    newest = torchllm.load(trained / "checkpoints/step-00000008", dtype="float32")
    assert newest.loss(TEXTS) == model.loss(TEXTS)


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 258}


def gpt2() -> transformers.PreTrainedModel:
    """A model with fewer positions than the default of training.sequence_length."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 258, "n_positions": 24}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def llama_scaled_by_one() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(**TINY, intermediate_size=64, max_position_embeddings=64)
    config.rope_parameters = {"rope_type": "linear", "factor": 1.0, "rope_theta": 10000.0}
    return transformers.LlamaForCausalLM(config)


def mixtral_of_one_expert() -> transformers.PreTrainedModel:
    """Its router's one score is divided by itself: it cannot be trained."""
    sizes = {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 1}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TINY, **sizes, max_position_embeddings=64))


@pytest.mark.parametrize("build", [gpt2, llama_scaled_by_one, mixtral_of_one_expert])
def test_a_published_model_that_cannot_be_trained_so_is_used(
    build: Callable[[], transformers.PreTrainedModel], exported: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    theirs = build().eval()
    theirs.save_pretrained(tmp_path)
    shutil.copy(exported / "tokenizer.json", tmp_path)
    ours = torchllm.load(tmp_path, dtype="float32")
    ids = torch.tensor([[256, *TEXTS[0].encode()]])
    with torch.no_grad():
        expected = F.cross_entropy(theirs(ids).logits[0, :-1], ids[0, 1:]).item()
    assert ours.loss(TEXTS[:1]) == pytest.approx([expected], rel=1e-4)
    assert ours.config.longest_text == theirs.config.max_position_embeddings
    longest = "x" * ours.config.longest_text
    with pytest.raises(UserError, match=f"prompt 0 has {len(longest) + 1} tokens: up to {len(longest)} fit"):
        ours.generate([longest])


def test_errors_say_what_is_wrong(model: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a list of texts"):
        model.generate("def ")
    with pytest.raises(UserError, match="text 1 has 0 tokens"):
        model.loss(["a", ""])
    with pytest.raises(UserError, match="must be at least 1"):
        model.generate(["a"], tokens=0)
    for temperature in (-1.0, 1e-40, math.nan, math.inf):
        with pytest.raises(UserError, match=r"temperature must be 0, .* not (-1|1e-40|nan|inf)$"):
            model.generate(["a"], temperature=temperature)
    with pytest.raises(UserError, match="not trained on conversations"):
        model.chat([{"role": "user", "content": "a"}])
    with pytest.raises(UserError, match="nothing"):
        torchllm.load(tmp_path / "nothing")
