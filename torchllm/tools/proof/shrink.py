"""Make a config small: narrow and few layers, a small vocabulary, short sequences, a few steps; all features kept.

The features of the model and the training stay: family, shares of key-value heads, norms of queries and keys, tied
embeddings, experts, kinds of blocks, windows, document masks, optimizer, schedule, compilation, and every section of a
fork.
"""

import json
import random
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torchllm.config import Config, Kinds, Model, Source
from torchllm.facts.parts.registry import mixer
from torchllm.tools.config.float8_sizes import FLOAT8_MULTIPLE
from torchllm.tools.config.idle import contradictions
from torchllm.tools.proof.layouts import Settings, with_settings

C = TypeVar("C", bound=Config)

BATCH, LENGTH = 12, 48
"""sequences per step and tokens per sequence: what 1, 2, 3 and 4 ranks can share"""
LAYERS, HEAD_WIDTH, FFN_MULTIPLE = 4, 8, 24
EXPERTS, TOP_K = 12, 4
"""most experts of a block, which 1, 2, 3, 4 and 6 ranks can share, and most of a token"""
GROUPS, TOP_GROUPS = 3, 2
"""groups of these experts, and those that a token chooses within"""
BYTES = 264
"""vocabulary of the byte tokenizer, rounded up to a multiple of 8 and 3"""
LEARNING_RATE = 2e-3


def shrink(config: C, ranks: int, steps: int, folder: Path, kept: Collection[str] = ()) -> C:
    """Return a small config with the features of `config`, for layouts of up to `ranks` ranks.

    folder: for the run and its data, which `write_documents` has written. kept: dotted keys that stay as they are.
    """
    model = config.model
    if "model.pattern" not in kept:
        model = replace(model, pattern=short_pattern(model))
    sizes = small_model(model, ranks, config.float8.is_on)
    settings: Settings = {
        **sizes,
        **small_kinds(model, sizes, ranks, config.float8.is_on),
        **small_positions(config.model, config.training.sequence_length),
        **small_training(steps),
        **documents_as_data(config, folder),
        "model.from_hf": "",
        "model.upcycle": False,
        "model.upcycle_noise": 0.0,
        "run.folder": str(folder / "run"),
        "run.device": "cpu",
        "run.deterministic": False,
        "run.dry_run": False,
        "run.json": False,
        "run.on_event": "",
        "compile.graphs": False,
        "recompute.offload": False,
        "checkpoint.interval": 0,
        "checkpoint.resume": "none",
        "checkpoint.initial": "",
        "checkpoint.keep_every": 0,
        "checkpoint.remote": "",
        "checkpoint.asynchronous": False,
        "evaluate.tasks_interval": 0,
        "metrics.profile_steps": "",
    }
    changed = {key: value for key, value in settings.items() if key not in kept}
    return without_contradictions(with_settings(config, changed))


