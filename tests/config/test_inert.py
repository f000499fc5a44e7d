"""Settings that do nothing: an error where they contradict a choice, a line where they wait for another layout."""

import re
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

import pytest

from tests.config.conftest import config_of, refusal
from torchllm.config import Config, Kinds, Model, Parallel, Source, Training, write_config
from torchllm.config.applied_keys import unapplied
from torchllm.config.keys import AppliedBy, Needs, OfKinds, field_types, notes_on
from torchllm.config.paths import absolute_paths
from torchllm.config.schema import MixtureStage
from torchllm.config.write import dump_toml
from torchllm.tools.config.draft import read_draft
from torchllm.tools.config.idle import IN_OTHER_WORDS, IdleKey, condition, conditions, contradictions, idle_keys
from torchllm.tools.config.load import load_config
from torchllm.tools.config.refuse import finish
from torchllm.tools.proof.layouts import Settings
from torchllm.tools.proof.shrink import without_contradictions

pytestmark = pytest.mark.quick

YARN: Settings = {"model.rope_scaling_factor": 8.0, "model.rope_scaling": "yarn"}
LINEAR: Settings = {"model.rope_scaling_factor": 8.0, "model.rope_scaling": "linear"}
EXPERTS: Settings = {"model.experts": 8}
LATENT: Settings = {"model.mixer": "latent_attention"}
DELTA: Settings = {"model.mixer": "gated_delta"}
HEADERLESS = (Source(kind="nanogpt", path="a"),)
CONTRADICTED: dict[
    str, tuple[Any, Settings, Settings]
] = {  # key: a value, where it does nothing, where it does something
    "run.json": (True, {}, {"run.dry_run": True}),
    "model.rope_theta": (5e5, {"model.family": "gpt"}, {}),
    "model.rotary_fraction": (0.5, {"model.family": "gpt"}, {}),
    "model.rope_scaling_factor": (8.0, {"model.family": "gpt"}, {}),
    "model.rope_scaling": ("yarn", {}, {"model.rope_scaling_factor": 8.0}),
    "model.rope_original_length": (4096, LINEAR, YARN),
    "model.rope_low_frequency_factor": (2.0, YARN, {"model.rope_scaling_factor": 8.0}),
    "model.rope_high_frequency_factor": (5.0, {}, {"model.rope_scaling_factor": 8.0}),
    "model.rope_beta_fast": (16.0, LINEAR, YARN),
    "model.rope_beta_slow": (2.0, {"model.rope_scaling_factor": 8.0}, YARN),
    "model.rope_truncate": (False, {}, YARN),
    "model.rope_attention_factor": (1.5, LINEAR, YARN),
    "model.rope_query_scale": (0.1, LINEAR, YARN),
    "model.qkv_bias": (True, {"model.family": "gpt"}, {}),
    "model.latent_kv_width": (16, {}, LATENT),
    "model.latent_q_width": (16, {}, LATENT),
    "model.latent_norm_epsilon": (1e-5, {}, LATENT),
    "model.nope_head_dim": (32, {}, LATENT),
    "model.rope_head_dim": (16, {}, LATENT),
    "model.v_head_dim": (16, {}, LATENT),
    "model.rope_interleaved": (True, {"model.family": "gpt"}, {}),
    "model.rope_proportional": (True, {"model.family": "gpt"}, {}),
    "model.block_scale": (True, {}, {"model.norm_position": "both"}),
    "model.norm_offset": (True, {"model.family": "gpt"}, {}),
    "model.activation": ("gelu_tanh", {"model.family": "gpt"}, {}),
    "model.o_bias": (True, {"model.family": "gpt"}, {}),
    "model.expert_biases": (True, {}, EXPERTS),
    "model.delta_key_heads": (2, {}, DELTA),
    "model.delta_value_heads": (2, {}, DELTA),
    "model.delta_key_dim": (16, {}, DELTA),
    "model.delta_value_dim": (16, {}, DELTA),
    "model.delta_conv": (3, {}, DELTA),
    "model.delta_negative": (True, {}, DELTA),
    "model.delta_norm_epsilon": (1e-5, {}, DELTA),
    "model.top_k": (1, {}, EXPERTS),
    "model.expert_ffn": (64, {}, EXPERTS),
    "model.upcycle": (True, EXPERTS, {**EXPERTS, "checkpoint.initial": "dense"}),
    "model.upcycle_noise": (0.1, EXPERTS, {**EXPERTS, "checkpoint.initial": "dense", "model.upcycle": True}),
    "model.shared_experts": (1, {}, EXPERTS),
    "model.shared_gate": (True, EXPERTS, {**EXPERTS, "model.shared_experts": 1}),
    "model.dense_layers": (1, {}, EXPERTS),
    "model.router_score": ("sigmoid", {}, EXPERTS),
    "model.router_dtype": ("compute", {}, EXPERTS),
    "model.router_renormalize": (False, {}, EXPERTS),
    "model.router_scale": (2.5, {}, EXPERTS),
    "model.router_groups": (2, {}, EXPERTS),
    "model.router_top_groups": (2, EXPERTS, {**EXPERTS, "model.router_groups": 2}),
    "model.router_bias": (True, {}, EXPERTS),
    "model.router_bias_rate": (0.1, EXPERTS, {**EXPERTS, "model.router_bias": True}),
    "model.balance_loss": ("global", {}, EXPERTS),
    "model.mtp_weight": (0.1, {}, {"model.mtp_depth": 1}),
    "model.balance_weight": (0.1, EXPERTS, {**EXPERTS, "model.balance_loss": "sequence"}),
    "model.router_z_loss": (1e-3, {}, EXPERTS),
    "parallel.ep": (2, {}, {"model.experts": 4, "parallel.dp_shard": 2}),
    "data.dtype": ("uint16", {}, {"data.sources": HEADERLESS}),
    "data.separator": (7, {}, {"data.sources": HEADERLESS}),
    "data.fim_style": ("spm", {}, {"data.fim_rate": 0.5}),
    "data.fim_tokens": (("a", "b", "c"), {}, {"data.fim_rate": 0.5}),
    "training.max_consecutive_nonfinite": (3, {"training.on_nonfinite": "stop"}, {}),
    "compile.norm": (True, {"model.family": "gpt"}, {}),
    "optimizer.name": ("muon", {"lora.rank": 4}, {"model.frozen": "embed_tokens.*"}),
    "optimizer.beta1": (0.8, {"optimizer.name": "sgd"}, {}),
    "optimizer.beta2": (0.8, {"optimizer.name": "sgd"}, {}),
    "optimizer.epsilon": (1e-6, {"optimizer.name": "sgd"}, {}),
    "model.dense_beside": (
        *(True, {"model.experts": 4}),
        {"model.experts": 4, "model.norm_position": "both"},
    ),
    "optimizer.state_dtype": ("bfloat16", {"optimizer.name": "sgd"}, {}),
    "optimizer.offload": (True, {"optimizer.name": "sgd"}, {}),
    "optimizer.momentum": (0.9, {}, {"optimizer.name": "sgd"}),
    "optimizer.muon_momentum": (0.9, {"optimizer.name": "sgd"}, {"optimizer.name": "muon"}),
    "optimizer.adjust_lr_fn": ("match_rms_adamw", {}, {"optimizer.name": "muon"}),
    "evaluate.ema": (True, {}, {"optimizer.ema_decay": 0.9}),
    "optimizer.ema_offload": (True, {}, {"optimizer.ema_decay": 0.9}),
    "generate.ema": (True, {}, {"optimizer.ema_decay": 0.9}),
    "optimizer.embedding_rate": (2.0, {"lora.rank": 4}, {"model.frozen": "layers.*"}),
    "optimizer.embedding_decay": (3.0, {"optimizer.weight_decay": 0.0}, {}),
    "optimizer.head_rate": (0.5, {"model.tied_embeddings": True}, {}),
    "optimizer.head_decay": (0.0, {"model.tied_embeddings": True}, {}),
    "optimizer.vector_rate": (0.5, {"model.frozen": ".*norm.*"}, {}),
    "optimizer.vector_decay": (1.0, {"optimizer.weight_decay": 0.0}, {}),
    "schedule.by_tokens": (True, {}, {"data.stage": (MixtureStage(until=5), MixtureStage(sequence_length=64))}),
    "schedule.decay_steps": (10, {"schedule.name": "linear"}, {"schedule.name": "wsd"}),
    "schedule.decay": ("1-sqrt", {"schedule.name": "linear"}, {"schedule.name": "wsd"}),
    "schedule.final_fraction": (0.0, {"schedule.name": "constant"}, {}),
    "checkpoint.keep_every": (500, {"checkpoint.keep": 0}, {"checkpoint.keep": 3}),
    "metrics.profile_steps": ("600:603", {"training.steps": 599}, {"training.steps": 600}),
    "generate.top_k": (7, {"generate.temperature": 0.0}, {}),
    "evaluate.tasks_limit": (200, {}, {"evaluate.tasks": ("arc_easy",)}),
    "evaluate.tasks_interval": (500, {}, {"evaluate.tasks": ("arc_easy",)}),
    "recompute.offload": (True, {"recompute.mode": "selective"}, {"recompute.mode": "full"}),
    "recompute.k": (2, {"recompute.mode": "full"}, {"recompute.mode": "every_k"}),
    "lora.alpha": (32.0, {}, {"lora.rank": 8}),
    "lora.targets": (("q_proj",), {}, {"lora.rank": 8}),
    "export.adapter": (True, {}, {"lora.rank": 8}),
}
"""key -> a value, where it does nothing, where it does something"""
PIPELINE: Settings = {"parallel.pp": 2}
TENSOR: Settings = {"parallel.tp": 2, "parallel.sequence_parallel": True}
TEXT = (Source(kind="text", path="a"),)
SHARDS = (Source(kind="tokens", path="a"),)
WAITING: dict[str, tuple[Any, Settings, Settings]] = {
    "parallel.schedule": ("GPipe", {}, PIPELINE),
    "parallel.virtual_stages": (2, {}, PIPELINE),
    "parallel.split": ((1, 3), {}, PIPELINE),
    "parallel.rebalance": (True, {}, PIPELINE),
    "parallel.scatter_gather": (False, PIPELINE, {"parallel.pp": 2, "parallel.tp": 2}),
    "parallel.cp_method": ("ulysses", {}, {"parallel.cp": 2}),
    "parallel.sequence_parallel": (True, {}, {"parallel.tp": 2}),
    "parallel.regather": (True, {**TENSOR, "recompute.mode": "full"}, {**TENSOR, "recompute.mode": "ffn"}),
    "parallel.expert_dispatch": (
        *("optimistic", EXPERTS),
        {**EXPERTS, "parallel.dp_shard": 2, "parallel.ep": 2},
    ),
    "parallel.expert_chunks": (2, EXPERTS, {**EXPERTS, "parallel.dp_shard": 2, "parallel.ep": 2}),
    "parallel.zero_stage": (2, {"parallel.dp_replicate": 2}, {"parallel.dp_shard": 2}),
    "parallel.keep_last_block": (False, {"parallel.dp_shard": 2, "parallel.zero_stage": 2}, {"parallel.dp_shard": 2}),
    "parallel.prefetch": (0, {"parallel.dp_shard": 2, "parallel.zero_stage": 0}, {"parallel.cp": 2}),
    "data.on_bad_record": ("skip", {}, {"data.sources": TEXT}),
    "data.max_bad_share": (0.5, {"data.sources": TEXT}, {"data.sources": TEXT, "data.on_bad_record": "skip"}),
    "data.max_raw_mib": (9.0, {"data.sources": SHARDS}, {"data.sources": TEXT}),
    "model.window": (2048, {}, {"training.sequence_length": 2049}),
    "checkpoint.keep": (9, {"checkpoint.interval": 0}, {}),
}


