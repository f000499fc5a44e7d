"""Every layout of a tiny model that the library accepts, and how one of them is compared with one process.

Two groups of settings: those of LAYOUT are all combined with each other, which is `lattice()`; of OPTIONS every layout
that is drawn (`torchllm/tools/proof/sample.py`) gets some. The tests compare those of lattice_sample.json.

    python -m tests.lattice FILE.toml                         # a layout that failed, from the TOML of its message
    python -m tests.lattice draw --count=50 --seed=1          # others, in float32 and in bfloat16
    python -m tests.lattice draw --count=50 --resumed         # pairs: saved in one layout, resumed in another
    python -m tests.lattice draw --count=all-meshes --report=FILE          # every mesh x schedule x cp method x sp
    python -m tests.lattice draw --count=all-expert-meshes --report=FILE   # x ep, of a mixture of experts
    python -m tests.lattice sample                            # writes lattice_sample.json anew, for another setting
"""

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests import workers
from tests.parity import STEPS, check_bfloat16, check_config, check_resumed, tiny
from torchllm import config as c
from torchllm.config import FAMILIES, Config, Kinds
from torchllm.config.write import dump_toml
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.config.toml_files import read_files
from torchllm.tools.proof import sample
from torchllm.tools.proof.layouts import (
    AXES,
    MICRO_BATCH,
    OPTIONS_OF_EXPERTS,
    PARALLEL,
    RECOMPUTE,
    LayoutSpace,
    Settings,
    degrees,
    describe_layout,
    ranks_of,
)
from torchllm.tools.proof.layouts import OPTIONS as LAYOUT_OPTIONS

Layout = Settings
MOST_RANKS = 8
SAMPLE = Path(__file__).with_name("lattice_sample.json")
MESH = (*AXES, "parallel.schedule", "parallel.cp_method", "parallel.sequence_parallel", "parallel.ep")
"""what `every_mesh` combines in full"""
FIRST = 16
"""layouts of the sample that have every setting"""
OF_LAYOUTS = ("parallel.", "recompute.", "training.micro_batch_size", "training.loss_chunk")
"""keys in which the layouts of one run may differ"""
ALL_MESHES, ALL_EXPERT_MESHES = "all-meshes", "all-expert-meshes"

