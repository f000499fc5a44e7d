"""The rules of parts that few runs have, each called for the runs that do; `checks.py` has the others."""

import math
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torchllm.config.files import is_url
from torchllm.config.schema import IN_PLACE_KINDS, RAW_KINDS, Config, Model, Source
from torchllm.config.stages import of_span, spans_of
from torchllm.runtime.storage import storage_problem
from torchllm.tools.config.checks import model_problems
from torchllm.tools.config.degrees import problems_of_one_size
from torchllm.tools.config.read import ConfigError, config_error, key_of_kind


def kind_problems(config: Config) -> Iterator[ConfigError]:
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
    of_all = list(model_problems(config))
    for path, of_kind in config.of_kinds.items():
        for problem in model_problems(of_kind):
            if problem not in of_all:
                name = problem.path[-1]
                yield config_error(f"{path}.{name}", problem.message)
        view = of_kind.model
        key = "block_scale" if view.block_scale else "dense_beside" if view.dense_beside and view.experts else ""
        if key and view.norm_position != "both":
            yield config_error(
                f"{path}.norm_position", f'{view.norm_position!r} has too few norms for model.{key}: set it to "both"'
            )


def block_problems(config: Config) -> Iterator[ConfigError]:
    model = config.model
    if config.lora.is_on or model.from_hf:
        other = "lora.rank" if config.lora.is_on else "model.from_hf"
        yield config_error("model.block", f"{model.block!r} does not combine with {other}: remove one of the keys")


def expert_problems(config: Config) -> Iterator[ConfigError]:
    model = config.model
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


def router_problems(config: Config) -> Iterator[ConfigError]:
    if config.model.top_k == 1 and config.model.router_renormalize:
        yield config_error(
            "model.router_renormalize",
            "with top_k = 1 the one score is divided by itself, and the router learns nothing: set it to false",
        )


def width_problems(config: Config) -> Iterator[ConfigError]:
    """Check that each parameter has a rule for its width (muP for AdamW)."""
    model = config.model
    if config.optimizer.name != "adamw":
        message = f'has the rules of AdamW, not of {config.optimizer.name}: set optimizer.name = "adamw", or it to 0'
        yield config_error("model.base_width", message)
    if config.lora.is_on:
        yield config_error("model.base_width", "has no rule for low-rank updates: set it to 0, or lora.rank to 0")
    if model.tied_embeddings and model.width_ratio != 1.0 and not math.isclose(model.logit_divisor, model.width_ratio):
        yield config_error(
            "model.logit_divisor",
            f"logits of a tied head are divided by hidden / base_width: set it to {model.width_ratio!r}, or "
            "model.tied_embeddings to false",
        )


def weights_problems(config: Config) -> Iterator[ConfigError]:
    """Check for keys that rule out weights in bfloat16."""
    others = {
        "float8.recipe": (config.float8.is_on, "float8 is rounded from float32 weights"),
        "lora.rank": (config.lora.is_on, "updates are float32, and the weights are frozen"),
        "optimizer.name": (config.optimizer.name != "adamw", "AdamW alone rounds such weights without bias"),
    }
    for key, (is_on, reason) in others.items():
        if is_on:
            yield config_error("training.weights_dtype", f'is "bfloat16", and {key} is set, but {reason}: remove one')


def state_problems(config: Config) -> Iterator[ConfigError]:
    """Check that no block of moments in 8 bits is cut. They are not on the host."""
    from torchllm.facts.state_blocks import BLOCK  # of no use to other runs
    from torchllm.tools.config.cut_blocks import cut_rows

    if config.optimizer.offloads:
        reason = 'is for moments in float32 or bfloat16: set it to false, or optimizer.state_dtype = "bfloat16"'
        yield config_error("optimizer.offload", reason)
    parallel = config.parallel
    if cut := cut_rows(config.model, parallel.tp, parallel.ep, parallel.dp_shard * parallel.cp):
        yield config_error(
            "optimizer.state_dtype",
            f'"int8" has blocks of {BLOCK} elements, and {cut.key} cuts the rows of {cut.name}, of {cut.width}, into '
            f'{cut.parts} parts: set it to "bfloat16", or use a divisor of {cut.width // BLOCK} parts',
        )