def test_every_condition_has_a_case_and_a_function() -> None:
    needs: dict[str, dict[str, str]] = {"error": {}, "idle": {}, "elsewhere": {}}
    for section in fields(Config):
        for kind, found in needs.items():
            for name, words in conditions(type(getattr(Config(), section.name)), kind).items():
                found[f"{section.name}.{name}"] = words
                assert condition(words)(Config(parallel=Parallel(dp_shard=1))) in (True, False), words
    assert needs["error"].keys() == CONTRADICTED.keys()
    assert needs["idle"].keys() == WAITING.keys()
    used = {words for found in needs.values() for words in found.values()}
    parts = {part for words in used for part in re.split(", or |: ", words)[0].split(" and ")}
    assert IN_OTHER_WORDS.keys() <= used | parts


def test_a_key_that_contradicts_a_choice() -> None:
    for key, (value, idle, active) in CONTRADICTED.items():
        assert [idle_key.key for idle_key in contradictions(config_of({key: value, **idle}))] == [key]
        assert contradictions(config_of({key: value, **active})) == [], key
        assert contradictions(config_of(idle)) == [], key  # its default does no harm


def test_factors_of_zero_and_of_frozen_weights() -> None:
    """Other ways in which the keys of one row do nothing, and the nearest ways in which they do something."""
    gpt: Settings = {"model.family": "gpt"}
    for settings, idle in (
        ({"model.frozen": "embed_tokens.*", "optimizer.embedding_rate": 2.0}, ["optimizer.embedding_rate"]),
        ({"model.frozen": "embed_tokens.*", "optimizer.embedding_rate": 2.0, **gpt}, []),  # of the positions
        ({"optimizer.embedding_rate": 0.0, "optimizer.embedding_decay": 3.0}, ["optimizer.embedding_decay"]),
        ({"optimizer.head_rate": 0.0, "optimizer.head_decay": 3.0}, ["optimizer.head_decay"]),
        ({"optimizer.vector_rate": 0.0, "optimizer.vector_decay": 1.0}, ["optimizer.vector_decay"]),
        ({"optimizer.vector_rate": 0.0, "optimizer.vector_decay": 1.0, **gpt}, []),  # positions decay
        ({"model.frozen": "layers.*norm.*", "optimizer.vector_rate": 2.0}, []),  # the last norm is trained
        ({"model.frozen": "(", "optimizer.vector_rate": 2.0}, []),  # another error is about it
        ({"metrics.profile_steps": "600:603", "training.steps": 5, "finetune.epochs": 2.0}, []),  # epochs decide
    ):
        assert [idle_key.key for idle_key in contradictions(config_of(settings))] == idle, settings


