"""`model.from_hf` in a config: what the weights fix, what may be chosen, and when it is not read."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.config.conftest import enter_empty_folder, refusal
from tests.config.test_applied_keys import changed
from tests.recipes.saved_run import SIZES, save_run
from tests.tools.hub.published import as_json, hub_config, save_published
from torchllm.checkpoint.manifest import Manifest, publish
from torchllm.config import Config, Kinds, Model
from torchllm.tools.config.idle import contradictions
from torchllm.tools.front.resolve import BEYOND_LLAMA, load_run, load_sizes
from torchllm.tools.front.start import load_configs
from torchllm.tools.hub.config_json import why_no_family
from torchllm.tools.hub.files import WHOLE_MODEL
from torchllm.tools.hub.hub import SMALL_FILES, find_hub_model
from torchllm.tools.hub.safetensors_header import HubFileError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
STDLIB = "--data.tokenizer=bytes"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with 264 tokens: as many as the tokenizer of bytes has, and 6."""
    folder = tmp_path_factory.mktemp("hub") / "llama"
    save_published("llama", folder, vocab_size=264)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, one process, and a hub without a network."""
    enter_empty_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    return tmp_path


def load(*arguments: str) -> Config:
    (config,) = load_configs(["--parallel.dp_shard=1", "--run.folder=run", *arguments])
    return config


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    os.environ.pop("WORLD_SIZE")
    return refusal(capsys, lambda: load("--check", *arguments))


def test_the_model_is_the_published_one(folder: Path, published: Path) -> None:
    model = load(f"--model.from_hf={published}", "--model.attention=eager").model
    sizes = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 24, "vocab": 264}
    assert {key: getattr(model, key) for key in sizes} == sizes
    assert model.norm_epsilon == 1e-6
    assert model.attention == "eager"
    assert model.from_hf == str(published)


def test_what_the_weights_fix_is_an_error_that_names_both(
    folder: Path, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").write_text(f'[model]\nfrom_hf = "{published}"\nlayers = 3\nkv_heads = 0\nvocab = 100\n')
    config = published / "config.json"
    lines = refused(capsys, "x.toml", "--model.tied_embeddings=true", "--model.family=gpt", "--model.experts=8")
    for line in (
        f"x.toml:4: model.kv_heads: is 4, but the weights have 2 (num_key_value_heads in {config}): remove the key",
        f"x.toml:3: model.layers: is 3, but the weights have 4 (num_hidden_layers in {config}): remove the key",
        "--model.tied_embeddings: is True, but the weights have False (tie_word_embeddings in "
        f"{config}): remove the key",
        f"x.toml:5: model.vocab: is 100, but the weights have 264 (vocab_size in {config}): remove the key",
        f"--model.experts: the weights of {config} are dense: remove the key, or set model.upcycle = true",
        f"--model.family: is gpt, but the weights have llama (model_type in {config}): remove the key",
    ):
        assert line in lines


def test_experts_are_copies_of_a_dense_models_layers(
    folder: Path, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upcycled = [f"--model.from_hf={published}", "--model.experts=4", "--model.upcycle=true"]
    model = load(*upcycled, "--model.ffn=24", "--model.dense_layers=1", "--model.router_score=sigmoid").model
    assert (model.experts, model.expert_width, model.layers, model.dense_layers) == (4, 24, 4, 1)
    assert "is used" not in capsys.readouterr().err
    save_published("mixtral", folder / "sparse", vocab_size=264)
    config = folder / "sparse/config.json"
    line = f"--model.upcycle: copies layers of a dense model, but the model of {config} has experts: remove the key"
    assert line in refused(capsys, f"--model.from_hf={folder}/sparse", "--model.upcycle=true")


def test_rotary_positions_epsilon_and_length_may_be_chosen_and_are_printed(
    folder: Path, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load(
        f"--model.from_hf={published}",
        "--model.rope_theta=500000",
        "--model.norm_epsilon=1e-5",
        "--model.max_sequence_length=4096",
        "--model.vocab=300",
    ).model
    assert (model.rope_theta, model.norm_epsilon, model.max_sequence_length, model.vocab) == (5e5, 1e-5, 4096, 300)
    printed = capsys.readouterr().err
    config = published / "config.json"
    for line in (
        f"--model.rope_theta: 500000.0 is used, not the 10000.0 of {config}",
        f"--model.norm_epsilon: 1e-05 is used, not the 1e-06 of {config}",
        f"--model.max_sequence_length: 4096 is used, not the 64 of {config}",
        f"--model.vocab: 36 rows more than in {config}: they start at random",
    ):
        assert line in printed


def test_a_key_of_a_kind_of_blocks_may_be_chosen_and_is_printed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(as_json(hub_config("olmo3")) | {"vocab_size": 264}))
    arguments = (f"--model.from_hf={tmp_path}", "--run.dry_run=true")
    published = load(*arguments).model
    assert published.pattern == ("window", "window", "window", "full")
    capsys.readouterr()
    model = load(*arguments, "--model.kinds.window.window=5", "--model.rope_theta=20000").model
    kinds = {"window": {"window": 5}, "full": published.kinds["full"]}
    assert model == replace(published, kinds=Kinds(kinds), rope_theta=20000.0)
    printed = capsys.readouterr().err
    assert f"--model.kinds.window.window: 5 is used, not the 9 of {config}" in printed
    assert f"--model.rope_theta: 20000.0 is used, not the 500000.0 of {config}" in printed
    model = load(*arguments, "--model.pattern=full").model
    assert (model.pattern, model.kinds) == (("full",), {"full": published.kinds["full"]})
    line = f"--model.pattern: ['full'] is used, not the ['window', 'window', 'window', 'full'] of {config}"
    assert line in capsys.readouterr().err
    assert refused(capsys, *arguments, "--model.window=5") == [
        f"--model.window: the blocks of {config} differ in it: set model.kinds.window.window or model.kinds.full.window"
    ]
    os.environ["WORLD_SIZE"] = "1"
    (line,) = refused(capsys, *arguments, "--model.kinds.near.window=5")
    assert line.startswith("--model.kinds.near.window: ")


def test_the_command_line_chooses_between_two_sources_of_initial_weights(
    folder: Path, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a file that names a published model the sizes stay."""
    save_run(folder / "a", Model(**(SIZES | {"layers": 3})))
    Path("published.toml").write_text(f'[model]\nfrom_hf = "{published}"\n')
    Path("run.toml").write_text('[checkpoint]\ninitial = "a"\n')
    config = load("published.toml", "--checkpoint.initial=a")
    assert (config.model.from_hf, config.checkpoint.initial, config.model.layers) == ("", "a", 4)
    assert capsys.readouterr().err.splitlines()[0] == (
        "published.toml:2: model.from_hf: gives the sizes only: the command line sets checkpoint.initial"
    )
    config = load("run.toml", f"--model.from_hf={published}")
    assert (config.model.from_hf, config.checkpoint.initial, config.model.layers) == (str(published), "", 4)
    assert capsys.readouterr().err.splitlines()[0] == (
        "run.toml:2: checkpoint.initial: is not read: the command line sets model.from_hf"
    )
    Path("both.toml").write_text(f'[model]\nfrom_hf = "{published}"\n[checkpoint]\ninitial = "a"\n')
    for words in (["both.toml"], [f"--model.from_hf={published}", "--checkpoint.initial=a"]):
        os.environ["WORLD_SIZE"] = "1"
        assert "checkpoint.initial: model.from_hf names initial weights, too" in refused(capsys, *words)[0]
    os.environ["WORLD_SIZE"] = "1"
    (line,) = refused(capsys, "--checkpoint.initial=gone")
    assert line == "--checkpoint.initial: gone: there is no such checkpoint folder"