MOMENTUM = "optimizer.momentum"
"""None: AdamW"""
ROPE_SCALING = "model.rope_scaling"
"""None: no scaling, else the factor is 4"""
EXPERTS = "model.experts"
"""a name of `MIXTURES`"""
MIXTURES: dict[str | None, Settings] = {
    None: {},
    "Mixtral": {"model.experts": 8, "model.top_k": 2},
    "Qwen3-MoE": {
        "model.experts": 8,
        "model.top_k": 3,
        "model.expert_ffn": 48,
        "model.balance_loss": "global",
        "model.balance_weight": 0.3,
    },
    "OLMoE": {
        "model.experts": 6,
        "model.top_k": 3,
        "model.expert_ffn": 48,
        "model.router_dtype": "compute",
        "model.router_renormalize": False,
        "model.router_z_loss": 0.1,
    },
    "GLM-4.5": {
        "model.experts": 6,
        "model.top_k": 2,
        "model.shared_experts": 2,
        "model.dense_layers": 1,
        "model.router_score": "sigmoid",
        "model.router_scale": 2.5,
        "model.rotary_fraction": 0.5,
        "model.router_bias": True,
        "model.router_bias_rate": 0.03,
        "model.balance_loss": "sequence",
        "model.balance_weight": 0.3,
    },
    "Qwen3-MoE, ep 2": {
        "model.experts": 8,
        "model.top_k": 2,
        "model.balance_loss": "global",
        "model.balance_weight": 0.3,
        "parallel.ep": 2,
    },
    "DeepSeek-V3": {
        "model.experts": 8,
        "model.top_k": 3,
        "model.expert_ffn": 48,
        "model.shared_experts": 1,
        "model.router_score": "sigmoid",
        "model.router_bias": True,
        "model.router_bias_rate": 0.03,
        "model.router_groups": 4,
        "model.router_top_groups": 2,
    },
    "gpt-oss": {
        "model.experts": 8,
        "model.top_k": 2,
        "model.expert_ffn": 48,
        "model.expert_biases": True,
        "model.activation": "clamped_silu",
    },
    "Gemma 4": {
        "model.experts": 8,
        "model.top_k": 3,
        "model.expert_ffn": 48,
        "model.dense_beside": True,
        "model.norm_position": "both",
        "model.qk_norm": "head",
        "model.balance_loss": "sequence",
        "model.balance_weight": 0.3,
    },
    "GLM-4.5, ep 4": {
        "model.experts": 8,
        "model.top_k": 3,
        "model.expert_ffn": 48,
        "model.shared_experts": 1,
        "model.dense_layers": 1,
        "model.router_score": "sigmoid",
        "model.router_bias": True,
        "model.router_bias_rate": 0.03,
        "model.balance_loss": "sequence",
        "model.balance_weight": 0.3,
        "parallel.ep": 4,
    },
}
"""settings of a mixture of experts, by the model that is built so, and the ranks that share them; None: none.
Penalties are heavy, to be seen"""
PARTS = "model.softmax_scale"
"""a name of `MODEL_PARTS`"""
MODEL_PARTS: dict[str | None, Settings] = {
    None: {},
    "Gemma 3": {
        "model.norm_offset": True,
        "model.activation": "gelu_tanh",
        "model.softmax_scale": 0.5,
        "model.embedding_multiplier": 8.0,
        "model.logit_softcap": 1.5,
    },
    "Granite": {
        "model.softmax_scale": 0.2,
        "model.embedding_multiplier": 12.0,
        "model.residual_multiplier": 0.4,
        "model.logit_divisor": 2.0,
    },
    "Qwen3-Next": {"model.attention_gate": "element", "model.norm_offset": True},
    "gates of heads": {"model.attention_gate": "head"},
    "gpt-oss": {"model.sinks": True, "model.o_bias": True},
    "Gemma 4": {"model.v_norm": True, "model.softmax_scale": 1.0, "model.activation": "gelu_tanh"},
    "nanochat": {"model.family": "nanochat", "model.qk_norm": "head", "model.logit_softcap": 1.5},
}
"""settings of parts that no layout depends on, by the model that has them; None: none"""
MIXER = "model.mixer"
"""a name of `MIXERS`"""
LATENT: Settings = {
    "model.mixer": "latent_attention",
    "model.latent_kv_width": 24,
    "model.nope_head_dim": 8,
    "model.rope_head_dim": 4,
    "model.v_head_dim": 6,
    "model.rope_interleaved": True,
    "model.latent_norm_epsilon": 1e-4,
}
MIXERS: dict[str | None, Settings] = {
    None: {},
    "DeepSeek-V3": {**LATENT, "model.latent_q_width": 20, "model.softmax_scale": 0.4},
    "Moonlight": LATENT,
    "OLMo Hybrid": {
        "model.mixer": "gated_delta",
        "model.delta_key_heads": 4,
        "model.delta_value_heads": 8,
        "model.delta_key_dim": 6,
        "model.delta_value_dim": 10,
        "model.delta_conv": 3,
        "model.delta_norm_epsilon": 1e-4,
        "model.delta_negative": True,
    },
}
"""settings of a mixer, by the model that is built so; None: attention"""
OF_ATTENTION = ("kv_heads", "head_dim", "qkv_bias", "norm_position", "qk_norm", "window", "pattern", "lora.rank")
UNREAD = dict.fromkeys(MIXERS, OF_ATTENTION) | {None: (), "OLMo Hybrid": (*OF_ATTENTION, "attention", "rope_scaling")}
"""keys of [model], and others, that a mixer does not have, or not here"""
KINDS = "model.pattern"
"""None: all blocks are as [model] says, else they are of the kinds of `kinds_of`"""
HYBRID = "linear linear shared full"
ROPE_SCALINGS: dict[str | None, Settings] = {
    None: {},
    "linear": {},
    "llama3": {
        "model.rope_original_length": 16,
        "model.rope_low_frequency_factor": 0.5,
        "model.rope_high_frequency_factor": 3.0,
    },
    "yarn": {
        "model.rope_original_length": 16,
        "model.rope_beta_fast": 8.0,
        "model.rope_beta_slow": 0.5,
        "model.rope_truncate": False,
        "model.rope_attention_factor": 1.2,
        "model.rope_query_scale": 0.4,
    },
}
"""further settings of a scaling of rotary frequencies"""