KINDS: Settings = {"model.pattern": ("a", "b"), "model.kinds": Kinds(a={"window": 8}, b={})}


def test_a_key_of_a_kind_is_asked_for_in_its_kind_and_a_key_of_all_in_any() -> None:
    scaled = Kinds(a={"rope_scaling_factor": 8.0}, b={})
    of_all = {**KINDS, "model.rope_scaling": "yarn"}
    assert [found.key for found in contradictions(config_of(of_all))] == ["model.rope_scaling"]
    assert contradictions(config_of({**of_all, "model.kinds": scaled})) == []
    of_b = config_of({**KINDS, "model.kinds": scaled, "model.kinds.b.rope_scaling": "yarn"})
    (found,) = contradictions(of_b)
    assert found.message == ("does nothing in this run: it needs model.rope_scaling_factor over 1")
    assert found.key == "model.kinds.b.rope_scaling"
    assert without_contradictions(of_b) == config_of({**KINDS, "model.kinds": scaled})
    wide = config_of({**KINDS, "model.kinds.b.window": 4096})
    assert [found.key for found in idle_keys(wide) if "kinds" in found.key] == ["model.kinds.b.window"]
    mixture = {"model.experts": 4, "model.shared_experts": 1, "model.expert_ffn": 8, "model.router_bias": True}
    dense = config_of({**KINDS, **mixture, "model.kinds.b.experts": 0})
    assert contradictions(dense) == []
    (found,) = contradictions(
        config_of({**KINDS, **mixture, "model.kinds": Kinds(a={}, b={"experts": 0, "expert_ffn": 9})})
    )
    assert found.key == "model.kinds.b.expert_ffn"
    assert contradictions(config_of({**KINDS, "model.mtp_depth": 1, "model.mtp_weight": 0.5})) == []


