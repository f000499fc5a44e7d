"""recipes/export.py: what it writes is the model, for transformers."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from recipes import export
from tests.recipes.saved_run import SIZES, save_run
from tests.tools.hub.published import CONFIGS, as_json, save_published
from torchllm.checkpoint.manifest import CheckpointError, DamagedCheckpoint
from torchllm.config import Config, Generate, Kinds, Model
from torchllm.config.errors import UserError
from torchllm.config.schema import Lora
from torchllm.models.decoder import Decoder
from torchllm.tools.continue_texts import continue_texts
from torchllm.tools.front.preflight import inspect_export
from torchllm.tools.front.resolve import load_run
from torchllm.tools.hub.files import read_hub_config
from torchllm.tools.hub.published_weights import HubWeights

VOCAB = 258
"""ids of the tokenizer "bytes" """
LORA = Lora(rank=3, alpha=12.0)
MODELS = {
    "llama": Model(kv_heads=2, **SIZES),
    "llama tied, scaled": Model(
        tied_embeddings=True, rope_scaling_factor=4.0, rope_original_length=16, rope_theta=5e5, **SIZES
    ),
    "mistral": Model(**(SIZES | {"heads": 6, "head_dim": 8})),
    "glm": Model(
        experts=4,
        expert_ffn=24,
        shared_experts=2,
        dense_layers=1,
        router_score="sigmoid",
        router_bias=True,
        router_scale=2.5,
        rotary_fraction=0.5,
        **SIZES,
    ),
    "qwen3.5": Model(
        qk_norm="head",
        norm_offset=True,
        attention_gate="element",
        rotary_fraction=0.5,
        delta_key_heads=2,
        pattern=("delta", "full"),
        kinds=Kinds(delta={"mixer": "gated_delta"}, full={}),
        **SIZES,
    ),
    "gemma 4": Model(
        **(SIZES | {"heads": 4}),
        kv_heads=2,
        qk_norm="head",
        v_norm=True,
        norm_position="both",
        block_scale=True,
        activation="gelu_tanh",
        softmax_scale=1.0,
        embedding_multiplier=SIZES["hidden"] ** 0.5,
        pattern=("local", "full"),
        kinds=Kinds(
            local={"window": 9},
            full={
                **{"head_dim": 12, "kv_heads": 1, "keys_as_values": True},
                **{"rope_proportional": True, "rotary_fraction": 0.5, "rope_theta": 500.0},
            },
        ),
    ),
    "olmo hybrid": Model(
        qk_norm="width",
        delta_value_dim=12,
        delta_negative=True,
        delta_norm_epsilon=1e-5,
        rotary_fraction=0.0,
        pattern=("delta", "full"),
        kinds=Kinds(delta={"mixer": "gated_delta"}, full={"norm_position": "after"}),
        **SIZES,
    ),
    "gpt2 not tied": Model(family="gpt", **SIZES),
}


def config_of(run: Path, *overrides: str) -> Config:
    return load_run([str(run / "config.toml"), *overrides], one_device=True, inspect=inspect_export)


def exported(run: Path, *overrides: str) -> Path:
    """Export into a folder beside the run's."""
    folder = run.parent / "out"
    export.main(config_of(run, f"--export.folder={folder}", *overrides))
    return folder


def refused(capsys: pytest.CaptureFixture[str], run: Path, *overrides: str) -> str:
    with pytest.raises(SystemExit) as ended:
        config_of(run, *overrides)
    assert ended.value.code == 2
    return capsys.readouterr().err