LAYOUT: dict[str, tuple[Any, ...]] = {
    **degrees(MOST_RANKS),
    **PARALLEL,
    **RECOMPUTE,
    "model.family": ("llama", "gpt"),  # nanochat: `MODEL_PARTS`
    "model.tied_embeddings": (False, True),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    **LAYOUT_OPTIONS,
    MIXER: tuple(MIXERS),
    "model.kv_heads": (8, 4, 2),
    "model.head_dim": (0, 12),
    "model.attention": ("sdpa", "eager"),
    "model.qkv_bias": (False, True),
    "model.norm_position": ("before", "after", "both"),
    PARTS: tuple(MODEL_PARTS),
    "model.qk_norm": ("none", "head", "width"),
    "model.window": (0, 13),  # 13: of sequences of 48 tokens, of 35 and of 56, and a part of what a cp rank has
    ROPE_SCALING: (None, "llama3", "linear", "yarn"),
    "model.vocab": (96, 97),  # 97: shards of unequal size
    "model.vocab_padding": (0, 7),
    KINDS: (None, "local local mid full", HYBRID),  # a stage has other kinds by its own indices
    EXPERTS: tuple(MIXTURES),
    "data.document_mask": (False, True),
    "lora.rank": (0, 3),
    "model.frozen": ("", r"embed_tokens.*|layers\.[02]\..*"),
    "model.mtp_depth": (0, 2),
    "training.z_loss": (0.0, 0.02),
    MOMENTUM: (None, 0.0, 0.9),
}
COMPILE: dict[str, tuple[Any, ...]] = {"compile.block": (False, True), "compile.loss": (False, True)}
"""options that take seconds per graph: in the layouts that a command draws, not in the sample of every run"""
SIZES: Settings = {
    "training.global_batch_size": 24,
    "training.sequence_length": 48,
    "model.kv_heads": 8,
    "evaluate.interval": STEPS,
}
"""what 1, 2, 3, 4, 6 and 8 ranks can share; with one sequence per micro batch a layout is valid if it ever is"""