def test_a_key_of_the_model_that_every_kind_has_by_itself_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {**KINDS, "model.window": 5, "model.kinds.b.window": 9}
    (found,) = (found for found in idle_keys(config_of(own)) if found.key == "model.window")
    assert found.message == "does nothing in this run: it needs a kind in model.pattern that does not set it"
    for settings in ({**KINDS, "model.window": 5}, {**own, "model.window": 0}, {"model.window": 5}):
        assert "model.window" not in [idle_key.key for idle_key in idle_keys(config_of(settings))]
    (folder / "x.toml").write_text("[model]\nwindow = 5\npattern = ['a']\n[model.kinds.a]\nwindow = 8\n")
    assert f"x.toml:2: model.window: {found.message}" in loaded(["x.toml"], capsys)


def test_keys_of_attention_are_told_where_no_mixer_reads_them() -> None:
    """An all-recurrent model; with one block of attention the same keys have an effect."""
    keys = {"model.mixer": "gated_delta", "model.window": 5, "model.qk_norm": "head", "model.norm_epsilon": 1e-6}
    assert [found.key for found in idle_keys(config_of(keys))] == ["model.qk_norm", "model.window"]
    kinds = Kinds(a={"mixer": "gated_delta", "window": 8}, b={"mixer": "attention"})
    mixed = {"model.pattern": ("a", "b"), "model.kinds": kinds, "model.qk_norm": "head"}
    assert [found.key for found in idle_keys(config_of(mixed))] == ["model.kinds.a.window"]