@torch.no_grad()
def logits_of(model: Decoder, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions)[..., :VOCAB]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_transformers_has_the_same_logits_and_writes_the_same_text(name: str, tmp_path: Path) -> None:
    (model,) = save_run(tmp_path / "run", MODELS[name]).values()
    folder = exported(tmp_path / "run")
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert theirs.config.tie_word_embeddings == MODELS[name].tied_embeddings
    tokens = torch.randint(VOCAB, (2, 48), generator=torch.Generator().manual_seed(0))
    expected = logits_of(model, tokens)
    with torch.no_grad():
        found = theirs(tokens).logits
    assert found.shape == expected.shape  # the rows of padding are gone
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

    prompt = torch.tensor([[256, *b"def "]])
    settings = Generate(tokens=20, temperature=0.0)
    (text,) = continue_texts(model, prompt.tolist(), settings, vocab=VOCAB, ends={257}, longest=64)
    generated = theirs.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert len(set(text)) > 3  # a model that repeats one token would show little
    assert generated == text


def test_the_tokenizer_gives_the_ids_of_the_run(tmp_path: Path) -> None:
    save_run(tmp_path / "run", MODELS["llama"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported(tmp_path / "run"))
    text = "Ünïcode 🙂\n\n  two  blanks"
    ids = tokenizer(text).input_ids
    assert ids == [256, *text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (256, 257, VOCAB)


def test_a_model_is_as_long_as_the_sequences_that_it_was_trained_on(tmp_path: Path) -> None:
    for length, expected in ((16, 32), (64, 64)):  # it was trained on 32
        run = tmp_path / str(length) / "run"
        save_run(run, replace(MODELS["llama"], max_sequence_length=length))
        folder = exported(run)
        assert transformers.AutoConfig.from_pretrained(folder).max_position_embeddings == expected
        assert transformers.AutoTokenizer.from_pretrained(folder).model_max_length == expected


def test_a_tokenizer_of_another_size_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(**(SIZES | {"vocab": 5000}))
    save_run(tmp_path / "run", model)
    folder = exported(tmp_path / "run")
    assert not list(folder.glob("tokenizer*"))
    assert "without tokenizer files: data.tokenizer = 'bytes' has 258 ids, but model.vocab" in capsys.readouterr().out
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (5000, None)
    assert "There are no tokenizer files: data.tokenizer" in (folder / "README.md").read_text()


def test_the_mean_of_checkpoints_is_rounded_once(tmp_path: Path) -> None:
    models = save_run(tmp_path / "run", MODELS["llama"], steps=(1, 2, 3, 4))
    folder = exported(tmp_path / "run", "--export.average=3", "--export.dtype=bfloat16")
    found = load_file(folder / "model.safetensors")
    weights = [dict(models[step].named_parameters())["layers.1.mlp.up_proj.weight"] for step in (4, 3, 2)]
    mean = ((weights[0] + weights[1] + weights[2]) / 3).detach()
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], mean.bfloat16())
    rounded_before = sum(weight.bfloat16().float() for weight in weights) / 3
    assert not torch.equal(rounded_before.bfloat16(), mean.bfloat16())  # the test can tell
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    card = (folder / "README.md").read_text()
    assert "; step mean of 2, 3, 4.\n" in card