@dataclass(frozen=True)
class TinySpace(LayoutSpace):
    """Layouts of the tiny model, with multiples of 5 and 7 where these are degrees."""

    def sized(self, layout: Layout) -> Config:
        """Return the base with as many blocks as the layout has stages, and sizes that its degrees divide.

        On up to 8 ranks an axis of 5 or 7 is the only one.
        """
        config = super().sized(layout)
        ranks = ranks_of(layout)
        if ranks not in (5, 7):
            return config
        model = replace(config.model, heads=8 * ranks, head_dim=8, ffn=16 * ranks)
        training = replace(config.training, global_batch_size=6 * ranks, sequence_length=8 * ranks)
        return replace(config, model=model, training=training)

    def choices(self, key: str, layout: Layout) -> tuple[Any, ...]:
        """Return the values of a setting that have an effect: experts and GPT-2's matrices have no low-rank updates."""
        if not key.startswith(("model.", "lora.")) or key == "model.family":
            return super().choices(key, layout)
        values, features = self.settings[key], FAMILIES[layout["model.family"]]
        matters = key.removeprefix("model.") not in UNREAD.get(layout.get(MIXER), ())
        is_llama = layout["model.family"] == "llama"
        match key:
            case _ if not matters:
                return ()
            case "lora.rank":
                matters = layout.get(EXPERTS) is None and is_llama and layout.get(KINDS) != HYBRID
                matters = matters and layout.get(PARTS) != "nanochat"  # whose layers lack one of the targets
            case "model.mtp_depth" | "model.frozen":
                matters = not layout.get("lora.rank")
            case "model.pattern" if not is_llama:
                values = tuple(name for name in values if name != HYBRID)
            case "model.mixer":
                matters = not features.learned_positions
            case "model.experts":  # experts are SwiGLU layers
                matters = features.gated_ffn and not features.biases and layout.get(PARTS) != "nanochat"
                # With a norm after attention, what a fresh model's routers get is so small that the scores of several
                # experts are one number in float32: which are chosen is rounding, unless they go by their logits.
                if layout.get("model.norm_position") == "after":
                    values = tuple(name for name in values if "model.router_bias" not in MIXTURES[name])
                if layout.get(MIXER) is not None:
                    values = tuple(name for name in values if "model.qk_norm" not in MIXTURES[name])
            case "model.softmax_scale" if not is_llama:
                values = tuple(name for name in values if not needs_llama(MODEL_PARTS[name]))
            case "model.softmax_scale" if layout.get(MIXER) is not None:
                values = (None, "Gemma 3", "Granite")
            case "model.rope_scaling":
                matters = not features.learned_positions
            case "model.qkv_bias":
                matters = not features.biases
            # Without any norm before them, queries and keys of a fresh model are so small that the gradients of their
            # matrices are rounding: what is learned goes through the values.
            case "model.norm_position" if layout.get("model.qk_norm") == "none":
                return ("before",)
            case "model.norm_position" if "model.router_bias" in MIXTURES[layout.get(EXPERTS)]:  # as above
                return ("before",)
            case "model.norm_position":  # no model has LayerNorm after attention
                matters = features.norm == "rms"
            case "model.qk_norm" if layout.get("model.norm_position") == "after":
                return tuple(value for value in values if value != "none")
        return values if matters else ()

    def keys_of(self, layout: Layout) -> Settings:
        """Return the keys of the config that a layout sets, and their values."""
        keys = super().keys_of(layout)
        keys.pop(EXPERTS, None)
        keys |= MIXTURES[layout.get(EXPERTS)]
        keys.pop(PARTS, None)
        keys |= MODEL_PARTS[layout.get(PARTS)]
        if layout.get(PARTS) == "Gemma 3" and layout.get("model.attention") == "eager":
            keys["model.score_softcap"] = 0.3
        if layout.get(PARTS) == "Qwen3-Next" and keys.get("model.shared_experts"):
            keys["model.shared_gate"] = True
        if layout.get(PARTS) == "Gemma 4" and layout.get("model.norm_position") == "both":
            keys["model.block_scale"] = True
        if keys.get("model.mtp_depth"):
            keys["model.mtp_weight"] = 0.7
        keys.pop(MIXER, None)
        keys |= MIXERS[layout.get(MIXER)]
        if (pattern := keys.pop(KINDS, None)) is not None:
            keys |= {KINDS: tuple(pattern.split()), "model.kinds": kinds_of(layout)}
        if keys.pop(ROPE_SCALING, None) is not None:
            scaling = layout[ROPE_SCALING]
            keys |= {ROPE_SCALING: scaling, "model.rope_scaling_factor": 4.0, **ROPE_SCALINGS[scaling]}
            if layout.get(MIXER) is not None:
                keys.pop("model.rope_query_scale", None)
        if keys.get("model.norm_position") in ("after", "both"):
            # A fresh model's attention and feed-forward layer return numbers so small that norms after them would
            # multiply rounding by hundreds: this is more than their variance.
            keys["model.norm_epsilon"] = 1e-2
        if keys.pop(MOMENTUM, None) is not None:
            keys |= {"optimizer.name": "sgd", MOMENTUM: layout[MOMENTUM]}
            adamw = c.Optimizer()
            keys |= {f"optimizer.{key}": getattr(adamw, key) for key in ("beta1", "beta2", "epsilon")}
        return keys

    def config(self, layout: Layout) -> Config:
        """Return the config of a layout: the share of key-value heads is the same with more heads."""
        config = super().config(layout)
        model = config.model
        if layout.get(MIXER) is not None:
            return replace(config, model=replace(model, kv_heads=0, head_dim=0))
        if ranks_of(layout) not in (5, 7):
            return config
        kv_heads = layout.get("model.kv_heads", 8) * model.heads // 8
        return replace(config, model=replace(model, kv_heads=kv_heads, head_dim=model.head_dim or 8))