def test_a_key_that_waits_for_another_layout() -> None:
    for key, (value, idle, active) in WAITING.items():
        config = config_of({key: value, **idle})
        assert contradictions(config) == [], key
        assert key in [idle_key.key for idle_key in idle_keys(config)]
        assert key not in [idle_key.key for idle_key in idle_keys(config_of({key: value, **active}))]
        assert key not in [idle_key.key for idle_key in idle_keys(config_of(idle))]
    assert idle_keys(config_of({"parallel.dp_replicate": 2, "parallel.zero_stage": 0})) == []  # it is DDP


def test_keys_of_a_source() -> None:
    notes = {name: notes_on(annotated, OfKinds) for name, annotated in field_types(Source).items()}
    kinds_of = {name: found[0].kinds for name, found in notes.items() if found}
    assert len(kinds_of) == 7
    for kind in get_args(get_type_hints(Source)["kind"]):
        changed: Any = {key: f"{key} of a test" for key in kinds_of}
        sources = (Source(), Source(kind=kind, **changed))
        unused = [f"data.sources.1.{key}" for key, kinds in kinds_of.items() if kind not in kinds]
        assert [idle_key.key for idle_key in contradictions(config_of({"data.sources": sources}))] == unused, kind


def test_a_resolved_config_is_not_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its keys were all told when the run first started; one from the command line is told."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    chosen = tmp_path / "chosen.toml"
    chosen.write_text('[run]\nfolder = "runs/x"\n[parallel]\ndp_shard = 1\nzero_stage = 1\n')
    config = load_config([str(chosen)])
    assert "parallel.zero_stage: does nothing in this run" in capsys.readouterr().err

    resolved = tmp_path / "config.toml"
    write_config(config, resolved)
    assert load_config([str(resolved)]) == absolute_paths(config)
    assert capsys.readouterr().err == ""
    load_config([str(resolved), "--parallel.zero_stage=2"])
    assert "--parallel.zero_stage: does nothing in this run" in capsys.readouterr().err


