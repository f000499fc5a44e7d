"""The rules of a config that need more than one key. Those of the layout are in `degrees.py`, of keys without effect in
`idle.py`.
"""

import math
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator

from torchllm.config.schema import Config, Data, Generate, Model, Run
from torchllm.facts.parts.part import WIDEST_HEAD
from torchllm.facts.parts.registry import feed_forward, mixer
from torchllm.tools.config.degrees import key_of_kind, layout_problems
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
        *_router_problems(config.model),
        *_weights_problems(config),
        *_float8_problems(config),
        *graph_problems(config),
        *_schedule_problems(config),
        *_recompute_problems(config),
        *_checkpoint_problems(config),
        *_metrics_problems(config),
        *_event_problems(config.run),
    ]


def problems_of_use(config: Config) -> list[ConfigError]:
    """Return the `setting_problems` that also concern a recipe that only uses the weights of a model."""
    return [
        *_model_problems(config),
        *_kind_problems(config),
        *_expert_problems(config),
        *_lora_problems(config),
        *_data_problems(config),
        *_secret_problems(config),
        *sampling_problems(config.generate),
    ]


def _kind_problems(config: Config) -> Iterator[ConfigError]:
    """Check the pattern, then each kind of blocks as [model] is checked."""
    model = config.model
    for kind in dict.fromkeys(model.pattern):
        if kind not in model.kinds:
            yield config_error("model.pattern", f"{kind!r} has no table [model.kinds.{kind}], which may be empty")
    for kind in model.kinds:
        if not re.fullmatch("[A-Za-z0-9_-]+", kind):
            yield ConfigError(("model", "kinds", kind), "is no name of a kind: use letters, digits, _ and -")
        if kind not in model.pattern:
            message = "is not in model.pattern: remove this table from its file, or add the kind to the pattern"
            yield ConfigError(("model", "kinds", kind), message)
    if len(model.pattern) > model.layers:
        yield config_error("model.pattern", f"has {len(model.pattern)} blocks, more than model.layers = {model.layers}")
    for kind, keys in model.kinds.items():
        if keys.get("experts", 0) not in (0, model.experts):
            message = f"is neither 0 nor model.experts = {model.experts}: all blocks with experts have as many"
            yield config_error(f"model.kinds.{kind}.experts", f"{keys['experts']} {message}")
    if model.pattern and model.block:
        yield config_error(
            "model.block", f"{model.block!r} does not combine with model.pattern: remove one of the keys"
        )
    if not model.pattern:
        return
    of_all = list(_model_problems(config))
    for path, of_kind in config.of_kinds.items():
        for problem in _model_problems(of_kind):
            if problem not in of_all:
                name = problem.path[-1]
                yield config_error(f"{path}.{name}", problem.message)


def _model_problems(config: Config) -> Iterator[ConfigError]:
    model = config.model
    length = config.training.sequence_length
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
    if model.block and (config.lora.is_on or model.from_hf):
        other = "lora.rank" if config.lora.is_on else "model.from_hf"
        yield config_error("model.block", f"{model.block!r} does not combine with {other}: remove one of the keys")
    if model.heads % model.kv:
        yield config_error("model.kv_heads", f"{model.kv} key-value heads do not divide {model.heads} heads")
    if model.features.learned_positions and length > model.max_sequence_length:
        yield config_error(
            "training.sequence_length", f"{length} is over model.max_sequence_length {model.max_sequence_length}"
        )
    if model.rope_high_frequency_factor <= model.rope_low_frequency_factor:
        yield config_error("model.rope_high_frequency_factor", "must be over model.rope_low_frequency_factor")
    if model.rope_beta_fast < model.rope_beta_slow:
        yield config_error("model.rope_beta_fast", "must not be under model.rope_beta_slow")
    if model.sinks and model.attention == "flash":
        yield config_error(
            "model.attention", "flash drops the gradient of the log-sum-exp, which sinks need: use sdpa, or eager"
        )
    if model.sinks and model.attention == "flex":
        yield config_error(
            "model.attention", "flex has no backward on a CPU, where sinks are proven: use sdpa, or eager"
        )
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
        yield config_error(
            "training.dtype", "flash attention computes in 16 bit only: use bfloat16, or another attention"
        )