def small_model(model: Model, ranks: int, float8: bool = False) -> Settings:
    """Return sizes of a small model; it keeps the ratio of heads to key-value heads and the vocabulary's remainder.

    float8: a rank's widths must be multiples that float8 products need.
    """
    head_width, ffn_multiple = HEAD_WIDTH, FFN_MULTIPLE
    if float8:
        head_width, ffn_multiple = FLOAT8_MULTIPLE, 12 * FLOAT8_MULTIPLE
    kv_heads = min(model.kv, ranks)
    heads = kv_heads * min(model.heads // model.kv, 4)
    hidden = heads * head_width
    has_head_width = model.head_width * model.heads != model.hidden
    ffn = max(2, round(hidden * model.ffn / model.hidden / ffn_multiple)) * ffn_multiple
    # model.frozen may name blocks by their numbers.
    layers = model.layers if model.frozen else min(model.layers, max(LAYERS, len(model.pattern)))
    vocab = BYTES + model.vocab % 8
    settings: Settings = {
        "model.layers": layers,
        "model.pattern": model.pattern,
        "model.hidden": hidden,
        "model.heads": heads,
        "model.kv_heads": kv_heads if model.kv_heads else 0,
        "model.head_dim": (2 * head_width if float8 else head_width + 4) if has_head_width else 0,
        "model.ffn": ffn,
        "model.vocab": vocab,
        "model.vocab_padding": -vocab % 8 if model.vocab_padding else 0,
        "model.max_sequence_length": 2 * LENGTH,
    }
    for view in [model, *map(model.of_kind, dict.fromkeys(model.pattern))]:
        settings |= {f"model.{key}": value for key, value in mixer(view).small_sizes(view).items()}
    if model.base_width:
        base_width = max(1, round(hidden / model.width_ratio))
        divisor = hidden / base_width if model.tied_embeddings else model.logit_divisor
        settings |= {"model.base_width": base_width, "model.logit_divisor": divisor}
    if model.experts:
        settings |= small_experts(model, layers)
    # Of those that a CPU has, with a backward, eager alone has soft caps.
    settings["model.attention"] = "eager" if model.attention == "eager" or model.score_softcap else "sdpa"
    return settings


def small_kinds(model: Model, sizes: Settings, ranks: int, float8: bool) -> Settings:
    """Return the sizes of the kinds of blocks that have such keys. sizes: `small_model` of the model.

    Where a kind differs from [model] in the width of a head or of the feed-forward layer, it still does.
    """
    hidden = sizes["model.hidden"]
    head_width = sizes["model.head_dim"] or hidden // sizes["model.heads"]
    other_width, ffn_multiple = (2 * head_width, 12 * FLOAT8_MULTIPLE) if float8 else (head_width + 4, FFN_MULTIPLE)
    settings: Settings = {}
    for kind, keys in model.kinds.items():
        view = model.of_kind(kind)
        alone = small_model(view, ranks, float8)
        small: dict[str, Any] = {
            name: alone[f"model.{name}"] for name in ("heads", "kv_heads", "attention", "ffn") if name in keys
        }
        if not {"heads", "head_dim"}.isdisjoint(keys):
            small["head_dim"] = head_width if view.head_width == model.head_width else other_width
        if view.ffn != model.ffn and small["ffn"] == sizes["model.ffn"]:
            small["ffn"] += ffn_multiple
        if keys.get("experts"):
            small["experts"] = sizes["model.experts"]
        if keys.get("expert_ffn"):
            small["expert_ffn"] = 2 * FFN_MULTIPLE
        settings |= {f"model.kinds.{kind}.{name}": value for name, value in small.items()}
    return settings


def short_pattern(model: Model) -> tuple[str, ...]:
    """Return a pattern of few blocks: several of the first kind, then one of each other kind.

    Wherever a pipeline stage begins, its blocks are of other kinds than those from the first block on, so that a kind
    taken by the index within a stage is seen.
    """
    kinds = tuple(dict.fromkeys(model.pattern))
    return kinds[:1] * (min(model.layers, LAYERS) - len(kinds)) + kinds


def small_experts(model: Model, layers: int) -> Settings:
    """Return sizes of a few small experts in a model of `layers` blocks: a token uses some, or all if it did."""
    experts = min(model.experts, EXPERTS)
    groups, top_groups = model.router_groups, model.router_top_groups
    if experts < model.experts:
        top_groups = min(groups, GROUPS) if top_groups == groups else min(top_groups, TOP_GROUPS)
        groups = min(groups, GROUPS)
    return {
        "model.experts": experts,
        "model.top_k": experts if model.top_k == model.experts else min(model.top_k, TOP_K),
        "model.router_groups": groups,
        "model.router_top_groups": top_groups,
        "model.expert_ffn": FFN_MULTIPLE if model.expert_ffn else 0,
        "model.shared_experts": min(model.shared_experts, 2),
        "model.dense_layers": min(model.dense_layers, layers // 2),
    }


def small_positions(model: Model, length: int) -> Settings:
    """Return windows and rotary settings for a short sequence: of [model], and of each kind of blocks that has the key.

    Of a window there are several in a short sequence, if there are in one of `length` tokens; of a large one fewer. It
    reaches over no more than a piece in a ring of 4 ranks.
    """
    views = [model, *map(model.of_kind, model.kinds)]
    windows = sorted({view.window for view in views if 0 < view.window < length}, reverse=True)

    def small(view: Model) -> Settings:
        return {
            "window": max(2, LENGTH // 8 - windows.index(view.window)) if view.window in windows else 0,
            # Of a small head another share may not be pairs.
            "rotary_fraction": 0.5 if 0 < view.rotary_fraction < 1 else view.rotary_fraction,
            "rope_original_length": LENGTH // 3,
        }

    settings = {f"model.{name}": value for name, value in small(model).items()}
    for kind, keys in model.kinds.items():
        of_kind = small(model.of_kind(kind))
        settings |= {f"model.kinds.{kind}.{name}": value for name, value in of_kind.items() if name in keys}
    return settings


def small_training(steps: int) -> Settings:
    """Return the settings of a training of a few steps, one more than are looked at."""
    return {
        "training.steps": steps + 1,
        "training.micro_batch_size": 1,
        "training.global_batch_size": BATCH,
        "training.sequence_length": LENGTH,
        "training.loss_chunk": 0,
        "training.on_nonfinite": "skip",
        "optimizer.learning_rate": LEARNING_RATE,
        "schedule.warmup_steps": 0,
        "schedule.decay_steps": 0,
        "evaluate.interval": steps,
        "evaluate.sequences": 8,
    }


def documents_as_data(config: Config, folder: Path) -> Settings:
    """Return the settings of data that `write_documents` has written."""
    return {
        "data.sources": (Source(kind="jsonl", path=str(documents_file(folder))),),
        "data.validation": (),
        "data.stage": (),
        "data.tokenizer": "bytes",
        "data.validation_fraction": max(config.data.validation_fraction, 0.1),
        "data.fim_rate": 0.0,
        "data.on_bad_record": "error",
        "data.workers": 0,
        "data.cache": str(folder / "cache"),
    }


def documents_file(folder: Path) -> Path:
    """Return where the documents are."""
    return folder / "documents.jsonl"


def write_documents(folder: Path, seed: int) -> None:
    """Write documents of random letters: runs of very short ones between long ones.

    The last token of a document has no target, so sequences have very unequal numbers of them: the mean over ranks of
    their mean losses is then another number than the mean over all targets, which a proof has to notice.
    """
    generator = random.Random(seed)
    texts = []
    for _ in range(40):
        lengths = [generator.randint(100, 400)] + [1] * generator.randint(0, 60)
        for length in lengths:
            texts.append("".join(chr(generator.randint(33, 126)) for _ in range(length)))
    with documents_file(folder).open("w", encoding="utf-8") as lines:
        for text in texts:
            lines.write(json.dumps({"text": text}) + "\n")


def one_process(config: C, micro_batch_size: int = 0) -> C:
    """Return a config for one process: nothing recomputed, compiled or chunked.

    micro_batch_size: 0 for the whole batch at once.
    """
    plain = {
        "training.micro_batch_size": micro_batch_size or config.training.global_batch_size,
        "training.loss_chunk": 0,
    }
    defaults = Config()
    return replace(
        with_settings(config, plain),
        parallel=replace(defaults.parallel, dp_shard=1),
        recompute=defaults.recompute,
        compile=defaults.compile,
    )


def without_contradictions(config: C) -> C:
    """Return a config that trains the same, with the default for every key that has no effect."""
    while found := contradictions(config):
        section, *path = found[0].key.split(".")
        if section == "data" and path[0] == "sources":
            index, name = int(path[1]), path[2]
            sources = list(config.data.sources)
            sources[index] = replace(sources[index], **{name: getattr(Source, name)})
            config = replace(config, data=replace(config.data, sources=tuple(sources)))
        elif path[0] == "kinds":
            kind, name = path[1:]
            keys = {key: value for key, value in config.model.kinds[kind].items() if key != name}
            config = replace(config, model=replace(config.model, kinds=Kinds(config.model.kinds | {kind: keys})))
        else:
            table = getattr(config, section)
            changed: Any = {section: replace(table, **{path[0]: getattr(type(table), path[0])})}
            config = replace(config, **changed)
    return config