def test_files_are_checked_before_anything_is_started(
    folder: Path, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text((published / "config.json").read_text())
    (line,) = refused(capsys, f"--model.from_hf={tmp_path / 'm'}")
    assert line.startswith(f"--model.from_hf: {tmp_path / 'm'}: holds neither")
    load(f"--model.from_hf={tmp_path / 'm'}", "--run.dry_run=true")  # needs no weights


def test_fields_that_are_not_known_are_told(
    folder: Path, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((published / "config.json").read_text())
    note = f"{tmp_path}/config.json: not known and not used: mystery, riddle"
    for more in ({}, {"mystery": 1, "riddle": 2}):
        (tmp_path / "config.json").write_text(json.dumps(content | more))
        load(f"--model.from_hf={tmp_path}", "--run.dry_run=true")
        assert (note in capsys.readouterr().err) == bool(more)


def test_rows_are_padded_for_tensor_parallelism(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = as_json(hub_config("llama")) | {"vocab_size": 265}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = load(f"--model.from_hf={tmp_path}", "--run.dry_run=true", "--parallel.tp=2")
    assert (config.model.vocab, config.model.vocab_padding) == (265, 1)
    assert "model.vocab: 265 rows are padded to 266, a multiple of parallel.tp; the" in capsys.readouterr().err
    written = load(f"--model.from_hf={tmp_path}", "--run.dry_run=true", "--parallel.tp=2", "--model.vocab_padding=3")
    assert (written.model.vocab, written.model.vocab_padding) == (265, 3)


def test_a_resumed_run_reads_neither_config_nor_weights(
    folder: Path, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(f"--model.from_hf={published}")
    (folder / "run/checkpoints/new").mkdir(parents=True)
    model = replace(config.model, from_hf="org/name@" + COMMIT)
    manifest = Manifest(7, {}, {"config": asdict(replace(config, model=model))}, 1, {}, {})
    publish(folder / "run/checkpoints/new", folder / "run/checkpoints/step-00000007", manifest)
    resumed = load("--model.from_hf=org/name", "--model.rope_theta=20000").model
    assert resumed == replace(model, rope_theta=20000.0)
    line = "--model.from_hf: is not read: the run goes on from run/checkpoints/step-00000007"
    assert line in capsys.readouterr().err
    assert load_run(["--model.from_hf=org/name", "--run.folder=run"]).model == model


def fill_cache(folder: Path, published: Path) -> None:
    """Lay a model into the hub's cache, as a download does."""
    repository = folder / "hub/models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    for file in published.iterdir():
        (repository / "snapshots" / COMMIT / file.name).symlink_to(file)


def test_a_model_of_the_hub_is_pinned_to_its_commit_and_found_without_a_network(folder: Path, published: Path) -> None:
    fill_cache(folder, published)
    for name in ("org/name", "org/name@main", f"org/name@{COMMIT}"):
        assert load(f"--model.from_hf={name}").model.from_hf == f"org/name@{COMMIT}"


def test_what_the_cache_lacks_is_named(folder: Path) -> None:
    with pytest.raises(HubFileError, match="org/name: cannot be had from the hub: LocalEntryNotFoundError"):
        find_hub_model("org/name", weights=False, may_download=True)
    with pytest.raises(HubFileError, match="neither a folder nor an id of the hub"):
        find_hub_model("no such folder", weights=False, may_download=True)


def test_a_download_is_of_the_files_of_the_index_at_one_commit(
    folder: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def download(hub_id: str, **options: object) -> str:
        calls.append((hub_id, options["revision"], options["allow_patterns"], options["local_files_only"]))
        return str(published.parent / COMMIT)

    (published.parent / COMMIT).mkdir(exist_ok=True)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}
    (published.parent / COMMIT / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = find_hub_model("org/name@v1", weights=True, may_download=True)
    assert found.pinned == f"org/name@{COMMIT}"
    small, large = calls
    assert small[:2] == ("org/name", "v1")
    assert large == ("org/name", COMMIT, ["model-1.safetensors", "model-2.safetensors"], False)
    calls.clear()
    find_hub_model("org/name", weights=False, may_download=True)
    (published.parent / COMMIT / WHOLE_MODEL).touch()
    find_hub_model("org/name", weights=True, may_download=True)
    assert [patterns for _, _, patterns, _ in calls] == [SMALL_FILES, [*SMALL_FILES, WHOLE_MODEL]]


def test_a_rank_downloads_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(hub_id: str, **options: object) -> str:
        calls.append(options["local_files_only"])
        raise OSError("not there")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(SystemExit):
        load("--model.from_hf=org/name")
    assert calls == [True]


def test_a_recipe_that_needs_no_weights_takes_the_sizes_from_config_json(folder: Path, published: Path) -> None:
    (folder / "m").mkdir()
    (folder / "m/config.json").write_text((published / "config.json").read_text())
    assert load_sizes([f"--model.from_hf={folder / 'm'}"]).model.ffn == 24


def test_longer_sequences_than_the_model_says_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (STDLIB, "--run.device=cpu", "--model.max_sequence_length=64")
    for length, is_told in ((128, True), (64, False)):
        load(*arguments, f"--training.sequence_length={length}")
        note = "--training.sequence_length: 128 is over model.max_sequence_length 64: an export says the longer one"
        assert (note in capsys.readouterr().err) == is_told


def test_a_model_that_cannot_be_exported_is_told_before_it_is_trained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = ("--model.experts=4", "--model.shared_experts=1", STDLIB, "--run.device=cpu")
    load(*features)
    reason = "models of type 'mixtral' cannot have model.shared_experts = 1"
    assert f"[model] trains, but cannot be exported to Hugging Face: {reason}\n" in capsys.readouterr().err
    load("--model.experts=4", STDLIB, "--run.device=cpu")
    assert "exported" not in capsys.readouterr().err
    kinds = ("--model.pattern=a,b", "--model.kinds.a.window=8", "--model.kinds.b.window=9")
    load(*kinds, STDLIB, "--run.device=cpu")
    reason_of_kinds = "models of type 'llama' cannot have model.kinds.a.window = 8, model.kinds.b.window = 9"
    assert f"cannot be exported to Hugging Face: {reason_of_kinds}\n" in capsys.readouterr().err
    assert "model.pattern: 'c' has no table [model.kinds.c], which" in refused(capsys, "--model.pattern=c", STDLIB)[0]


def test_the_models_that_a_check_does_not_ask_about_can_be_exported() -> None:
    """With any other key of [model] that has an effect, and with all of them."""
    others = [key for key in vars(Model()) if key not in BEYOND_LLAMA]
    effective = [key for key in others if not contradictions(changed(f"model.{key}"))]
    models = [changed(f"model.{key}").model for key in effective]
    changes: dict[str, Any] = {key: getattr(model, key) for key, model in zip(effective, models, strict=True)}
    for model in (*models, Model(**changes | {"heads": 7, "kv_heads": 7, "head_dim": 32})):
        assert why_no_family(model) == [], model
    for scaling in ("linear", "llama3", "yarn"):
        assert why_no_family(Model(rope_scaling=scaling, rope_scaling_factor=8.0, window=9)) == []


def test_a_checkpoint_is_read_with_the_model_that_it_was_trained_as(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was resumed with other keys, which its config.toml has by now: an older step is of those before."""
    run = tmp_path / "run"
    kinds = {"local": {"window": 16}, "full": {}}
    save_run(run, Model(**SIZES, pattern=("local", "full"), kinds=kinds))
    file = run / "config.toml"
    resumed = (
        file.read_text().replace("window = 16", "window = 8").replace("rope_theta = 10000.0", "rope_theta = 500.0")
    )
    file.write_text(resumed)
    model = load_run([str(run), STDLIB], one_device=True).model
    assert (model.rope_theta, model.of_block(0).window) == (10000.0, 16)
    said = capsys.readouterr().err
    assert "model.kinds.local.window: 16 in the checkpoint, 8 now: step-00000002 is read as it was trained" in said
    assert "model.rope_theta: 10000.0 in the checkpoint, 500.0 now" in said
    asked = load_run([str(run), STDLIB, "--model.rope_theta=700"], one_device=True).model
    assert (asked.rope_theta, asked.of_block(0).window) == (700.0, 16)
    file.write_text(resumed.replace("[model.kinds.full]", "[model.kinds.full]\nwindow = 4"))
    asked = load_run([str(run), STDLIB, "--model.kinds.local.window=12"], one_device=True).model
    assert [view.window for view in asked.views] == [12, 0]  # the other kind is as it was trained


def test_a_checkpoint_without_a_config_is_read_as_the_run_says(tmp_path: Path) -> None:
    save_run(tmp_path / "run", Model(**SIZES, rope_theta=500.0), record={"config": {}})
    assert load_run([str(tmp_path / "run"), STDLIB], one_device=True).model.rope_theta == 500.0