def loaded(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    load_config([*words, "--run.folder=a", "--parallel.dp_shard=1"])
    return capsys.readouterr().err.splitlines()


def test_keys_that_another_source_made_idle_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "base.toml").write_text(
        "[optimizer]\nbeta1 = 0.8\nbeta2 = 0.9\n[schedule]\nname = 'wsd'\ndecay_steps = 9\n"
    )
    (folder / "sgd.toml").write_text("base = 'base.toml'\n[optimizer]\nname = 'sgd'\n")
    needs = 'optimizer.name = "adamw" or "muon"'
    betas = f"base.toml:2: optimizer.beta1, base.toml:3: optimizer.beta2: do nothing in this run: they need {needs}"
    assert loaded(["base.toml"], capsys) == []
    assert loaded(["base.toml", "--optimizer.name=sgd"], capsys) == [betas]
    assert loaded(["sgd.toml"], capsys) == [betas]
    assert loaded(["sgd.toml", "--schedule.name=constant"], capsys) == [
        f'{betas}; base.toml:6: schedule.decay_steps: does nothing in this run: it needs schedule.name = "wsd"'
    ]
    assert loaded(["sgd.toml", "--optimizer.beta1=0.7"], capsys) == [betas.replace("base.toml:2: ", "--")]
    (folder / "low.toml").write_text("[optimizer]\nname = 'sgd'\n")
    (folder / "high.toml").write_text("base = 'low.toml'\n[optimizer]\nbeta1 = 0.7\n")
    assert loaded(["high.toml"], capsys) == [
        f"high.toml:3: optimizer.beta1: does nothing in this run: it needs {needs}"
    ]
    (folder / "both.toml").write_text("base = 'base.toml'\n[optimizer]\nname = 'sgd'\nbeta1 = 0.7\n")
    for words, place in (
        (["both.toml"], "both.toml:4: optimizer.beta1"),
        (["base.toml", "--optimizer.name=sgd", "--optimizer.beta1=0.7"], "--optimizer.beta1"),
    ):
        lines = refusal(capsys, partial(load_config, words))
        assert lines == [f"{place}: does nothing in this run: it needs {needs}; or remove it"]


def test_a_base_that_is_idle_by_itself_may_be_used_and_left_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "base.toml").write_text("[lora]\nalpha = 32.0\n")
    (folder / "lora.toml").write_text("base = 'base.toml'\n[lora]\nrank = 4\n")
    assert loaded(["lora.toml"], capsys) == []
    line = "base.toml:2: lora.alpha: does nothing in this run: it needs lora.rank over 0"
    assert loaded(["lora.toml", "--lora.rank=0"], capsys) == [line]
    (folder / "whole.toml").write_text("base = 'lora.toml'\n[lora]\nrank = 0\n")
    assert loaded(["whole.toml"], capsys) == [line]
    assert refusal(capsys, lambda: load_config(["base.toml"])) == [f"{line}; or remove it"]


