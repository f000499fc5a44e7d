"""The rules of a config that need more than one key. Rules of the layout are in `degrees.py`, of keys without effect in
`idle.py`, of parts that few runs have in `rare_parts.py`.
"""

import math
from collections.abc import Callable, Iterable, Iterator

from torchllm.config.files import is_url
from torchllm.config.schema import Config, Data, Generate
from torchllm.facts.parts.part import WIDEST_HEAD, found
from torchllm.facts.parts.registry import feed_forward, mixer
from torchllm.tools.config.degrees import layout_problems
from torchllm.tools.config.idle import contradictions
from torchllm.tools.config.read import ConfigError, config_error

LEAST_TEMPERATURE = 1e-6
"""over 0: logits that are divided by less overflow, and no token is left"""


def problems(config: Config, world_size: int | None) -> list[ConfigError]:
    """Return all problems of a config that one key alone does not show."""
    idle = [config_error(idle_key.key, f"{idle_key.message}{idle_key.remedy}") for idle_key in contradictions(config)]
    return [*setting_problems(config), *idle, *layout_problems(config, world_size)]


def conflicts(config: Config, world_size: int | None) -> list[ConfigError]:
    """Return the problems that keep a config from running: all except keys without effect."""
    return [*setting_problems(config), *layout_problems(config, world_size)]


def setting_problems(config: Config) -> list[ConfigError]:
    """Return the `conflicts` that do not depend on the number of ranks."""
    return [
        *problems_of_use(config),
        *_problems_if(config.model.experts > 0, "router_problems", config),
        *_problems_if(config.model.base_width > 0, "width_problems", config),
        *_problems_if(config.training.weights_dtype != "float32", "weights_problems", config),
        *_problems_if(config.optimizer.state_dtype == "int8", "state_problems", config),
        *_problems_if(config.float8.is_on, "float8_problems", config),
        *_problems_if(config.compile.graphs, "graph_problems", config),
        *_schedule_problems(config),
        *_recompute_problems(config),
        *_checkpoint_problems(config),
        *_problems_if(config.checkpoint.remote != "", "remote_problems", config),
        *_problems_if(is_url(config.checkpoint.resume), "resume_problems", config),
        *_problems_if(config.metrics.profile_steps != "", "profile_problems", config),
        *_problems_if(config.run.on_event != "", "event_problems", config),
    ]


def problems_of_use(config: Config) -> list[ConfigError]:
    """Return the `setting_problems` that also concern a recipe that only uses the weights of a model."""
    return [
        *model_problems(config),
        *_problems_if(bool(config.model.pattern or config.model.kinds), "kind_problems", config),
        *_problems_if(config.model.experts > 0, "expert_problems", config),
        *_problems_if(config.trained.only_updates, "update_problems", config),
        *_data_problems(config),
        *_secret_problems(config),
        *sampling_problems(config.generate),
    ]


def _problems_if(has_part: bool, name: str, config: Config) -> Iterable[ConfigError]:
    """Return the problems of a part that few runs have. name: of the function in `rare_parts.py`."""
    if not has_part:
        return ()
    rule: Callable[[Config], Iterable[ConfigError]] = found(f"torchllm.tools.config.rare_parts:{name}")
    return rule(config)


def model_problems(config: Config) -> Iterator[ConfigError]:
    """Check [model], or a kind of its blocks, without experts."""
    model = config.model
    if not model.head_dim and model.hidden % model.heads:
        yield config_error(
            "model.heads", f"{model.heads} heads do not divide hidden {model.hidden}; set model.head_dim"
        )
    elif not model.features.learned_positions and model.head_width % 2:
        yield config_error("model.head_dim", f"rotary positions need an even head width, not {model.head_width}")
    elif not model.features.learned_positions and (
        model.turned_width % 2 or (model.rotary_fraction and not model.turned_width)
    ):
        yield config_error(
            "model.rotary_fraction",
            f"{model.rotary_fraction} of a head of {model.head_width} features are {model.turned_width}: rotary "
            "positions turn pairs of features",
        )
    for part in (mixer(model), feed_forward(model)):
        for key, message in part.problems(model) if part.problems else ():
            yield config_error(f"model.{key}", message)
    yield from _problems_if(model.block != "", "block_problems", config)
    if model.heads % model.kv:
        yield config_error("model.kv_heads", f"{model.kv} key-value heads do not divide {model.heads} heads")
    for length, key in config.data.lengths(config.training.sequence_length).items():
        if model.features.learned_positions and length > model.max_sequence_length:
            yield config_error(key, f"{length} is over model.max_sequence_length {model.max_sequence_length}")
    if model.rope_high_frequency_factor <= model.rope_low_frequency_factor:
        yield config_error("model.rope_high_frequency_factor", "must be over model.rope_low_frequency_factor")
    if model.rope_beta_fast < model.rope_beta_slow:
        yield config_error("model.rope_beta_fast", "must not be under model.rope_beta_slow")
    if model.attention == "flash" and model.head_width > WIDEST_HEAD:
        yield config_error(
            "model.attention", f"flash has heads of up to {WIDEST_HEAD} features, not {model.head_width}: use sdpa"
        )
    if model.attention == "flash" and config.data.document_mask:
        yield config_error(
            "model.attention", "flash has no document mask here: use sdpa or flex, or data.document_mask = false"
        )
    if model.attention == "sdpa" and model.score_softcap:
        yield config_error("model.attention", "sdpa has no model.score_softcap: use flex or flash on a GPU, or eager")
    if model.attention == "flash" and config.training.dtype == "float32":
        yield config_error("training.dtype", "flash attention computes in 16 bits: use bfloat16, or another attention")