def needs_llama(settings: Settings) -> bool:
    """Return whether only a model of Llama's family has some settings."""
    return not settings.keys().isdisjoint({"model.family", "model.norm_offset", "model.activation", "model.o_bias"})


def kinds_of(layout: Layout) -> Kinds:
    """Return three kinds of blocks: two with windows, of which one has other rotary positions and one has none; or, of
    a hybrid, two with attention, of which one has keys as values and other heads.

    Without rotary positions a bias of keys adds one number to all scores of a query, so that its gradient would be
    rounding: some features have them then.
    """
    if layout[KINDS] == HYBRID:
        shared: Settings = {"keys_as_values": True, "head_dim": 12, "rotary_fraction": 0.5, "rope_proportional": True}
        return Kinds(linear={"mixer": "gated_delta"}, shared=shared, full={})
    local: Settings = {"window": 7}
    mid: Settings = {"window": 12}
    if not FAMILIES[layout["model.family"]].learned_positions:
        local["rotary_fraction"] = 0.5 if layout.get("model.qkv_bias") else 0.0
        mid["rope_theta"] = 500.0
    return Kinds(local=local, mid=mid, full={})


SPACE = TinySpace(tiny(SIZES), LAYOUT, OPTIONS, MOST_RANKS)
COMPILED_SPACE = replace(SPACE, options={**OPTIONS, **COMPILE})
MIXTURE: Settings = {
    "model.experts": 8,
    "model.top_k": 2,
    "model.shared_experts": 1,
    "model.balance_loss": "global",
    "model.balance_weight": 0.3,
}
NO_OPTIONS_OF_EXPERTS = (EXPERTS, "lora.rank")
EXPERT_SPACE = TinySpace(
    tiny({**SIZES, **MIXTURE}),
    {**LAYOUT, "model.family": ("llama",)},
    {key: values for key, values in {**OPTIONS, **OPTIONS_OF_EXPERTS}.items() if key not in NO_OPTIONS_OF_EXPERTS},
    MOST_RANKS,
)
"""the same of one mixture of experts, in which parallel.ep is combined with all other settings of [parallel]"""


@functools.cache
def lattice() -> list[Layout]:
    return SPACE.valid_layouts()


class Sample(NamedTuple):
    """Layouts that have every possible pair of settings among them."""

    first: list[Layout]
    """few that have every setting; the default tier of the tests trains them"""
    rest: list[Layout]


def read_sample() -> Sample:
    return Sample(**json.loads(SAMPLE.read_text()))


def settings_of(layout: Layout) -> frozenset[Any]:
    """Return the settings that the sample counts: degrees over 2 are one, and so are several micro batches."""
    batch = SPACE.sized(layout).training.global_batch_size
    of_rank = batch // (layout["parallel.dp_replicate"] * layout["parallel.dp_shard"])
    is_single = layout.get(MICRO_BATCH, 1) == of_rank
    return frozenset({**layout, **{axis: min(layout[axis], 3) for axis in AXES}, MICRO_BATCH: is_single}.items())


def pairs_of(layout: Layout) -> set[frozenset[Any]]:
    return {frozenset(pair) for pair in itertools.combinations(settings_of(layout), 2)}


def worth(layout: Layout, settings: set[Any], pairs: set[frozenset[Any]]) -> float:
    """Return what a layout brings per second beside these: first of all settings, then pairs of them."""
    new = 1000 * len(settings_of(layout) - settings) + len(pairs_of(layout) - pairs)
    return new / (sample.training_seconds(SPACE, layout) + layout["parallel.tp"])  # many tp ranks take longer than that


def draw_sample() -> Sample:
    """Draw layouts with every pair of settings; the first ones are worth most."""
    rest = sample.covering(SPACE, lattice(), seed=0)
    first: list[Layout] = []
    settings: set[Any] = set()
    pairs: set[frozenset[Any]] = set()
    while len(first) < FIRST:
        best = max(rest, key=functools.partial(worth, settings=settings, pairs=pairs))
        rest.remove(best)
        first.append(best)
        settings |= settings_of(best)
        pairs |= pairs_of(best)
    return Sample(first, rest)


