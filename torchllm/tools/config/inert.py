"""Find keys that have no effect in a run.

A key has no effect when its value is not the default and a key that it needs is not set. This is an error if it
contradicts a choice in the same file (momentum with AdamW). If it only depends on the layout (virtual stages without a
pipeline), one line is printed and the run goes on, so that one file serves a sweep over layouts.

Not in the tables are `evaluate.sequences`, `evaluate.tasks`, [generate], [finetune] and the other keys of [export],
which evaluate.py, generate.py, finetune.py and export.py read from the same file; `data.cache`, which also holds what
parallel.layout = "tune" measured; the weight of a single source, which is all of the mixture; and `run.lower_ranks`,
which a resolved file keeps although it has no degree of -1 left.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from torchllm.config.schema import IN_PLACE_KINDS, RAW_KINDS, Config, Source

C = TypeVar("C", bound=Config)


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


def _has_own_head(config: Config) -> bool:
    return not config.model.tied_embeddings


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
OWN_HEAD = "model.tied_embeddings = false"
ROTARY = 'rotary positions, which model.family = "llama" has'
SCALED = "model.rope_scaling_factor over 1"
LLAMA3 = f'{SCALED} and model.rope_scaling = "llama3"'
YARN = f'{SCALED} and model.rope_scaling = "yarn"'
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
    Condition("evaluate.ema", lambda config: config.optimizer.ema_decay > 0, "optimizer.ema_decay over 0"),
    Condition("optimizer.head_rate", _has_own_head, OWN_HEAD),
    Condition("optimizer.head_decay", _has_own_head, OWN_HEAD),
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
    "path": ("text", "jsonl", "parquet", "hub", "tokens", *IN_PLACE_KINDS),
    "text_key": ("jsonl", "parquet", "hub", "mds"),
    "messages_key": ("jsonl", "hub"),
    "delimiter": ("text",),
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
)
"""keys that need a layout or a source that this run does not have: a printed line"""


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
