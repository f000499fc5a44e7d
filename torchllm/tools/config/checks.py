"""The rules of a config: problems that need more than one key, and keys that have no effect in a run.

A key has no effect when its value is not the default and a key that it needs is not set. This is an error if it
contradicts a choice in the same file (momentum with AdamW). If it only depends on the layout (virtual stages without a
pipeline), one line is printed and the run goes on, so that one file serves a sweep over layouts.

Keys that only other recipes read from the same file are one line as well (`OTHER_RECIPES`).

Not in the tables are `evaluate.sequences` and the other keys of [generate], which evaluate.py and generate.py read from
the config.toml of the run; `cluster.name`, which describes the machines; `data.cache`, which also holds what
parallel.layout = "tune" measured; the weight of a single source, which is all of the mixture; and `run.lower_ranks`,
which a resolved file keeps although it has no degree of -1 left.
"""

import math
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

from torchllm.config.schema import (
    AXES,
    IN_PLACE_KINDS,
    RAW_KINDS,
    SCHEDULES,
    Config,
    Data,
    Export,
    Finetune,
    Float8,
    Generate,
    Model,
    Parallel,
    PipelineSchedule,
    RecomputeMode,
    Run,
    Source,
    gradient_accumulation,
)
from torchllm.tools.config.read import ConfigError, config_error

FLOAT8_MULTIPLE = 16
"""divisor of all sizes of a float8 product: cuBLAS takes rows whose bytes are a multiple of this"""
LEAST_TEMPERATURE = 1e-6
"""over 0: logits that are divided by less overflow, and no token is left"""

_SECRET_KEY = re.compile(r"(\.|_)(password|passphrase|secret|credentials?|token|(api|access|auth|private)_?key)$")
"""matches the names of keys that hold secrets, by their ends"""
_SECRET_TEXT = re.compile(
    r"://[^/\s:@]+:[^/\s@]+@|\b(hf_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30,})\b"
)
"""a password in a URL; keys of Hugging Face, AWS, GitHub"""


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
        *_float8_problems(config),
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
        *_expert_problems(config),
        *_lora_problems(config),
        *_data_problems(config),
        *_secret_problems(config),
        *sampling_problems(config.generate),
    ]


def layout_problems(config: Config, world_size: int | None) -> list[ConfigError]:
    """Return the problems of the degrees, and of the sizes that they must divide.

    `world_size` None: the number of ranks is unknown, and the product of the degrees is used.
    """
    parallel, wrong_degrees = resolve_degrees(config.parallel, world_size, rank_remedy(config.run))
    result = [*wrong_degrees, *_tensor_problems(config)]
    obstacle = obstacle_to_compiled_blocks(parallel.pp, parallel.schedule, parallel.cp, config.recompute.mode)
    if config.compile.block is True and obstacle is not None:
        result.append(config_error("compile.block", f"{obstacle.why}: set it to false, or {obstacle.remedy}"))
    if parallel.pp > 1:
        result += _stage_problems(config)
    if parallel.cp > 1:
        result += _context_problems(config)
    if config.float8.is_on:
        result += _float8_layout_problems(config)
    if not wrong_degrees:  # else the number of data ranks is unknown
        result += _data_rank_problems(config, parallel)
        if parallel.ep > 1 and config.model.experts:
            result += _expert_parallel_problems(config, parallel)
    return result


def rank_remedy(run: Run) -> str:
    """Tell the user how to set a number of ranks that is unknown."""
    return "set --gpus=N" if run.dry_run else "set NPROC (and NNODES), or --gpus=N for --check"


