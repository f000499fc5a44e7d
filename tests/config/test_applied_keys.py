"""Keys that a recipe applies by a call of its own: every one is refused, or told, where no call has applied it."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from torchllm.config import Config, Kinds, Source, applied, refuse_unapplied
from torchllm.config.applied_keys import (
    BY_LIBRARY,
    call_for,
    needs_state,
    new_training,
    refuse_evaluation_of_weights,
    refuse_unchecked_step,
    saves_state,
    wants_average,
)
from torchllm.config.errors import UserError
from torchllm.config.keys import field_types, plain_type
from torchllm.tools.config.load import load_config
from torchllm.tools.proof.layouts import with_settings

pytestmark = pytest.mark.quick

OTHERS = {
    "run": "start_runtime, the launcher, and seeds that initialize and build_loader must be given",
    "cluster": "the planner and the dry run",
    "training": "build_loader, build_forward_backward and TrainStep must be given it",
    "parallel": "build_mesh and parallelize must be given it: TrainStep takes their mesh",
    "metrics": "Monitor.begin is given the config",
    "evaluate": "tasks: Monitor and recipes/evaluate.py; sequences: validation_batches must be given it; ema: evaluate",
    "generate": "run_train.sh and recipes/generate.py",
    "export": "recipes/export.py",
    "finetune": "build_loader refuses conversations without it",
}
"""section -> who reads its keys that have no rule"""
OF_MODEL = """
    block family layers hidden heads kv_heads head_dim ffn vocab vocab_padding tied_embeddings max_sequence_length
    qkv_bias qk_norm norm_position norm_offset norm_epsilon activation window attention initial_std
    softmax_scale score_softcap attention_gate embedding_multiplier residual_multiplier logit_divisor logit_softcap
    rope_theta rotary_fraction rope_scaling rope_scaling_factor rope_original_length rope_low_frequency_factor
    rope_high_frequency_factor rope_beta_fast rope_beta_slow rope_truncate rope_attention_factor
    rope_query_scale
    latent_q_width latent_kv_width latent_norm_epsilon nope_head_dim rope_head_dim v_head_dim
    rope_interleaved rope_proportional sinks o_bias expert_biases v_norm keys_as_values block_scale
    experts top_k expert_ffn shared_experts shared_gate dense_beside dense_layers router_score router_dtype
    router_renormalize
    router_scale router_groups router_top_groups router_z_loss balance_weight mtp_weight
    delta_key_heads delta_value_heads delta_key_dim delta_value_dim delta_conv delta_negative delta_norm_epsilon
