"""Low-rank updates for others: what peft makes of them, and the weights with the updates merged in."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.parity import CPU, Settings, build, tiny
from tests.tools.hub.published import content_of, save_published
from tests.tools.hub.test_config_json import model_of
from tests.workers import run
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from torchllm.config import Checkpoint, Config, Model
from torchllm.config.errors import UserError
from torchllm.config.schema import Lora
from torchllm.facts.shapes import parameter_shapes
from torchllm.models.decoder import Decoder, build_model
from torchllm.models.lora import apply_lora
from torchllm.optim.optimizer import build_optimizer
from torchllm.parallel.initialize import fill_all, materialize
from torchllm.tools.hub.adapter import (
    adapter_config,
    frozen_weights,
    published_weights,
    read_updates,
    seeded_weights,
    write_adapter,
)
from torchllm.tools.hub.by_key import ReadWeight, WeightReader
from torchllm.tools.hub.families.registry import HUB_FAMILIES
from torchllm.tools.hub.files import read_hub_config
from torchllm.tools.hub.initial import initial_weights
from torchllm.tools.hub.published_weights import HubWeights
from torchllm.tools.hub.weights import load_weights
from torchllm.tools.hub.weights_of_run import load_weights_of_run

LORA: Settings = {"lora.rank": 3, "lora.alpha": 12.0}
TOKENS = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(12).expand(2, 12)


def config_of(published: Path, settings: Settings) -> Config:
    return replace(tiny(settings), model=replace(read_hub_config(published).model, from_hf=str(published)))


def start_and_save(config: Config, folder: str, step: int) -> Manifest | None:
    """Start or resume a run, and save a checkpoint; the factors B of a fresh one are filled, as after some steps."""
    _, stages = build(config)
    optimizer = build_optimizer(stages, config.optimizer)
    checkpoints = Checkpointer(
        Checkpoint(),
        Path(folder),
        stages,
        optimizer,
        host_group=dist.group.WORLD,
        record={"config": asdict(config)},
        initial=initial_weights(config),
    )
    restored = checkpoints.resume()
    checkpoints.save(step, {})
    checkpoints.close()
    return restored


def trained_model(config: Config, step_folder: Path) -> Decoder:
    model = build_model(config.model)
    apply_lora(model, config.lora, torch.float32)
    materialize([model], CPU)
    fill_all([model], config.model, config.run.seed)
    if initial := initial_weights(config):
        initial.load([model], None)
    load_weights(step_folder, [model])
    return model


def test_a_resumed_run_reads_the_frozen_weights_again_and_no_others(tmp_path: Path) -> None:
    save_published("llama", tmp_path / "published")
    config = config_of(tmp_path / "published", LORA)
    assert run(start_and_save, 1, config, str(tmp_path), 1) == [None]
    (resumed,) = run(start_and_save, 1, config, str(tmp_path), 2)
    assert resumed is not None
    logits = []
    for step in (1, 2):
        logits.append(trained_model(config, tmp_path / f"checkpoints/step-0000000{step}")(TOKENS, POSITIONS))
    assert torch.equal(*logits)
    save_published("llama", tmp_path / "published", bos_token_id=7)
    with pytest.raises(Exception, match=r"model\.from_hf: the frozen weights are not those that the run started from"):
        run(start_and_save, 1, config, str(tmp_path), 3)


def test_a_recipe_that_uses_a_run_reads_its_frozen_weights_and_no_others(tmp_path: Path) -> None:
    """As recipes/generate.py and recipes/evaluate.py do."""
    save_published("llama", tmp_path / "published")
    config = config_of(tmp_path / "published", LORA)
    config = replace(config, run=replace(config.run, folder=str(tmp_path)))
    run(start_and_save, 1, config, str(tmp_path), 1)

    def read(config: Config) -> Decoder:
        model = build_model(config.model)
        apply_lora(model, config.lora, torch.float32)
        materialize([model], CPU)
        assert load_weights_of_run(config, [model]).step == 1
        return model

    expected = trained_model(config, tmp_path / "checkpoints/step-00000001")(TOKENS, POSITIONS)
    assert torch.equal(read(config)(TOKENS, POSITIONS), expected)
    with pytest.raises(UserError, match=r"run\.seed.*low-rank updates of weights that this key decides"):
        read(replace(config, run=replace(config.run, seed=5)))
    save_published("llama", tmp_path / "published", bos_token_id=7)
    with pytest.raises(CheckpointError, match=r"model\.from_hf: the frozen weights are not those"):
        read(config)


def test_frozen_weights_of_another_run_are_read_by_name(tmp_path: Path) -> None:
    plain = tiny({})
    run(start_and_save, 1, plain, str(tmp_path / "first"), 1)
    config = replace(tiny(LORA), checkpoint=Checkpoint(initial=str(tmp_path / "first")), run=replace(plain.run, seed=5))
    run(start_and_save, 1, config, str(tmp_path / "second"), 1)
    step_folder = tmp_path / "second/checkpoints/step-00000001"
    frozen = frozen_weights(config, read_manifest(step_folder))
    model = trained_model(config, step_folder)
    name = "layers.1.mlp.up_proj.base_layer.weight"
    assert torch.equal(frozen("layers.1.mlp.up_proj.weight"), model.get_parameter(name))
    seeded = seeded_weights(config.model, config.run.seed)
    assert not torch.equal(seeded("layers.1.mlp.up_proj.weight"), model.get_parameter(name))
    with pytest.raises(CheckpointError, match=r"holds no model\.layers\.9\.mlp"):
        frozen("layers.9.mlp.up_proj.weight")


def test_a_run_without_updates_has_none_to_write(tmp_path: Path) -> None:
    run(start_and_save, 1, tiny({}), str(tmp_path), 1)
    with pytest.raises(CheckpointError, match="holds no low-rank updates: it is of a run without LoRA"):
        read_updates(WeightReader(tmp_path / "checkpoints/step-00000001"))


def recorded_weights(model: Model, seed: int = 0) -> ReadWeight:
    """Open the frozen weights of a run of a published model, as its checkpoint has recorded them."""
    weights = HubWeights(model)
    return published_weights(model, seed, weights.record(*weights.open(Path(model.from_hf))))


def test_a_head_of_its_own_beside_a_published_tied_embedding_is_read(tmp_path: Path) -> None:
    save_published("llama31", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, file, {"format": "pt"})
    model = replace(read_hub_config(tmp_path).model, from_hf=str(tmp_path), tied_embeddings=False)
    assert torch.equal(recorded_weights(model)("lm_head.weight"), tensors["lm_head.weight"])


def test_rows_that_the_files_lack_are_those_that_the_run_drew(tmp_path: Path) -> None:
    save_published("llama", tmp_path)
    published = read_hub_config(tmp_path).model
    model = replace(published, from_hf=str(tmp_path), vocab=published.vocab + 4)
    weight = recorded_weights(model, seed=3)("embed_tokens.weight")
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    drawn = seeded_weights(model, 3)("embed_tokens.weight")
    assert torch.equal(weight, torch.cat([stored, drawn[published.vocab :]]))


def test_the_config_of_an_adapter_is_what_peft_needs() -> None:
    for base, name, revision in [
        ("org/model@v1", "org/model", "v1"),
        ("org/model", "org/model", None),
        ("/at@home/model", "/at@home/model", None),
    ]:
        config = Config(lora=Lora(rank=3, alpha=12.0, targets=("up_proj", "q_proj")))
        assert adapter_config(config, base, {"up_proj", "q_proj"}) == {
            "base_model_name_or_path": name,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "lora_alpha": 12.0,
            "lora_dropout": 0.0,
            "peft_type": "LORA",
            "r": 3,
            "revision": revision,
            "target_modules": ["q_proj", "up_proj"],
            "task_type": "CAUSAL_LM",
            "use_rslora": False,
        }, base


@pytest.mark.parametrize(("name", "target"), [("nanochat", "up_proj"), ("qwen3.5", "o_proj")])
def test_peft_reads_updates_of_a_matrix_with_another_name_in_files(name: str, target: str, tmp_path: Path) -> None:
    """It would drop them without a word."""
    import peft
    import transformers

    config = Config(model=model_of(content_of(name)), lora=Lora(rank=2, targets=(target,)))
    shapes = {key: shape for key, shape in parameter_shapes(config.model).items() if key.endswith(f"{target}.weight")}
    updates = {}
    for key, (rows, columns) in shapes.items():
        layer = key.removesuffix(".weight")
        updates |= {f"{layer}.lora_A.weight": torch.ones(2, columns), f"{layer}.lora_B.weight": torch.ones(rows, 2)}
    write_adapter(tmp_path, config, HUB_FAMILIES[content_of(name)["model_type"]], updates, "")
    published = tmp_path / "published"
    save_published(name, published)
    base = transformers.AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, tmp_path).state_dict()
    factors = [tensor for key, tensor in merged.items() if ".lora_" in key]
    assert len(factors) == len(updates) > 0
    assert all(tensor.eq(1).all() for tensor in factors)


def test_updates_of_a_matrix_that_files_join_with_others_are_refused(tmp_path: Path) -> None:
    """Those of q would have the key of those of k and of v."""
    family = HUB_FAMILIES["qwen3_5_text"]
    config = Config(model=model_of(content_of("qwen3.5")), lora=Lora(rank=3))
    factor = torch.zeros(3, config.model.hidden)
    message = "layers.0.self_attn.q_proj: files of type 'qwen3_5_text' have it in one matrix with others, .*in_proj_qkv"
    with pytest.raises(UserError, match=message):
        write_adapter(tmp_path, config, family, {"layers.0.self_attn.q_proj.lora_A.weight": factor}, "")
    assert not list(tmp_path.iterdir())
    write_adapter(tmp_path, config, family, {"layers.3.self_attn.k_proj.lora_A.weight": factor}, "")