def resolve_degrees(
    parallel: Parallel, world_size: int | None, remedy: str = "set NPROC (and NNODES)"
) -> tuple[Parallel, list[ConfigError]]:
    """Return `parallel` with a degree of -1 filled in, and the problems of the degrees.

    `world_size` None: the number of ranks is unknown; then a -1 is a problem. remedy: tells the user how to set it.
    """
    degrees = {axis: getattr(parallel, axis) for axis in AXES}
    zeros = [axis for axis in AXES if degrees[axis] == 0]
    if zeros:
        message = "must be at least 1, or -1 for the ranks that the other degrees leave"
        return parallel, [config_error(f"parallel.{axis}", message) for axis in zeros]

    open_axes = [axis for axis in AXES if degrees[axis] == -1]
    if len(open_axes) == 2:
        return parallel, [config_error("parallel.dp_replicate", "only one of dp_replicate and dp_shard may be -1")]

    fixed = {axis: degree for axis, degree in degrees.items() if degree > 0}
    ranks = math.prod(fixed.values())
    product = " x ".join(f"{axis} {degree}" for axis, degree in fixed.items()) + f" = {ranks}"
    if open_axes:
        (axis,) = open_axes
        key = f"parallel.{axis}"
        if world_size is None:
            hint = f"{remedy}, or give a degree"
            return parallel, [config_error(key, f"is -1, but the number of ranks is unknown: {hint}")]
        if world_size % ranks:
            return parallel, [config_error(key, f"is -1, but {world_size} ranks are no multiple of {product}")]
        return replace(parallel, **{axis: world_size // ranks}), []

    if world_size is not None and ranks != world_size:
        largest = max(AXES, key=lambda axis: degrees[axis])
        return parallel, [
            config_error(f"parallel.{largest}", f"{product} ranks, but there are {world_size}; set one to match")
        ]
    return parallel, []


def _model_problems(config: Config) -> Iterator[ConfigError]:
    model = config.model
    length = config.training.sequence_length
    if not model.head_dim and model.hidden % model.heads:
        yield config_error(
            "model.heads", f"{model.heads} heads do not divide hidden {model.hidden}; set model.head_dim"
        )
    elif not model.features.learned_positions and model.head_width % 2:
        yield config_error("model.head_dim", f"rotary positions need an even head width, not {model.head_width}")
    elif not model.features.learned_positions and (model.rotary_width % 2 or not model.rotary_width):
        yield config_error(
            "model.rotary_fraction",
            f"{model.rotary_fraction} of a head of {model.head_width} features are {model.rotary_width}: rotary "
            "positions turn pairs of features",
        )
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
    if model.rope_beta_fast <= model.rope_beta_slow:
        yield config_error("model.rope_beta_fast", "must be over model.rope_beta_slow")
    if model.attention == "flash" and config.data.document_mask:
        yield config_error(
            "model.attention", "flash has no document mask here: use sdpa or flex, or data.document_mask = false"
        )
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
    if model.dense_layers >= model.layers:
        yield config_error(
            "model.dense_layers", f"{model.dense_layers} leaves no block with experts: model.layers is {model.layers}"
        )
    if model.upcycle and model.expert_width != model.ffn:
        yield config_error(
            "model.expert_ffn",
            f"{model.expert_width} is not the width of the layers that model.upcycle copies, model.ffn = {model.ffn}: "
            "remove the key",
        )
    if model.upcycle and model.shared_experts:
        yield config_error(
            "model.shared_experts",
            "in addition to the experts that model.upcycle copies, a shared expert would add the dense layer a second "
            "time: set it to 0",
        )
    if not (model.features.gated_ffn and not model.features.biases):
        yield config_error("model.experts", f'model.family = "{model.family}" has no experts: take "llama"')
    if config.lora.is_on:
        yield config_error("lora.rank", "has no low-rank updates of experts: set it to 0, which trains all weights")


def _router_problems(model: Model) -> Iterator[ConfigError]:
    if model.experts and model.top_k == 1 and model.router_renormalize:
        yield config_error(
            "model.router_renormalize",
            "with top_k = 1 the one score is divided by itself, and the router learns nothing: set it to false",
        )


def _float8_problems(config: Config) -> Iterator[ConfigError]:
    if config.float8.is_on and config.model.experts:
        yield config_error("float8.recipe", 'has no products of experts: set it to "none"')
    if config.float8.is_on and config.training.dtype == "float32":
        yield config_error("training.dtype", f"{_float8_recipe(config)} rounds factors that are bfloat16: use bfloat16")


def _float8_recipe(config: Config) -> str:
    return f'float8.recipe = "{config.float8.recipe}"'


def _float8_layout_problems(config: Config) -> Iterator[ConfigError]:
    """Check that all float8 products of a layout have sizes that are multiples of `FLOAT8_MULTIPLE`."""
    model, parallel, training = config.model, config.parallel, config.training
    if parallel.pp > 1 and SCHEDULES[parallel.schedule].splits_backward:
        yield config_error(
            "parallel.schedule",
            f"{parallel.schedule} computes gradients of inputs and weights separately, which the products of "
            f"{_float8_recipe(config)} cannot: use Interleaved1F1B, or 1F1B with virtual_stages = 1",
        )
    remedy = 'or set float8.recipe = "none"'
    for width in unfit_for_float8(model, parallel.tp):
        yield config_error(
            "float8.recipe",
            f"{width} is no multiple of {FLOAT8_MULTIPLE}, which float8 products need: change it, {remedy}",
        )
    tokens = training.micro_batch_size * training.sequence_length // parallel.cp
    if training.sequence_length % parallel.cp == 0 and not takes_float8_tokens(config.float8, tokens):
        yield config_error(
            "training.micro_batch_size",
            f"{training.micro_batch_size} x sequence_length {training.sequence_length} / cp {parallel.cp} = {tokens} "
            f"tokens are no multiple of {FLOAT8_MULTIPLE}, which gradients of weights in float8 need: change it, "
            f"{remedy}",
        )


def unfit_for_float8(model: Model, tp: int) -> Iterator[str]:
    """Yield the widths of a rank's matrices that do not fit float8 products, e.g. "model.ffn = 1032 / tp 2"."""
    if model.hidden % FLOAT8_MULTIPLE:
        yield f"model.hidden = {model.hidden}"
    widths = {
        "heads x head_dim": model.heads * model.head_width,
        "kv_heads x head_dim": model.kv * model.head_width,
        "ffn": model.ffn,
    }
    share = f" / tp {tp}" if tp > 1 else ""
    for name, width in widths.items():
        if width % tp == 0 and width // tp % FLOAT8_MULTIPLE:
            yield f"model.{name} = {width}{share}"


def takes_float8_tokens(float8: Float8, tokens: int) -> bool:
    """Return whether float8 products can sum over `tokens` tokens of a rank, as gradients of weights do."""
    return tokens % FLOAT8_MULTIPLE == 0 or float8.recipe == "rowwise_with_gw_hp"


def _lora_problems(config: Config) -> Iterator[ConfigError]:
    model, lora = config.model, config.lora
    if not lora.is_on:
        return
    if model.frozen:
        yield config_error(
            "model.frozen", f"lora.rank = {lora.rank} freezes all weights already, and trains their updates: remove it"
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
            f"{_float8_recipe(config)} has no products for the low-rank updates of lora.rank = {lora.rank}: set one of "
            "them to its default",
        )
    if not lora.targets:
        yield config_error("lora.targets", "is empty, so nothing would be trained: name at least one matrix")
    for target, count in Counter(lora.targets).items():
        if count > 1:
            yield config_error("lora.targets", f"names {target} {count} times")


def _data_problems(config: Config) -> Iterator[ConfigError]:
    if not config.data.sources:
        yield config_error("data.sources", "is empty: name at least one [[data.sources]]")
    for index, source in enumerate(config.data.sources):
        needs_path = source.kind not in ("stdlib", "synthetic")
        if needs_path and not source.path:
            yield config_error(f"data.sources.{index}.path", f"a source of kind {source.kind!r} needs a path")
        if source.kind == "csv" and not re.fullmatch(r'[^"\r\n]?', source.delimiter):
            yield config_error(f"data.sources.{index}.delimiter", "of csv must be one character, no quote or line end")
        if source.messages_key and not config.data.document_mask:
            yield config_error(
                "data.document_mask",
                f"data.sources.{index} holds conversations, and several are packed into a sequence: set it to true, or "
                "each would attend to the conversations before it",
            )
    if any(source.kind == "nanogpt" for source in config.data.sources):
        yield from _nanogpt_problems(config.data)
    yield from _mixture_problems(config.data, config.training.steps)
    if config.evaluate.interval and not config.data.validation_fraction:
        yield config_error("evaluate.interval", "nothing is held out: set data.validation_fraction")


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
    tasks_interval = config.evaluate.tasks_interval
    if tasks_interval and (not checkpoint.interval or tasks_interval % checkpoint.interval):
        yield config_error(
            "evaluate.tasks_interval",
            f"{tasks_interval} is no multiple of checkpoint.interval {checkpoint.interval}: tasks are evaluated on "
            "checkpoints",
        )


def _metrics_problems(config: Config) -> Iterator[ConfigError]:
    if config.metrics.profile_steps:
        steps = re.fullmatch(r"([1-9]\d*):(\d+)", config.metrics.profile_steps)
        if not steps or int(steps[1]) >= int(steps[2]):
            yield config_error("metrics.profile_steps", "must be FIRST:END, as 10:13 for steps 10, 11 and 12")


def _secret_problems(config: Config) -> Iterator[ConfigError]:
    """Find secrets in a config that experiment trackers would receive."""
    if config.metrics.trackers:
        receiver = f"metrics.{config.metrics.trackers[0]}"
        advice = "keep it in an environment variable or in a separate file"
        for key, text in texts_of(asdict(config)):
            if text and _SECRET_KEY.search(key):
                yield config_error(key, f"has the name of a secret, and {receiver} uploads the config: {advice}")
            elif _SECRET_TEXT.search(text):
                yield config_error(key, f"has a password or an access key, and {receiver} uploads the config: {advice}")


def texts_of(table: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of each string in a table, nested tables and lists included."""
    if isinstance(table, str):
        yield key, table
    elif isinstance(table, dict):
        for name, value in table.items():
            yield from texts_of(value, f"{key}.{name}" if key else name)
    elif isinstance(table, (list, tuple)):
        for index, value in enumerate(table):
            yield from texts_of(value, f"{key}.{index}")


def _event_problems(run: Run) -> Iterator[ConfigError]:
    try:
        words = shlex.split(run.on_event)
    except ValueError as error:
        yield config_error("run.on_event", f"{error} in {run.on_event!r}")
        return
    if words and shutil.which(words[0]) is None:
        yield config_error("run.on_event", f"{words[0]!r} is no command here: give the path of an executable file")


def _tensor_problems(config: Config) -> Iterator[ConfigError]:
    """Check that tp divides the model's sizes."""
    model = config.model
    parallel = config.parallel
    widths = {"heads": model.heads, "kv_heads": model.kv, "ffn": model.ffn}
    if model.expert_ffn and parallel.ep == 1:
        widths["expert_ffn"] = model.expert_ffn
    for key, size in widths.items():
        if size % parallel.tp:
            yield config_error("parallel.tp", f"{parallel.tp} does not divide model.{key} = {size}")
    if _has_rank_without_rows(model.vocab_rows, parallel.tp):
        yield config_error(
            "parallel.tp", f"{parallel.tp} leaves a rank without a row of model.vocab = {model.vocab_rows}"
        )

    length = config.training.sequence_length
    cuts_sequence = parallel.sequence_parallel or (parallel.pp > 1 and parallel.scatter_gather)
    if cuts_sequence and length % parallel.cp == 0 and (length // parallel.cp) % parallel.tp:
        divided = f"training.sequence_length = {length}"
        if parallel.cp > 1:
            divided += " / cp"
        hint = "" if parallel.sequence_parallel else "; or set parallel.scatter_gather = false"
        yield config_error("parallel.tp", f"{parallel.tp} does not divide {divided}{hint}")


def _expert_parallel_problems(config: Config, parallel: Parallel) -> Iterator[ConfigError]:
    """Check that ep divides experts and ranks. The degrees of `parallel` are resolved."""
    ep = parallel.ep
    ranks = parallel.dp_shard * parallel.cp * parallel.tp
    if config.model.experts % ep:
        yield config_error("parallel.ep", f"{ep} does not divide model.experts = {config.model.experts}")
    if ranks % ep:
        product = f"dp_shard {parallel.dp_shard} x cp {parallel.cp} x tp {parallel.tp} = {ranks}"
        yield config_error("parallel.ep", f"{ep} does not divide {product}, whose ranks it borrows")
    if parallel.zero == 0:
        yield config_error(
            "parallel.zero_stage", "0 keeps all weights on every rank, but parallel.ep shares the experts: set 1"
        )
    shared = config.model.shared_experts * config.model.expert_width
    if shared % parallel.tp:
        yield config_error("parallel.tp", f"{parallel.tp} does not divide the width of the shared experts, {shared}")
    part = config.training.sequence_length // parallel.cp
    if part % parallel.tp:
        yield config_error(
            "parallel.tp",
            f"{parallel.tp} does not divide the {part} tokens of a sequence, as ep needs",
        )


def _has_rank_without_rows(rows: int, ranks: int) -> bool:
    """Whether torch, which gives the first ranks ceil(rows / ranks) rows each, leaves no rows for the last rank."""
    per_rank = math.ceil(rows / ranks)
    return per_rank * (ranks - 1) >= rows


def _data_rank_problems(config: Config, parallel: Parallel) -> Iterator[ConfigError]:
    """Check that the data ranks can share the batch and the weights. The degrees of `parallel` are resolved."""
    rows = config.model.vocab_rows
    training = config.training
    is_uneven = rows % parallel.tp and not _has_rank_without_rows(rows, parallel.tp)
    if is_uneven and parallel.data_ranks * parallel.cp > 2:
        # torch 2.13 on rows that tp shares unevenly: FSDP over more than two ranks puts some in the wrong place
        # (initial weights, gathered tensors, checkpoints) without an error; and whole weights that share a buffer
        # with them are summed in another order on each tp rank, so that their copies drift apart.
        padding = -config.model.vocab % parallel.tp
        yield config_error(
            "model.vocab",
            f"{rows} rows are no multiple of tp {parallel.tp}: torch 2.13 misplaces uneven rows silently on more than "
            "two ranks of dp x cp; choose a tp that divides them, or in a new run set "
            f"model.vocab_padding = {padding}, rows that the softmax leaves out",
        )
    per_pass = training.micro_batch_size * parallel.data_ranks
    if training.global_batch_size % per_pass:
        yield config_error(
            "training.global_batch_size",
            f"{training.global_batch_size} is no multiple of micro_batch_size {training.micro_batch_size} x "
            f"{parallel.data_ranks} data-parallel ranks = {per_pass}",
        )
    if parallel.pp > 1 and _has_stages_it_allows(parallel):
        yield from micro_batch_problems(parallel, gradient_accumulation(training, parallel.data_ranks))


def _has_stages_it_allows(parallel: Parallel) -> bool:
    """Whether the pipeline schedule allows the number of stages per rank."""
    limit = SCHEDULES[parallel.schedule].most_stages
    return limit == math.inf or parallel.stages_per_rank == limit


class Obstacle(NamedTuple):
    """The reason why torch cannot compile the blocks of a layout."""

    why: str
    remedy: str
    """the keys to change instead"""


BLOCK_MODES = ("full", "every_k", "selective", "selective_half")
"""values of recompute.mode whose recomputation is inside the graph of a compiled block, and covers its attention"""


def obstacle_to_compiled_blocks(pp: int, schedule: PipelineSchedule, cp: int, mode: RecomputeMode) -> Obstacle | None:
    """Return the reason why torch cannot compile the blocks of a layout; None if it can.

    pp, schedule and cp are keys of [parallel], mode is recompute.mode.
    """
    if pp > 1 and SCHEDULES[schedule].splits_backward:
        return Obstacle(
            f"{schedule} computes gradients of inputs and weights separately, which a compiled block cannot",
            "use Interleaved1F1B, or 1F1B with virtual_stages = 1",
        )
    if cp > 1 and mode in BLOCK_MODES:
        return Obstacle(
            f"with recompute.mode = {mode!r} and cp, whose attention stays outside the graphs, torch "
            "compiles none of a block",
            'use recompute.mode = "segment" (k = 1 is full) or "ffn"',
        )
    return None


def _stage_problems(config: Config) -> Iterator[ConfigError]:
    """Check the stages of a pipeline; pp is over 1."""
    model = config.model
    parallel = config.parallel
    kind = SCHEDULES[parallel.schedule]
    if not _has_stages_it_allows(parallel):
        yield config_error(
            "parallel.virtual_stages",
            f"{parallel.schedule} has {kind.most_stages} per rank, not {parallel.stages_per_rank}",
        )
        return
    stages = parallel.stages
    if stages > model.layers:
        yield config_error("parallel.pp", f"{stages} stages need a block each, but model.layers is {model.layers}")
    if parallel.split and (len(parallel.split) != stages or sum(parallel.split) != model.layers):
        yield config_error(
            "parallel.split",
            f"names {len(parallel.split)} stages of {sum(parallel.split)} blocks in all, but there are {stages} stages "
            f"({parallel.pp} ranks x {parallel.stages_per_rank}) and model.layers is {model.layers}",
        )


def micro_batch_problems(parallel: Parallel, count: int) -> Iterator[ConfigError]:
    """Check that the pipeline schedule accepts `count` micro batches per step."""
    key = "training.global_batch_size"
    needs = f"{parallel.schedule} on {parallel.pp} pipeline ranks needs"
    actual = f"a step has {count} (global_batch_size / micro_batch_size / data-parallel ranks)"
    if parallel.schedule == "1F1B" and count < parallel.pp:
        yield config_error(key, f"{needs} at least {parallel.pp} micro batches; {actual}")
    if parallel.schedule == "DualPipeV" and count < parallel.stages:
        yield config_error(key, f"{needs} at least {parallel.stages} micro batches; {actual}")
    if parallel.schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, count // parallel.pp)
        if count > parallel.pp and count % rounds:
            yield config_error(key, f"{needs} micro batches that divide into {rounds} equal rounds; {actual}")


def _context_problems(config: Config) -> Iterator[ConfigError]:
    """Check the limits of context parallelism; cp is over 1."""
    model = config.model
    parallel = config.parallel
    length = config.training.sequence_length
    is_ring = parallel.cp_method == "ring"
    pieces = parallel.cp * 2 if is_ring else parallel.cp
    if length % pieces:
        why = " (two pieces per rank, so that causal work is even)" if is_ring else ""
        yield config_error("parallel.cp", f"training.sequence_length = {length} does not divide into {pieces}{why}")
    heads = model.kv // parallel.tp
    if not is_ring and heads % parallel.cp:
        source = f" (model.kv_heads {model.kv} / tp {parallel.tp})" if parallel.tp > 1 else ""
        yield config_error(
            "parallel.cp",
            f"ulysses gives each rank whole key-value heads, but {heads}{source} do not divide by {parallel.cp} ranks: "
            f'set it to {math.gcd(heads, parallel.cp)}, or use parallel.cp_method = "ring"',
        )
    if is_ring and model.attention in ("flash", "flex"):
        yield config_error(
            "model.attention",
            f"{model.attention} cannot be merged block by block in a ring: use sdpa or eager, or "
            'parallel.cp_method = "ulysses"',
        )
    if is_ring and model.window_within(length) < length:
        yield config_error(
            "parallel.cp_method",
            f"a ring sends all keys to all ranks and has no sliding window: model.window = {model.window} is under "
            f'training.sequence_length = {length}; use "ulysses"',
        )


class IdleKey(NamedTuple):
    """A key without effect, and the reason."""

    key: str
    reason: str
    """follows "it" in a message: "needs parallel.cp over 1" """
    remedy: str = ""
    """more advice for the user, after the message"""

    @property
    def message(self) -> str:
        """The message about the key."""
        return f"does nothing in this run: it {self.reason}"


class Condition(NamedTuple):
    """The condition for a key to have an effect."""

    key: str
    is_met: Callable[[Config], bool]
    text: str
    """the condition in words"""


def _has_rotary_positions(config: Config) -> bool:
    return not config.model.features.learned_positions


def _scales_rotary_positions(config: Config) -> bool:
    return _has_rotary_positions(config) and config.model.rope_scaling_factor > 1


def _scales_by(*kinds: str) -> Callable[[Config], bool]:
    """Return whether a config scales its rotary positions in one of these ways."""
    return lambda config: _scales_rotary_positions(config) and config.model.rope_scaling in kinds


def _has_experts(config: Config) -> bool:
    return config.model.experts > 0


def _uses_adamw(config: Config) -> bool:
    return config.optimizer.name in ("adamw", "muon")


def _keeps_average(config: Config) -> bool:
    return config.optimizer.ema_decay > 0


def _trains(*roles: str, decays: bool = False) -> Callable[[Config], bool]:
    """Return whether a config trains parameters with one of these roles. decays: and whether their weights decay."""

    def is_met(config: Config) -> bool:
        from torchllm.facts.frozen import is_trained  # of no use to other runs
        from torchllm.facts.parameters import rule_of
        from torchllm.facts.shapes import parameter_shapes

        optimizer = config.optimizer
        rates = {"head": optimizer.head_rate, "vector": optimizer.vector_rate}
        rates |= dict.fromkeys(("embedding", "position"), optimizer.embedding_rate)
        wanted = [role for role in roles if not decays or optimizer.weight_decay * rates[role] > 0]
        model = config.model if config.model.frozen else replace(config.model, layers=1)
        with suppress(re.error):  # another message is about it
            trained = (name for name in parameter_shapes(model) if is_trained(name, model, config.trained))
            return any(rule_of(name).role in wanted for name in trained)
        return True

    return is_met


def _evaluates_tasks(config: Config) -> bool:
    return config.evaluate.tasks_interval > 0


def _profiles_a_step(config: Config) -> bool:
    """Whether the first profiled step may be one of the run's, whose length finetune.epochs may decide."""
    first = re.match(r"\d+", config.metrics.profile_steps)
    return first is None or int(first[0]) <= config.training.steps or config.finetune.epochs > 0


def _has_rank_file(config: Config) -> bool:
    """Whether the tokenizer is a tiktoken rank file: neither bytes nor Hugging Face's tokenizer.json."""
    return config.data.tokenizer != "bytes" and not config.data.tokenizer.endswith(".json")


def _reads_raw_text(config: Config) -> bool:
    return any(source.kind in RAW_KINDS for source in config.data.sources)


def _may_read_bad_records(config: Config) -> bool:
    """Whether a source is the user's own text: unreadable files of the standard library are always skipped."""
    return any(source.kind in RAW_KINDS and source.kind != "stdlib" for source in config.data.sources)


def _reads_separators(config: Config) -> bool:
    return any(source.kind in ("nanogpt", "llmc", "mds") for source in config.data.sources)


def _reads_ids_without_header(config: Config) -> bool:
    return any(source.kind == "nanogpt" for source in config.data.sources)


def _has_pipeline(config: Config) -> bool:
    return config.parallel.pp > 1


def _sends_whole_hidden_states(config: Config) -> bool:
    """Whether the hidden states that a pipeline stage sends are replicated over tp."""
    parallel = config.parallel
    return parallel.pp > 1 and parallel.tp > 1 and not parallel.sequence_parallel


def _shards_weights(config: Config) -> bool:
    parallel = config.parallel
    return parallel.dp_shard * parallel.cp > 1 and parallel.zero > 0


def _chooses_zero_stage(config: Config) -> bool:
    """Whether the ZeRO stage matters: 1 to 3 need ranks to shard weights over; 0 (DDP) also needs only replicas."""
    parallel = config.parallel
    if parallel.zero == 0:
        return parallel.data_ranks * parallel.cp > 1
    return parallel.dp_shard * parallel.cp > 1


EXPERTS = "model.experts over 0"
ADAMW = 'optimizer.name = "adamw" or "muon"'
AVERAGE = "optimizer.ema_decay over 0"
OWN_HEAD = "model.tied_embeddings = false"
FREE = "that neither model.frozen nor lora.rank freezes"
DECAY = "optimizer.weight_decay and a learning rate over 0"
ROTARY = 'rotary positions, which model.family = "llama" has'
SCALED = "model.rope_scaling_factor over 1"
LLAMA3 = f'{SCALED} and model.rope_scaling = "llama3"'
YARN = f'{SCALED} and model.rope_scaling = "yarn"'
LONGER_TEXT = "a longer training.sequence_length or model.max_sequence_length"
CHECKPOINTS = "checkpoint.interval over 0, or saves on request"
EXPORT = "recipes/export.py, after the training"
PIPELINE = "parallel.pp over 1"
SHARDED = "parallel.dp_shard x cp over 1 and parallel.zero_stage over 0"

CONTRADICTIONS = (
    Condition("run.json", lambda config: config.run.dry_run, "run.dry_run = true"),
    Condition("model.rope_theta", _has_rotary_positions, ROTARY),
    Condition("model.rotary_fraction", _has_rotary_positions, ROTARY),
    Condition("model.rope_scaling_factor", _has_rotary_positions, ROTARY),
    Condition("model.rope_scaling", _scales_rotary_positions, SCALED),
    Condition(
        "model.rope_original_length",
        _scales_by("llama3", "yarn"),
        f'{SCALED} and model.rope_scaling = "llama3" or "yarn"',
    ),
    Condition("model.rope_low_frequency_factor", _scales_by("llama3"), LLAMA3),
    Condition("model.rope_high_frequency_factor", _scales_by("llama3"), LLAMA3),
    Condition("model.rope_beta_fast", _scales_by("yarn"), YARN),
    Condition("model.rope_beta_slow", _scales_by("yarn"), YARN),
    Condition("model.rope_truncate", _scales_by("yarn"), YARN),
    Condition("model.rope_attention_factor", _scales_by("yarn"), YARN),
    Condition(
        "model.qkv_bias",
        lambda config: not config.model.features.biases,
        "a model.family whose matrices have no biases yet, as llama",
    ),
    Condition("model.top_k", _has_experts, EXPERTS),
    Condition("model.expert_ffn", _has_experts, EXPERTS),
    Condition(
        "model.upcycle",
        lambda config: bool(config.model.experts and (config.model.from_hf or config.checkpoint.initial)),
        "model.experts over 0, and model.from_hf or checkpoint.initial",
    ),
    Condition("model.upcycle_noise", lambda config: config.model.upcycle, "model.upcycle = true"),
    Condition("model.shared_experts", _has_experts, EXPERTS),
    Condition("model.dense_layers", _has_experts, EXPERTS),
    Condition("model.router_score", _has_experts, EXPERTS),
    Condition("model.router_dtype", _has_experts, EXPERTS),
    Condition("model.router_renormalize", _has_experts, EXPERTS),
    Condition("model.router_scale", _has_experts, EXPERTS),
    Condition("model.router_bias", _has_experts, EXPERTS),
    Condition(
        "model.router_bias_rate",
        lambda config: _has_experts(config) and config.model.router_bias,
        f"{EXPERTS} and model.router_bias = true",
    ),
    Condition("model.balance_loss", _has_experts, EXPERTS),
    Condition(
        "model.balance_weight",
        lambda config: _has_experts(config) and config.model.balance_loss != "none",
        f'{EXPERTS} and model.balance_loss = "sequence" or "global"',
    ),
    Condition("model.router_z_loss", _has_experts, EXPERTS),
    Condition("parallel.ep", _has_experts, EXPERTS),
    Condition("data.pattern", _has_rank_file, "a tiktoken rank file as data.tokenizer"),
    Condition("data.dtype", _reads_ids_without_header, 'a source of kind "nanogpt"'),
    Condition("data.separator", _reads_separators, 'a source of kind "nanogpt", "llmc" or "mds"'),
    Condition(
        "training.max_consecutive_nonfinite",
        lambda config: config.training.on_nonfinite == "skip",
        'training.on_nonfinite = "skip"',
    ),
    Condition(
        "compile.norm",
        lambda config: config.model.features.norm == "rms" or config.model.qk_norm != "none",
        "RMSNorm (family llama): LayerNorm is one kernel already",
    ),
    Condition("optimizer.beta1", _uses_adamw, ADAMW),
    Condition("optimizer.beta2", _uses_adamw, ADAMW),
    Condition("optimizer.epsilon", _uses_adamw, ADAMW),
    Condition("optimizer.momentum", lambda config: config.optimizer.name == "sgd", 'optimizer.name = "sgd"'),
    Condition("optimizer.muon_momentum", lambda config: config.optimizer.name == "muon", 'optimizer.name = "muon"'),
    Condition("optimizer.adjust_lr_fn", lambda config: config.optimizer.name == "muon", 'optimizer.name = "muon"'),
    Condition("evaluate.ema", _keeps_average, AVERAGE),
    Condition("generate.ema", _keeps_average, AVERAGE),
    Condition("optimizer.embedding_rate", _trains("embedding", "position"), f"embeddings {FREE}"),
    Condition("optimizer.embedding_decay", _trains("embedding", decays=True), f"{DECAY}, and embeddings {FREE}"),
    Condition("optimizer.head_rate", _trains("head"), f"{OWN_HEAD}, and a head {FREE}"),
    Condition("optimizer.head_decay", _trains("head", decays=True), f"{OWN_HEAD}, {DECAY}, and a head {FREE}"),
    Condition("optimizer.vector_rate", _trains("vector"), f"vectors {FREE}"),
    Condition("optimizer.vector_decay", _trains("vector", "position", decays=True), f"{DECAY}, and vectors {FREE}"),
    Condition("schedule.decay_steps", lambda config: config.schedule.name == "wsd", 'schedule.name = "wsd"'),
    Condition("schedule.decay", lambda config: config.schedule.name == "wsd", 'schedule.name = "wsd"'),
    Condition(
        "schedule.final_fraction",
        lambda config: config.schedule.name != "constant",
        "a schedule.name that is not constant",
    ),
    Condition(
        "checkpoint.keep_every",
        lambda config: config.checkpoint.keep > 0 and config.checkpoint.interval > 0,
        "checkpoint.keep and checkpoint.interval over 0",
    ),
    Condition("metrics.profile_steps", _profiles_a_step, "a first step that is not over training.steps"),
    Condition("generate.top_k", lambda config: config.generate.temperature > 0, "generate.temperature over 0"),
    Condition("evaluate.tasks_interval", lambda config: len(config.evaluate.tasks) > 0, "evaluate.tasks"),
    Condition(
        "recompute.k",
        lambda config: config.recompute.mode in ("segment", "every_k"),
        'recompute.mode = "segment" or "every_k"',
    ),
    Condition("lora.alpha", lambda config: config.lora.is_on, "lora.rank over 0"),
    Condition("lora.targets", lambda config: config.lora.is_on, "lora.rank over 0"),
    Condition(
        "export.adapter", lambda config: config.lora.is_on, "lora.rank over 0: without LoRA all weights are trained"
    ),
)
"""keys that contradict a choice: an error"""

SOURCE_KINDS = {
    "path": ("text", "jsonl", "parquet", "csv", "arrow", "hub", "tokens", *IN_PLACE_KINDS),
    "text_key": ("jsonl", "parquet", "csv", "arrow", "hub", "mds"),
    "messages_key": ("jsonl", "parquet", "csv", "arrow", "hub"),
    "delimiter": ("text", "csv"),
    "subset": ("hub",),
    "split": ("hub",),
    "revision": ("hub",),
}
"""key of a source -> kinds that use it: an error with any other"""

IDLE = (
    Condition("parallel.schedule", _has_pipeline, PIPELINE),
    Condition("parallel.virtual_stages", _has_pipeline, PIPELINE),
    Condition("parallel.split", _has_pipeline, PIPELINE),
    Condition("parallel.rebalance", _has_pipeline, PIPELINE),
    Condition(
        "parallel.scatter_gather",
        _sends_whole_hidden_states,
        "parallel.pp and parallel.tp over 1, without parallel.sequence_parallel",
    ),
    Condition("parallel.cp_method", lambda config: config.parallel.cp > 1, "parallel.cp over 1"),
    Condition("parallel.sequence_parallel", lambda config: config.parallel.tp > 1, "parallel.tp over 1"),
    Condition("parallel.zero_stage", _chooses_zero_stage, "parallel.dp_shard x cp over 1"),
    Condition(
        "parallel.keep_last_block",
        lambda config: _shards_weights(config) and config.parallel.zero == 3,
        "parallel.dp_shard x cp over 1 and parallel.zero_stage = 3",
    ),
    Condition("parallel.prefetch", _shards_weights, SHARDED),
    # Keys for raw text do not contradict shards that recipes/prepare.py made from that text.
    Condition("data.on_bad_record", _may_read_bad_records, "a source of your own raw text"),
    Condition(
        "data.max_bad_share",
        lambda config: config.data.on_bad_record == "skip" and _may_read_bad_records(config),
        'data.on_bad_record = "skip" and a source of your own raw text',
    ),
    Condition("data.max_raw_mib", _reads_raw_text, "a source of raw text"),
    # A published model may be trained on sequences within its window, which is for longer texts.
    Condition("model.window", lambda config: config.longest_text > config.model.window, LONGER_TEXT),
    Condition("checkpoint.keep", lambda config: config.checkpoint.interval > 0, CHECKPOINTS),
)
"""keys that need a layout, a source or a length that this run does not have: a printed line"""

OTHER_RECIPES = (
    Condition(
        "evaluate.ema",
        lambda config: config.evaluate.interval > 0 or _evaluates_tasks(config),
        "evaluate.interval or evaluate.tasks_interval over 0, or recipes/evaluate.py",
    ),
    Condition("evaluate.tasks", _evaluates_tasks, "evaluate.tasks_interval over 0, or recipes/evaluate.py"),
    *(Condition(f"export.{key.name}", lambda _: False, EXPORT) for key in fields(Export) if key.name != "dtype"),
    Condition("export.dtype", _evaluates_tasks, f"evaluate.tasks_interval over 0, or {EXPORT}"),
    *(Condition(f"finetune.{key.name}", lambda _: False, "RECIPE=recipes/finetune.py") for key in fields(Finetune)),
)
"""keys that a recipe which trains does not read, or not in every run: a printed line"""


def contradictions(config: Config) -> list[IdleKey]:
    """Return the keys that have no effect because another key rules them out."""
    unmet = [idle_key._replace(remedy="; or remove it") for idle_key in _unmet(config, CONTRADICTIONS)]
    return [*unmet, *_unused_source_keys(config.data.sources)]


def describe_idle_keys(found: Sequence[IdleKey], located: Callable[[str], str]) -> str:
    """Return one line about keys without effect. located: returns a key after its origin."""
    keys: dict[str, list[str]] = {}
    for idle_key in found:
        keys.setdefault(idle_key.reason, []).append(located(idle_key.key))
    parts = []
    for reason, members in keys.items():
        verb, subject = ("does", "it") if len(members) == 1 else ("do", "they")
        needs = reason if len(members) == 1 else reason.replace("needs", "need", 1)
        parts.append(f"{', '.join(members)}: {verb} nothing in this run: {subject} {needs}")
    return "; ".join(parts)


def idle_keys(config: Config) -> list[IdleKey]:
    """Return the keys that have no effect in this layout. No degree may be -1."""
    return list(_unmet(config, IDLE))


def keys_of_other_recipes(config: Config, is_finetuning: bool) -> list[IdleKey]:
    """Return the keys that have no effect in a training, by recipes/finetune.py or another recipe."""
    found = _unmet(config, OTHER_RECIPES)
    return [idle_key for idle_key in found if not (is_finetuning and idle_key.key.startswith("finetune."))]


def _unmet(config: Config, needs: Iterable[Condition]) -> Iterator[IdleKey]:
    for need in needs:
        section_name, name = need.key.split(".")
        section = getattr(config, section_name)
        default = getattr(type(section), name)  # the default of the class, which a forked recipe may have changed
        if getattr(section, name) != default and not need.is_met(config):
            yield IdleKey(need.key, f"needs {need.text}")


def _unused_source_keys(sources: Iterable[Source]) -> Iterator[IdleKey]:
    for index, source in enumerate(sources):
        for name, kinds in SOURCE_KINDS.items():
            if getattr(source, name) != getattr(Source, name) and source.kind not in kinds:
                yield IdleKey(f"data.sources.{index}.{name}", f"needs another kind than {source.kind!r}")