def float8_problems(config: Config) -> Iterator[ConfigError]:
    if config.model.experts:
        yield config_error("float8.recipe", 'has no products of experts: set it to "none"')
    if config.training.dtype == "float32":
        yield config_error(
            "training.dtype", f'float8.recipe = "{config.float8.recipe}" rounds factors that are bfloat16: use bfloat16'
        )


def graph_problems(config: Config) -> Iterator[ConfigError]:
    """Check for keys that rule out a CUDA graph of a step, by changing shapes or host work in each step."""
    causes = {
        "parallel.pp": (config.parallel.pp != 1, "the stages of a pipeline are not captured"),
        "model.experts": (
            config.model.experts,
            "experts get other numbers of tokens in each step, which the host notes",
        ),
        "data.stage": (config.data.changes_size, "a stage has steps of another size"),
        "data.document_mask": (config.data.document_mask, "each micro batch has another number of documents"),
        "float8.recipe": (config.float8.is_on, "the scales of float8 weights are made anew in each step"),
        "optimizer.offload": (config.optimizer.offloads, "graphs spare the host, for which each step waits then"),
        "optimizer.ema_offload": (config.optimizer.offloads_average, "each step waits for copies of all weights"),
        "recompute.offload": (config.recompute.offload, "copies to the host are not captured"),
        "run.device": (config.run.device == "cpu", "a CPU has no CUDA graphs"),
    }
    for key, (is_set, why) in causes.items():
        if is_set:
            yield config_error("compile.graphs", f"{why}: set it to false, or change {key}")


def update_problems(config: Config) -> Iterator[ConfigError]:
    model, lora = config.model, config.lora
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

        present = {name for view in model.views for name in target_shapes(view)}  # a kind may lack some
        if absent := [target for target in lora.targets if target not in present]:
            yield config_error("lora.targets", f"the blocks have no {', '.join(absent)}: leave it out")
    for target, count in Counter(lora.targets).items():
        if count > 1:
            yield config_error("lora.targets", f"names {target} {count} times")


def nanogpt_problems(config: Config) -> Iterator[ConfigError]:
    """Check the keys that nanoGPT's files need because they have no header."""
    data = config.data
    if not data.dtype:
        yield config_error("data.dtype", 'is empty, and nanoGPT\'s files do not say it: "uint16" for GPT-2')
    if data.separator < 0:
        yield config_error("data.separator", "is not set, and nanoGPT's files do not say it: 50256 for GPT-2")


def fim_problems(config: Config) -> Iterator[ConfigError]:
    if len(config.data.fim_tokens) != 3:
        yield config_error("data.fim_tokens", "must be 3 names: of the tokens before prefix, suffix and middle")
    for index, source in enumerate(config.data.sources):
        if config.data.fim_rate and (source.messages_key or source.kind not in RAW_KINDS):
            what = "holds conversations" if source.messages_key else "has its tokens already"
            cure = "set it for recipes/prepare.py with the texts alone, then 0"
            yield config_error("data.fim_rate", f"cuts documents of text, and data.sources.{index} {what}: {cure}")


def url_problems(config: Config) -> Iterator[ConfigError]:
    for key, source in config.data.all_sources.items():
        if is_url(source.path) and (problem := url_problem(source)):
            yield config_error(f"{key}.path", f"{source.path!r} {problem}")


def url_problem(source: Source) -> str:
    """Return why the URL of a source cannot be read; "" if it may be."""
    if source.kind == "hub" or "://huggingface.co/" in source.path:
        return 'is a URL: for a data set of the hub set kind = "hub", and this to its id: "HuggingFaceFW/fineweb-edu"'
    if source.kind in IN_PLACE_KINDS:
        return f"is a URL, which a source of kind = {source.kind!r} does not read: download it"
    return storage_problem(source.path)


def resume_problems(_: Config) -> Iterator[ConfigError]:
    message = "is a URL: set checkpoint.remote to the URL of the run, whose newest step is loaded, or download the step"
    yield config_error("checkpoint.resume", message)