def test_a_resolved_file_is_never_asked_about_keys_without_effect(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither by a recipe that trains, nor by one that uses the weights, in which no section may lack."""
    together: dict[str, Settings] = {}  # keys that do nothing for the same reason are in one file
    for key, (value, idle, _) in CONTRADICTED.items():
        together.setdefault(str(idle), {"run.folder": "a", **idle})[key] = value
    for keys in together.values():
        config = config_of(keys)
        (folder / "config.toml").write_text(dump_toml(config))
        for uses_weights in (False, True):
            assert finish(read_draft(["config.toml"], Config, uses_weights=uses_weights)) == config, keys
    assert capsys.readouterr().err == ""


def test_a_file_that_names_its_folder_and_degrees_is_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    degrees = "".join(f"{axis} = 1\n" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    (folder / "x.toml").write_text(f"[run]\nfolder = 'a'\n[optimizer]\nmomentum = 0.9\n[parallel]\n{degrees}")
    (line,) = refusal(capsys, lambda: load_config(["x.toml"]))
    assert line.startswith("x.toml:4: optimizer.momentum: does nothing in this run")


def test_a_wrong_choice_is_one_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, key in (
        ('[[data.sources]]\nkind = "tsv"\npath = "a.tsv"\n', "data.sources.0.kind"),
        ('[data]\ndtype = "uint16"\n[[data.sources]]\nkind = "nanogtp"\npath = "a"\n', "data.sources.0.kind"),
        ('[optimizer]\nname = "sgdd"\nmomentum = 0.9\n', "optimizer.name"),
    ):
        (folder / "x.toml").write_text(content)
        (line,) = refusal(capsys, lambda: load_config(["x.toml"]))
        assert f"{key}: must be one of" in line


def test_a_config_without_its_contradictions() -> None:
    for key, (value, idle, active) in CONTRADICTED.items():
        without = without_contradictions(config_of({key: value, **idle}))
        assert without == config_of(idle), key
        assert without_contradictions(config_of({key: value, **active})) == config_of({key: value, **active}), key


def test_zero_3_under_pp_is_told_where_it_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    pipeline = ["--parallel.pp=2", "--parallel.dp_shard=2", f"--run.folder={tmp_path}"]
    assert load_config(pipeline).parallel.zero == 2
    assert capsys.readouterr().err == ""
    chosen = load_config([*pipeline, "--parallel.zero_stage=3"])
    assert chosen.parallel.zero_stage == 3
    assert "--parallel.zero_stage: 3 with pp gathers each block twice" in capsys.readouterr().err
    write_config(chosen, tmp_path / "config.toml")  # a run folder keeps its own
    assert load_config([str(tmp_path / "config.toml")]).parallel.zero_stage == 3
    assert capsys.readouterr().err == ""


@dataclass(frozen=True)
class Distill:
    """A fork's section."""

    key_notes: ClassVar = (AppliedBy("distill(config.distill)"),)
    weight: float = 0.0
    """of the teacher's loss"""
    power: Annotated[int, Needs("distill.weight over 0")] = 1
    """exponent"""


@dataclass(frozen=True)
class ForkConfig(Config):
    """With a section."""

    distill: Distill = field(default_factory=Distill)


def test_a_key_of_a_fork_has_its_condition_and_its_call_on_its_line() -> None:
    config = ForkConfig(distill=Distill(power=2))
    assert contradictions(config) == [IdleKey("distill.power", "needs distill.weight over 0", "; or remove it")]
    config = ForkConfig(distill=Distill(power=2, weight=0.5))
    assert contradictions(config) == []
    assert [item.key for item in unapplied(config)] == ["distill.weight", "distill.power"]


@dataclass(frozen=True)
class OtherDefaults(Training):
    loss_chunk: int = 1024


@dataclass(frozen=True)
class OtherExperts(Model):
    top_k: int = 4


@dataclass(frozen=True)
class Restated(Config):
    training: OtherDefaults = field(default_factory=OtherDefaults)
    model: OtherExperts = field(default_factory=OtherExperts)
    note: str = ""


def test_a_key_of_a_fork_with_another_default_keeps_its_notes() -> None:
    assert contradictions(Restated()) == []
    (idle_key,) = contradictions(Restated(model=OtherExperts(top_k=3)))
    assert idle_key.key == "model.top_k"
    (chunk,) = unapplied(Restated(training=OtherDefaults(loss_chunk=2048)))
    assert chunk.key == "training.loss_chunk"


def test_a_condition_that_is_no_comparison_is_an_error_of_the_fork() -> None:
    for words in ("distill.on", "distill.weight at least 3"):
        with pytest.raises(TypeError, match=r"write KEY over NUMBER, or KEY = VALUE or VALUE, or add a function"):
            condition(words)