def _data_problems(config: Config) -> Iterator[ConfigError]:
    if not config.data.sources:
        yield config_error("data.sources", "is empty: name at least one [[data.sources]]")
    for key, source in config.data.all_sources.items():
        needs_path = source.kind not in ("stdlib", "synthetic")
        if needs_path and not source.path:
            yield config_error(f"{key}.path", f"a source of kind {source.kind!r} needs a path")
        if source.max_epochs and key.startswith("data.validation"):
            yield config_error(f"{key}.max_epochs", "limits training, and this source is evaluated on: leave it out")
        if source.messages_key and not config.data.document_mask:
            yield config_error(
                "data.document_mask",
                f"{key} holds conversations, and several are packed into a sequence: set it to true, or "
                "each would attend to the conversations before it",
            )
    has_url = any(is_url(source.path) for source in config.data.all_sources.values())
    yield from _problems_if(has_url, "url_problems", config)
    has_nanogpt = any(source.kind == "nanogpt" for source in config.data.all_sources.values())
    yield from _problems_if(has_nanogpt, "nanogpt_problems", config)
    yield from _problems_if(len(config.data.stage) > 0, "mixture_problems", config)
    cuts_documents = config.data.fim_rate > 0 or config.data.fim_tokens != Data.fim_tokens
    yield from _problems_if(cuts_documents, "fim_problems", config)
    if config.evaluate.interval and not config.data.validation_fraction and not config.data.validation:
        cure = "set data.validation_fraction, or name a source in [[data.validation]]"
        yield config_error("evaluate.interval", f"nothing is held out: {cure}")


def _schedule_problems(config: Config) -> Iterator[ConfigError]:
    schedule = config.schedule
    steps = math.inf if config.finetune.epochs else config.training.steps  # epochs decide the steps
    if schedule.warmup_steps > steps:
        yield config_error("schedule.warmup_steps", f"{schedule.warmup_steps} is over training.steps {steps}")
    if schedule.name == "wsd" and schedule.warmup_steps + schedule.decay_steps > steps:
        yield config_error("schedule.decay_steps", f"warmup and decay together are over training.steps {steps}")


def sampling_problems(generate: Generate) -> Iterator[ConfigError]:
    """Yield a problem of a temperature that a division by it does not survive."""
    if generate.temperature and not LEAST_TEMPERATURE <= generate.temperature < math.inf:
        message = f"must be 0, for the likeliest tokens, or a number from {LEAST_TEMPERATURE:g} on"
        yield config_error("generate.temperature", f"{message}, not {generate.temperature:g}")


def _recompute_problems(config: Config) -> Iterator[ConfigError]:
    recompute = config.recompute
    if recompute.k > config.model.layers:
        yield config_error("recompute.k", f"{recompute.k} is over model.layers {config.model.layers}")


def _checkpoint_problems(config: Config) -> Iterator[ConfigError]:
    checkpoint = config.checkpoint
    if checkpoint.interval and checkpoint.keep_every % checkpoint.interval:
        yield config_error(
            "checkpoint.keep_every",
            f"{checkpoint.keep_every} is no multiple of checkpoint.interval {checkpoint.interval}",
        )


def _secret_problems(config: Config) -> Iterator[ConfigError]:
    if config.metrics.trackers:
        from torchllm.tools.config.secret_keys import secret_problems  # of no use to other runs

        yield from secret_problems(config, f"metrics.{config.metrics.trackers[0]}")