"""
"""keys of [model] that need no call, for build_model and initialize, which must be given [model], apply them"""


def changed(key: str) -> Config:
    """Return the defaults with another value of one key."""
    section, name = key.split(".")
    table = getattr(Config(), section)
    value = getattr(table, name)
    kind, bound = plain_type(field_types(type(table))[name])
    if get_origin(kind) is Literal:
        other: Any = next(choice for choice in get_args(kind) if choice != value)
    elif kind is bool:
        other = not value
    elif kind is str:
        other = f"{value}x"
    elif get_origin(kind) is tuple:
        other = (*value, Source()) if name == "sources" else value[1:] or ("x",)
    elif kind is Kinds:
        other = Kinds({"local": {"window": 8}})
    else:
        other = kind(value + (1 if kind is int else 0.01 if value + 0.01 <= bound.at_most else -0.01))
    return with_settings(Config(), {key: other})


KEYS = [f"{section.name}.{key.name}" for section in fields(Config()) for key in fields(getattr(Config(), section.name))]
CALLS = {key: call_for(type(getattr(Config(), key.split(".")[0])), key.split(".")[1]) for key in KEYS}
RULED = [key for key in KEYS if CALLS[key] is not None]
REFUSED = [key for key in RULED if not getattr(CALLS[key], "is_replaceable", True)]


def test_every_key_is_decided() -> None:
    """A new key gets a rule, or stands in a section whose others a recipe cannot ignore. [model] is no such section."""
    others = [key for key in KEYS if key not in RULED and key.partition(".")[0] not in OTHERS]
    assert set(others) == {f"model.{name}" for name in OF_MODEL.split()}
    assert len(REFUSED) >= 30


def test_a_recipe_that_applies_none_of_them_is_refused_or_told() -> None:
    for key in RULED:
        with new_training(changed(key)):
            rule = CALLS[key]
            assert rule is not None
            if rule.is_replaceable:
                assert refuse_unapplied(changed(key)) == [key]
                continue
            assert refuse_unapplied(changed(key), left_out=[key]) == [key]
            with pytest.raises(UserError) as error:
                refuse_unapplied(changed(key))
            assert str(error.value).startswith(f"{key}: is ")
            assert f"call {rule.call}" in str(error.value)


def test_what_is_applied_is_the_value_of_the_config() -> None:
    config = changed("training.z_loss")
    with new_training(config):
        applied("training.z_loss", 0.0)  # the default of an argument
        with pytest.raises(UserError, match=r"training.z_loss: is 0.01, but this recipe does not apply it"):
            refuse_unapplied(config)
        applied("training.z_loss", 0.01)
        assert refuse_unapplied(config) == []
    with new_training(config):  # of a fork's own
        applied("training.z_loss")
        assert refuse_unapplied(config) == []
    lora = changed("lora.rank")
    with new_training(lora):
        applied("lora", lora.lora)
        assert refuse_unapplied(lora) == []


def test_a_training_begins_with_nothing_applied_but_what_its_process_has() -> None:
    config = replace(changed("training.z_loss"), run=changed("run.deterministic").run)
    with new_training(config):
        applied("run.deterministic", True)
        applied("training.z_loss", 0.01)
        with new_training(config), pytest.raises(UserError) as error:
            refuse_unapplied(config)
        assert str(error.value).count("\n") == 0
        assert "training.z_loss" in str(error.value)
        assert refuse_unapplied(config) == []


def test_state_that_a_key_needs_is_in_every_checkpoint() -> None:
    with new_training(Config()):
        needs_state("optimizer.ema_decay", ["ema.a", "ema.b"])
        assert refuse_unapplied(Config()) == []  # without checkpoints, as recipes/minimal.py
        saves_state({"ema.a", "own"})
        with pytest.raises(UserError, match=r"^optimizer.ema_decay: needs ema.b in every checkpoint, .* extra_state="):
            refuse_unapplied(Config())
        saves_state({"ema.a", "ema.b"})
        assert refuse_unapplied(Config()) == []


def test_the_average_is_what_is_evaluated() -> None:
    config = changed("evaluate.ema")
    assert not wants_average()  # recipes/evaluate.py, which loads the average
    with new_training(config):
        assert wants_average()
        with pytest.raises(UserError, match=r"evaluate.ema: is true, but this recipe evaluates the weights: call"):
            refuse_evaluation_of_weights()
        applied("evaluate.ema", BY_LIBRARY)
        refuse_evaluation_of_weights()
        assert wants_average()
        applied("evaluate.ema", True)
        refuse_evaluation_of_weights()
        assert not wants_average()


def test_a_loop_without_a_monitor_is_checked_at_its_first_step() -> None:
    config = changed("checkpoint.initial")
    refuse_unchecked_step()
    with new_training(config):
        with pytest.raises(UserError, match=r"checkpoint.initial"):
            refuse_unchecked_step()
        refuse_unchecked_step()


def test_the_message_says_where_the_key_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text("[optimizer]\n\nema_decay = 0.9\n")
    config = load_config(["x.toml", "--run.folder=a", "--training.z_loss=0.1"])
    with new_training(config), pytest.raises(UserError) as error:
        refuse_unapplied(config)
    assert [line.partition(": is ")[0] for line in str(error.value).splitlines()] == [
        "--training.z_loss",
        "x.toml:3: optimizer.ema_decay",
    ]