def remote_problems(config: Config) -> Iterator[ConfigError]:
    if problem := storage_problem(config.checkpoint.remote):
        yield config_error("checkpoint.remote", f"{config.checkpoint.remote!r} {problem}")


def profile_problems(config: Config) -> Iterator[ConfigError]:
    steps = re.fullmatch(r"([1-9]\d*):(\d+)", config.metrics.profile_steps)
    if not steps or int(steps[1]) >= int(steps[2]):
        yield config_error("metrics.profile_steps", "must be FIRST:END, as 10:13 for steps 10, 11 and 12")


def event_problems(config: Config) -> Iterator[ConfigError]:
    try:
        words = shlex.split(config.run.on_event)
    except ValueError as error:
        yield config_error("run.on_event", f"{error} in {config.run.on_event!r}")
        return
    if words and shutil.which(words[0]) is None:
        yield config_error("run.on_event", f"{words[0]!r} is no command here: give the path of an executable file")


def mixture_problems(config: Config) -> Iterator[ConfigError]:
    """Check weights and ends of the stages."""
    data, training = config.data, config.training
    steps = training.steps
    for index, (stage, span) in enumerate(zip(data.stage, spans_of(data, training), strict=False)):
        key, until, before = span.key, span.until, span.before.steps
        is_last = index == len(data.stage) - 1
        if stage.weights and len(stage.weights) != len(data.sources):
            yield config_error(
                f"{key}.weights", f"has {len(stage.weights)} numbers: give one for each of {len(data.sources)} sources"
            )
        elif stage.weights and not any(stage.weights):
            yield config_error(f"{key}.weights", "is 0 for every source: one must be over 0")
        if is_last and until == 0:
            continue
        name, at = "until", f"= {until} is"
        if stage.until_tokens:
            name, at = "until_tokens", f"= {stage.until_tokens} tokens are read by step {until}, which is"
        if stage.until and stage.until_tokens:
            yield config_error(f"{key}.until", "and until_tokens both end the stage: remove one of them")
        elif until <= before and not (stage.until and _may_be_past(config, index)):
            yield config_error(f"{key}.{name}", f"{at} not after step {before}, where the stage begins")
        elif is_last and until < steps:
            yield config_error(
                f"{key}.{name}", f"{at} before the last step, {steps}: set it to 0, or training.steps, or add a stage"
            )


def _may_be_past(config: Config, index: int) -> bool:
    """Return whether a resumed run may be past a stage that ends at a step: past tokens were those of earlier sizes."""
    if config.checkpoint.resume == "none" or not any(stage.until_tokens for stage in config.data.stage[:index]):
        return False
    folder = config.run.folder
    return config.checkpoint.remote != "" or (folder != "" and any(Path(folder, "checkpoints").glob("step-*")))


def stage_size_problems(config: Config, world_size: int | None, known: list[ConfigError]) -> Iterator[ConfigError]:
    """Yield problems of stages with another batch size or length. known: without regard to stages."""
    for span, settings in zip(spans_of(config.data, config.training), config.data.stage, strict=True):
        for problem in problems_of_one_size(of_span(config, span), world_size):
            if problem not in known:
                by_batch = problem.path[-1] == "global_batch_size" or not settings.sequence_length
                name = "global_batch_size" if by_batch and settings.global_batch_size else "sequence_length"
                other = "" if name == problem.path[-1] else f"{problem.key}: "
                yield config_error(f"{span.key}.{name}", f"{other}{problem.message}")
    parallel, views = config.parallel, [of_kind.model for of_kind in config.of_kinds.values()]
    (base, _), *others = config.data.lengths(config.training.sequence_length).items()
    for length, key in others:
        if parallel.expert_dispatch == "optimistic":
            yield config_error(key, 'needs parallel.expert_dispatch = "exact": "optimistic" has buffers of one size')
        is_cut = [(view.window_within(base) < base, view.window_within(length) < length) for view in views]
        if parallel.cp > 1 and parallel.cp_method == "ring" and any(before != now for before, now in is_cut):
            yield config_error(
                key,
                f"of sequences of {base} and {length} tokens only one kind is longer than model.window, and a ring "
                'shares these in another way: use parallel.cp_method = "ulysses"',
            )