def _expert_problems(config: Config) -> Iterator[ConfigError]:
    model = config.model
    if not model.experts:
        return
    if model.top_k > model.experts:
        yield config_error("model.top_k", f"{model.top_k} is over model.experts {model.experts}")
    if model.router_groups > 1:
        yield from _group_problems(model)
    if model.dense_layers >= model.layers:
        yield config_error(
            "model.dense_layers", f"{model.dense_layers} leaves no block with experts: model.layers is {model.layers}"
        )
    elif not model.sparse_blocks:
        yield config_error("model.experts", f"{model.experts}, but no kind of model.pattern has experts: set it to 0")
    for path, of_kind in config.of_kinds.items():
        view = of_kind.model
        if view.upcycle and view.experts and view.expert_width != view.ffn:
            key, ffn = key_of_kind(config, path, "expert_ffn"), key_of_kind(config, path, "ffn")
            yield config_error(
                key,
                f"{view.expert_width} is not the width of the layers that model.upcycle copies, {ffn} = {view.ffn}: "
                "remove the key",
            )
            break
    if model.upcycle and model.shared_experts:
        yield config_error(
            "model.shared_experts",
            "in addition to the experts that model.upcycle copies, a shared expert would add the dense layer a second "
            "time: set it to 0",
        )
    if model.upcycle and model.expert_biases:
        yield config_error(
            "model.expert_biases", "the layers that model.upcycle copies have no biases: set it to false"
        )
    if not (model.features.gated_ffn and not model.features.biases):
        yield config_error("model.experts", f'model.family = "{model.family}" has no experts: take "llama"')
    if config.lora.is_on:
        yield config_error("lora.rank", "has no low-rank updates of experts: set it to 0, which trains all weights")


def _group_problems(model: Model) -> Iterator[ConfigError]:
    """Check the groups of a router: two experts in each, and enough in the best ones."""
    experts = model.experts // model.router_groups
    if model.experts % model.router_groups or experts < 2:
        yield config_error(
            "model.router_groups",
            f"{model.experts} experts are not {model.router_groups} equal groups of two experts or more",
        )
    elif model.router_top_groups > model.router_groups:
        yield config_error(
            "model.router_top_groups", f"{model.router_top_groups} is over model.router_groups {model.router_groups}"
        )
    elif model.router_top_groups * experts < model.top_k:
        yield config_error(
            "model.router_top_groups",
            f"{model.router_top_groups} groups of {experts} experts are fewer experts than model.top_k {model.top_k}",
        )


def _router_problems(model: Model) -> Iterator[ConfigError]:
    if model.experts and model.top_k == 1 and model.router_renormalize:
        yield config_error(
            "model.router_renormalize",
            "with top_k = 1 the one score is divided by itself, and the router learns nothing: set it to false",
        )


def _weights_problems(config: Config) -> Iterator[ConfigError]:
    """Check what goes with weights in bfloat16."""
    if config.training.weights_dtype == "float32":
        return
    others = {
        "optimizer.ema_decay": (config.optimizer.ema_decay > 0, "an average moves by less than bfloat16 can tell"),
        "float8.recipe": (config.float8.is_on, "float8 is rounded from float32 weights"),
        "lora.rank": (config.lora.is_on, "updates are float32, and the weights are frozen"),
    }
    for key, (is_on, reason) in others.items():
        if is_on:
            yield config_error("training.weights_dtype", f'is "bfloat16", and {key} is set, but {reason}: remove one')


def _float8_problems(config: Config) -> Iterator[ConfigError]:
    if config.float8.is_on and config.model.experts:
        yield config_error("float8.recipe", 'has no products of experts: set it to "none"')
    if config.float8.is_on and config.training.dtype == "float32":
        yield config_error(
            "training.dtype", f'float8.recipe = "{config.float8.recipe}" rounds factors that are bfloat16: use bfloat16'
        )


def graph_problems(config: Config) -> Iterator[ConfigError]:
    """Check what a CUDA graph of a step cannot have: shapes that change, and what the host does in each step."""
    causes = {
        "parallel.pp": (config.parallel.pp != 1, "the stages of a pipeline are not captured"),
        "model.experts": (
            config.model.experts,
            "experts get other numbers of tokens in each step, which the host notes",
        ),
        "data.document_mask": (config.data.document_mask, "each micro batch has another number of documents"),
        "float8.recipe": (config.float8.is_on, "the scales of float8 weights are made anew in each step"),
        "run.device": (config.run.device == "cpu", "a CPU has no CUDA graphs"),
    }
    for key, (is_set, why) in causes.items():
        if config.compile.graphs and is_set:
            yield config_error("compile.graphs", f"{why}: set it to false, or change {key}")