def draw_every_mesh(
    space: LayoutSpace, layouts: Sequence[Layout], seed: int, done: Sequence[Layout] = ()
) -> list[Layout]:
    """Draw every mesh x schedule x cp method x sequence parallelism x ep, then every pair of settings still missing.

    done: layouts that need not be drawn.
    """
    sampler = sample.LayoutSampler(space, layouts, seed, exact=True)
    groups: dict[Any, list[int]] = {}
    for index, layout in enumerate(sampler.layouts):
        groups.setdefault(tuple(map(layout.get, MESH)), []).append(index)
    for layout in done:
        sampler.count(layout)
        groups.pop(tuple(map(layout.get, MESH)), None)
    drawn = []
    for indices in groups.values():
        drawn.append(sampler.best(sampler.promising(np.array(indices))))
    return [*drawn, *sampler.cover()]


def draw_at_random(space: LayoutSpace, layouts: Sequence[Layout], count: int, seed: int) -> list[Layout]:
    """Draw `count` of all layouts, each as likely, with options that have been drawn least often."""
    sampler = sample.LayoutSampler(space, layouts, seed, exact=True)
    indices = sampler.random.choice(len(sampler.layouts), count, replace=False)
    return [sampler.best([sampler.layouts[index]]) for index in indices]


def every_mesh(seed: int, done: Sequence[Layout] = ()) -> list[Layout]:
    """Return layouts with every mesh and every pair of settings, compiled ones among them."""
    return draw_every_mesh(COMPILED_SPACE, lattice(), seed, done)


@functools.cache
def expert_lattice() -> list[Layout]:
    """Return every combination of the settings of `EXPERT_SPACE` on up to 8 ranks."""
    return EXPERT_SPACE.valid_layouts()


def every_expert_mesh(seed: int, done: Sequence[Layout] = ()) -> list[Layout]:
    """Return layouts of a mixture of experts with every mesh and every degree of expert parallelism."""
    return draw_every_mesh(EXPERT_SPACE, expert_lattice(), seed, done)


def at_random(count: int, seed: int, space: LayoutSpace = COMPILED_SPACE) -> list[Layout]:
    return draw_at_random(space, lattice(), count, seed)


def experts_at_random(count: int, seed: int) -> list[Layout]:
    return draw_at_random(EXPERT_SPACE, expert_lattice(), count, seed)


def resumed_at_random(count: int, seed: int) -> list[tuple[Layout, Layout]]:
    """Return pairs of layouts of one model: of a run that is saved, and of one that goes on with its checkpoint."""
    layouts = lattice()
    random = np.random.default_rng(seed)
    pairs: list[tuple[Layout, Layout]] = []
    for resumed in draw_at_random(SPACE, layouts, count, seed):
        options = {key: value for key, value in resumed.items() if not key.startswith(OF_LAYOUTS)}
        while True:
            of_layout = layouts[random.integers(len(layouts))]
            saved = of_layout | options | {MICRO_BATCH: 1}
            if SPACE.is_valid(saved) and SPACE.config(saved).model == SPACE.config(resumed).model:
                pairs.append((saved, resumed))
                break
    return pairs


class Failed(AssertionError):
    """A layout trains another model, or fails. The text has the reason, and the TOML and command to reproduce it."""


def compare(layout: Layout, space: LayoutSpace = SPACE) -> float:
    """Train a layout and one process, with very unequal numbers of targets; returns the worst gradient error."""
    try:
        return check_config(space.config(layout), ragged=True)
    except Exception as error:
        raise Failed(describe_failure(layout, error, space)) from error


def compare_bfloat16(layout: Layout, space: LayoutSpace = SPACE) -> float:
    """Train a layout in bfloat16 and compare with one process's own error; returns the worst gradient error."""
    try:
        return check_bfloat16(space.config(layout), ragged=True)
    except Exception as error:
        raise Failed(describe_failure(layout, error, space)) from error