def test_a_model_that_came_from_another_family_goes_back_to_it(tmp_path: Path) -> None:
    """Qwen3's form is that of Llama but for its norms; the record says where the weights have come from."""
    model = Model(**(SIZES | {"vocab": 300}))
    initial = {"from": "org/name@1", "model_type": "llama", "vocab": 290}
    record = {"initial": {"from": "runs/first", "step": 3, "initial": initial}}
    save_run(tmp_path / "run", model, record=record)
    folder = exported(tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("llama", 290)
    assert load_file(folder / "model.safetensors")["lm_head.weight"].shape == (290, 32)
    assert "base_model: org/name\n" in (folder / "README.md").read_text()


ROUND_TRIPS = ["llama31", "qwen2-window", "olmo3", "smollm3", "qwen3-moe", "glm4-moe", "gpt2"]


@pytest.mark.parametrize(
    "name",
    [*ROUND_TRIPS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in CONFIGS if name not in ROUND_TRIPS)],
)
def test_a_published_model_comes_back_bitwise(name: str, tmp_path: Path) -> None:
    if transformers.__version__ < "5" and "rope_parameters" in CONFIGS[name][1]:
        pytest.skip("transformers 4 cannot make this model: it does not know rope_parameters")
    published = tmp_path / "published"
    hub_model = save_published(name, published)
    config = hub_model.config
    model = replace(read_hub_config(published).model, from_hf=str(published))
    if model.score_softcap:
        model = replace(model, attention="eager")  # sdpa has none
    record: dict[str, Any] = {}

    def fill(decoder: Decoder) -> None:
        record["initial"] = HubWeights(model).load([decoder], None)

    (decoder,) = save_run(tmp_path / "run", model, record=record, fill=fill).values()
    folder = exported(tmp_path / "run")
    exported_model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before, after = load_file(published / "model.safetensors"), load_file(folder / "model.safetensors")
    if name.startswith("olmo-hybrid"):  # transformers 5.24 writes it in another form than the published one
        before, after = hub_model.state_dict(), exported_model.state_dict()
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    found = transformers.AutoConfig.from_pretrained(folder)
    assert type(found) is type(config)
    assert as_json(found)["architectures"] == as_json(config)["architectures"]
    tokens = torch.randint(96, (1, 48), generator=torch.Generator().manual_seed(0))
    expected = logits_of(decoder, tokens)
    with torch.no_grad():
        logits = exported_model(tokens).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def save_lora_run(folder: Path, family: str, **changes: Any) -> Decoder:
    """Write the run folder of a published model with low-rank updates, and return what was trained.

    changes: of [model], from the published one's.
    """
    published = folder.parent / "published"
    save_published(family, published)
    model = replace(read_hub_config(published).model, from_hf=str(published), **changes)
    record: dict[str, Any] = {}

    def fill(decoder: Decoder) -> None:
        record["initial"] = HubWeights(model).load([decoder], None)

    (decoder,) = save_run(folder, model, record=record, fill=fill, lora=LORA).values()
    return decoder