def _lora_problems(config: Config) -> Iterator[ConfigError]:
    model, lora = config.model, config.lora
    if not lora.is_on:
        return
    if model.frozen:
        yield config_error(
            "model.frozen", f"lora.rank = {lora.rank} freezes all weights already, and trains their updates: remove it"
        )
    if model.mtp_depth:
        yield config_error(
            "lora.rank",
            "has no low-rank updates of blocks of multi-token prediction: set model.mtp_depth = 0, or it to 0",
        )
    if model.features.learned_positions:
        yield config_error(
            "lora.rank",
            f'model.family = "{model.family}" has no LoRA here: Hugging Face\'s GPT-2 has q, k and v in one transposed '
            "matrix (Conv1D), which takes one update. Set it to 0, which trains all weights, or take another family",
        )
    if config.float8.is_on:
        yield config_error(
            "float8.recipe",
            f'float8.recipe = "{config.float8.recipe}" has no products for the low-rank updates of lora.rank = '
            f"{lora.rank}: set one of "
            "them to its default",
        )
    if not lora.targets:
        yield config_error("lora.targets", "is empty, so nothing would be trained: name at least one matrix")
    if not (model.experts or model.block):
        from torchllm.facts.flops import target_shapes  # of no use to runs without updates

        if absent := [target for target in lora.targets if target not in target_shapes(model)]:
            yield config_error("lora.targets", f"the blocks have no {', '.join(absent)}: leave it out")
    for target, count in Counter(lora.targets).items():
        if count > 1:
            yield config_error("lora.targets", f"names {target} {count} times")


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
    if any(source.kind == "nanogpt" for source in config.data.all_sources.values()):
        yield from _nanogpt_problems(config.data)
    yield from _mixture_problems(config.data, config.training.steps)
    if config.evaluate.interval and not config.data.validation_fraction and not config.data.validation:
        cure = "set data.validation_fraction, or name a source in [[data.validation]]"
        yield config_error("evaluate.interval", f"nothing is held out: {cure}")


def _nanogpt_problems(data: Data) -> Iterator[ConfigError]:
    """Check the keys that nanoGPT's files need because they have no header."""
    if not data.dtype:
        yield config_error("data.dtype", 'is empty, and nanoGPT\'s files do not say it: "uint16" for GPT-2')
    if data.separator < 0:
        yield config_error("data.separator", "is not set, and nanoGPT's files do not say it: 50256 for GPT-2")


def _mixture_problems(data: Data, steps: int) -> Iterator[ConfigError]:
    """Check the stages of the mixture."""
    before = 0
    for index, stage in enumerate(data.stage):
        key = f"data.stage.{index}"
        is_last = index == len(data.stage) - 1
        if len(stage.weights) != len(data.sources):
            yield config_error(
                f"{key}.weights", f"has {len(stage.weights)} numbers: give one for each of {len(data.sources)} sources"
            )
        elif not any(stage.weights):
            yield config_error(f"{key}.weights", "is 0 for every source: one must be over 0")
        if is_last and stage.until == 0:
            continue
        if stage.until <= before:
            yield config_error(f"{key}.until", f"= {stage.until} is not after step {before}, where the stage begins")
        elif is_last and stage.until < steps:
            yield config_error(
                f"{key}.until", f"= {stage.until} is before the last step, {steps}: set it to 0, or add a stage"
            )
        before = stage.until


def _schedule_problems(config: Config) -> Iterator[ConfigError]:
    schedule = config.schedule
    steps = config.training.steps
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


def _metrics_problems(config: Config) -> Iterator[ConfigError]:
    if config.metrics.profile_steps:
        steps = re.fullmatch(r"([1-9]\d*):(\d+)", config.metrics.profile_steps)
        if not steps or int(steps[1]) >= int(steps[2]):
            yield config_error("metrics.profile_steps", "must be FIRST:END, as 10:13 for steps 10, 11 and 12")


def _secret_problems(config: Config) -> Iterator[ConfigError]:
    if config.metrics.trackers:
        from torchllm.tools.config.secret_keys import secret_problems  # of no use to other runs

        yield from secret_problems(config, f"metrics.{config.metrics.trackers[0]}")


def _event_problems(run: Run) -> Iterator[ConfigError]:
    try:
        words = shlex.split(run.on_event)
    except ValueError as error:
        yield config_error("run.on_event", f"{error} in {run.on_event!r}")
        return
    if words and shutil.which(words[0]) is None:
        yield config_error("run.on_event", f"{words[0]!r} is no command here: give the path of an executable file")