def compare_resumed(saved: Layout, resumed: Layout) -> float:
    """Take a step in one layout and the others in another one, and compare these with one process."""
    try:
        return check_resumed(SPACE.config(saved), SPACE.config(resumed), ragged=True)
    except Exception as error:
        raise Failed(f"saved in {describe_layout(saved)}, then\n{describe_failure(resumed, error, SPACE)}") from error


def describe_failure(layout: Layout, error: Exception, space: LayoutSpace = SPACE) -> str:
    """Return the layout, what is wrong with it, and how to see it again."""
    command = "to reproduce it: python -m tests.lattice FILE.toml, with this file:"
    return f"{describe_layout(layout)}\n{error}\n{command}\n\n{dump_toml(space.config(layout))}"


def read_config(file: str) -> Config:
    """Return the config of a TOML file. ValueError if the file is invalid."""
    errors: list[str] = []
    faults: list[ConfigError] = []
    config: Config = read_table(Config, read_files(file, errors).table, faults)
    if errors or faults:
        raise ValueError(f"{file}: {errors} {faults}")
    return config


# -- the commands


def drawn(count: str, seed: int, done: Sequence[Layout]) -> tuple[list[Layout], LayoutSpace]:
    """Return layouts and the space that they are of. done: those that need not be drawn again."""
    if count == ALL_MESHES:
        return every_mesh(seed, done), SPACE
    if count == ALL_EXPERT_MESHES:
        return every_expert_mesh(seed, done), EXPERT_SPACE
    return at_random(int(count), seed), SPACE


def record_of(layout: Layout, space: LayoutSpace) -> dict[str, Any]:
    """Compare a layout in float32 and in bfloat16; return what a report says of it."""
    started = time.monotonic()
    record: dict[str, Any] = {"layout": layout, "torch": torch.__version__}
    try:
        record["error"] = compare(layout, space)
        compare_bfloat16(layout, space)
    except Failed as failure:
        record.pop("error", None)
        record["failed"] = str(failure)
    return {**record, "seconds": time.monotonic() - started}


def draw_resumed(count: int, seed: int) -> int:
    failed = 0
    for saved, resumed in resumed_at_random(count, seed):
        try:
            print(f"{compare_resumed(saved, resumed)} {describe_layout(saved)}; {describe_layout(resumed)}", flush=True)
        except Failed as failure:
            failed += 1
            print(failure, flush=True)
    print(f"{count} pairs of layouts, {failed} failed")
    return failed


def draw(arguments: argparse.Namespace) -> int:
    if arguments.resumed:
        return draw_resumed(int(arguments.count), arguments.seed)
    from tests.lattice_report import read

    done = [record["layout"] for record in read(arguments.report) if "error" in record]
    layouts, space = drawn(arguments.count, arguments.seed, done)
    failed = 0
    for number, layout in enumerate(layouts, start=1):
        record = record_of(layout, space)
        failed += "failed" in record
        print(f"{number} of {len(layouts)}: {record.get('error', 'failed')} {describe_layout(layout)}", flush=True)
        if "failed" in record:
            print(record["failed"], flush=True)
        if arguments.report:
            with open(arguments.report, "a") as report:
                report.write(json.dumps(record) + "\n")
    print(f"{len(layouts)} layouts, {failed} failed")
    return failed


def write_sample() -> None:
    parts = []
    for name, layouts in draw_sample()._asdict().items():
        lines = ",\n  ".join(json.dumps(layout) for layout in layouts)
        parts.append(f' "{name}": [\n  {lines}\n ]')
    SAMPLE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main(words: list[str]) -> int:
    if words == ["sample"]:
        write_sample()
        return 0
    if words[:1] != ["draw"]:
        print(f"worst relative gradient error {check_config(read_config(words[0]), ragged=True):.1e}")
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.lattice draw")
    parser.add_argument("--count", default="20", help=f"a number, {ALL_MESHES} or {ALL_EXPERT_MESHES}")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other layouts")
    parser.add_argument("--resumed", action="store_true", help="runs that are saved in another layout")
    parser.add_argument("--report", default="", help="file that gets a line of JSON per layout; goes on with it")
    return 1 if draw(parser.parse_args(words[1:])) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        workers.POOL.close()