@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=pytest.mark.exhaustive)])
def test_a_run_with_lora_is_exported_merged_and_as_an_adapter(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    model = save_lora_run(tmp_path / "run", family)
    adapter = tmp_path / "adapter"
    export.main(config_of(tmp_path / "run", f"--export.folder={adapter}", "--export.adapter=true"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported(tmp_path / "run"), dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype=torch.float32)
    tokens = torch.randint(96, (2, 48), generator=torch.Generator().manual_seed(0))
    expected = logits_of(model, tokens)
    tolerance = 1e-5 * expected.abs().max()
    with torch.no_grad():
        assert (merged(tokens).logits - expected).abs().max() <= tolerance
        assert (base(tokens).logits - expected).abs().max() > 1000 * tolerance  # the updates are not small
        tuned = peft.PeftModel.from_pretrained(base, adapter).eval()
        assert (tuned(tokens).logits - expected).abs().max() <= tolerance
    assert sorted(path.name for path in adapter.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    card = (adapter / "README.md").read_text()
    assert "library_name: peft" in card
    assert 'model = PeftModel.from_pretrained(model, "adapter")' in card
    assert "is not read" not in capsys.readouterr().err


def test_a_mean_with_lora_is_that_of_merged_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of random weights, and of their moving average, in which the frozen weights are no part."""
    models = save_run(tmp_path / "run", MODELS["llama"], steps=(1, 2), lora=LORA, ema_factor=2.0)
    layers = [models[step].layers["1"].mlp.up_proj for step in (1, 2)]
    products = [4.0 * layer.lora_B.weight @ layer.lora_A.weight for layer in layers]
    frozen = layers[0].base_layer.weight
    mean = (frozen + 0.5 * (products[0] + products[1])).detach()
    key = "model.layers.1.mlp.up_proj.weight"
    found = load_file(exported(tmp_path / "run", "--export.average=2") / "model.safetensors")
    torch.testing.assert_close(found[key], mean, rtol=0.0, atol=1e-6)
    assert torch.equal(found["model.norm.weight"], models[1].norm.weight)
    average = tmp_path / "average"
    export.main(config_of(tmp_path / "run", f"--export.folder={average}", "--export.ema=true"))
    expected = (frozen + 4.0 * products[1]).detach()  # both factors are doubled
    averaged = load_file(average / "model.safetensors")
    torch.testing.assert_close(averaged[key], expected, rtol=0.0, atol=1e-6)
    assert torch.equal(averaged["model.norm.weight"], models[2].norm.weight)  # frozen: of no average
    arguments = ["--export.folder=other", "--export.average=2", "--export.adapter=true"]
    message = refused(capsys, tmp_path / "run", *arguments)
    assert "--export.average: is 2, but a mean of low-rank updates has another rank: set it to 1, or" in message


def test_frozen_weights_must_be_those_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_lora_run(tmp_path / "run", "llama")
    config = config_of(tmp_path / "run", f"--export.folder={tmp_path / 'out'}")
    with pytest.raises(UserError, match=r"run\.seed: 0 in the checkpoint, 1 now: .* updates of weights that this key"):
        export.main(replace(config, run=replace(config.run, seed=1)))
    save_published("llama", tmp_path / "published", bos_token_id=7)
    with pytest.raises(CheckpointError, match=r"model\.from_hf: the frozen weights are not those that the run started"):
        export.main(config)
    shutil.rmtree(tmp_path / "published")
    message = refused(capsys, tmp_path / "run", "--export.folder=out")
    assert "model.from_hf: its frozen weights are not there: " in message
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_what_cannot_be_exported_is_told_before_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "run", MODELS["llama"])
    save_run(tmp_path / "other", Model(family="gpt", qk_norm="head", **SIZES))
    few = "--export.average: 2 checkpoints are to be averaged, .* holds 1: lower it, or keep more in the run"
    for name, words, message in (
        ("run", ["--export.adapter=true"], "--export.adapter: does nothing in this run: it needs lora.rank over 0"),
        ("run", ["--export.average=2"], few),
        ("other", [], "model.family: the model has the form of no published family:"),
        ("other", [], "models of type 'gpt2' cannot have model.qk_norm = 'head'"),
    ):
        assert re.search(message, refused(capsys, tmp_path / name, "--export.folder=out", *words))
    assert "export.folder: is missing: name a new folder" in refused(capsys, tmp_path / "run")
    folder = exported(tmp_path / "run")
    before = {path.name: path.stat() for path in folder.iterdir()}
    message = refused(capsys, tmp_path / "run", f"--export.folder={folder}")
    assert f"--export.folder: {str(folder)!r} exists, and nothing is overwritten: name another folder" in message
    assert {path.name: path.stat() for path in folder.iterdir()} == before


def test_a_full_disk_and_a_damaged_checkpoint_leave_nothing(tmp_path: Path) -> None:
    models = save_run(tmp_path / "run", MODELS["llama"], steps=(1, 2))
    full = patch.object(shutil, "disk_usage", return_value=Mock(free=1000))
    with full, pytest.raises(CheckpointError, match=r"out needs \d+ bytes, 1000 are free in .*: make room"):
        exported(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"holds no extra.ema.embed_tokens.weight: .* or it has no moving av"):
        exported(tmp_path / "run", "--export.ema=true")
    (file,) = (tmp_path / "run/checkpoints/step-00000002").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"damaged.*: name an older checkpoint, --checkpoint.resume=STEP"):
        exported(tmp_path / "run")
    assert os.listdir(tmp_path) == ["run"]
    named = exported(tmp_path / "run", f"--checkpoint.resume={tmp_path}/run/checkpoints/step-00000001")
    assert torch.equal(load_file(named / "model.safetensors")["model.norm.weight"], models[1].norm.weight)
