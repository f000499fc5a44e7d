"""Find keys that do nothing in a run, so that nobody believes in an effect that they do not have.

A key does nothing when its value is not the default and what it needs is not there. That is an error where it
contradicts a choice in the same file (momentum with AdamW). It is one printed line, never an error, where it depends on
the layout (virtual stages without a pipeline), so that one file serves a sweep over layouts.

Not in the tables are `evaluate.sequences` and [generate], which evaluate.py and generate.py read from the same file;
`data.cache`, which also holds what parallel.layout = "tune" measured; the weight of a single source, which is all of
the mixture; and `run.lower_ranks`, which a resolved file keeps although it has no degree of -1 left.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from torchllm.config.schema import Config, Source

RAW_KINDS = ("stdlib", "text", "jsonl", "parquet", "hub")
"""kinds of sources that are tokenized when the run starts"""


class Inert(NamedTuple):
    """A key that does nothing, and why."""

    key: str
    message: str


class Need(NamedTuple):
    """What a key needs to have an effect."""

    key: str
    is_met: Callable[[Config], bool]
    text: str
    """it in words"""


def _has_rotary_positions(config: Config) -> bool:
    return not config.model.features.learned_positions


def _scales_rotary_positions(config: Config) -> bool:
    return _has_rotary_positions(config) and config.model.rope_scaling_factor > 1


def _has_rank_file(config: Config) -> bool:
    """Whether the tokenizer is a tiktoken rank file: neither bytes nor Hugging Face's tokenizer.json."""
    return config.data.tokenizer != "bytes" and not config.data.tokenizer.endswith(".json")


def _reads_raw_text(config: Config) -> bool:
    return any(source.kind in RAW_KINDS for source in config.data.sources)


def _may_read_bad_records(config: Config) -> bool:
    """Whether a source is the user's own text: unreadable files of the standard library are always skipped."""
    return any(source.kind in RAW_KINDS and source.kind != "stdlib" for source in config.data.sources)


def _has_pipeline(config: Config) -> bool:
    return config.parallel.pp > 1


def _sends_whole_hidden_states(config: Config) -> bool:
    """Whether tp ranks hold copies of what a pipeline stage sends."""
    parallel = config.parallel
    return parallel.pp > 1 and parallel.tp > 1 and not parallel.sequence_parallel


def _shards_weights(config: Config) -> bool:
    parallel = config.parallel
    return parallel.dp_shard * parallel.cp > 1 and parallel.zero_stage > 0


def _chooses_zero_stage(config: Config) -> bool:
    """Whether stages differ: 1 to 3 do where weights can be sharded; 0 (DDP) is also what replicas alone do."""
    parallel = config.parallel
    if parallel.zero_stage == 0:
        return parallel.data_ranks * parallel.cp > 1
    return parallel.dp_shard * parallel.cp > 1


ROTARY = 'rotary positions, which model.family = "llama" has'
SCALED = "model.rope_scaling_factor over 1"
PIPELINE = "parallel.pp over 1"
SHARDED = "parallel.dp_shard x cp over 1 and parallel.zero_stage over 0"

CONTRADICTIONS = (
    Need("run.json", lambda config: config.run.dry_run, "run.dry_run = true"),
    Need("model.rope_theta", _has_rotary_positions, ROTARY),
    Need("model.rope_scaling_factor", _has_rotary_positions, ROTARY),
    Need("model.rope_low_frequency_factor", _scales_rotary_positions, SCALED),
    Need("model.rope_high_frequency_factor", _scales_rotary_positions, SCALED),
    Need("model.rope_original_length", _scales_rotary_positions, SCALED),
    Need("data.pattern", _has_rank_file, "a tiktoken rank file as data.tokenizer"),
    Need(
        "training.max_consecutive_nonfinite",
        lambda config: config.training.on_nonfinite == "skip",
        'training.on_nonfinite = "skip"',
    ),
    Need("optimizer.beta1", lambda config: config.optimizer.name == "adamw", 'optimizer.name = "adamw"'),
    Need("optimizer.beta2", lambda config: config.optimizer.name == "adamw", 'optimizer.name = "adamw"'),
    Need("optimizer.epsilon", lambda config: config.optimizer.name == "adamw", 'optimizer.name = "adamw"'),
    Need("optimizer.momentum", lambda config: config.optimizer.name == "sgd", 'optimizer.name = "sgd"'),
    Need("schedule.decay_steps", lambda config: config.schedule.name == "wsd", 'schedule.name = "wsd"'),
    Need(
        "schedule.final_fraction",
        lambda config: config.schedule.name != "constant",
        "a schedule.name that is not constant",
    ),
    Need(
        "checkpoint.keep_every",
        lambda config: config.checkpoint.keep > 0 and config.checkpoint.interval > 0,
        "checkpoint.keep and checkpoint.interval over 0",
    ),
    Need(
        "recompute.k",
        lambda config: config.recompute.mode in ("segment", "every_k"),
        'recompute.mode = "segment" or "every_k"',
    ),
)
"""keys that contradict a choice: an error"""

SOURCE_KINDS = {
    "path": ("text", "jsonl", "parquet", "hub", "tokens"),
    "text_key": ("jsonl", "parquet", "hub"),
    "split": ("hub",),
}
"""key of a source -> kinds that use it: an error with any other"""

IDLE = (
    Need("parallel.schedule", _has_pipeline, PIPELINE),
    Need("parallel.virtual_stages", _has_pipeline, PIPELINE),
    Need("parallel.split", _has_pipeline, PIPELINE),
    Need("parallel.rebalance", _has_pipeline, PIPELINE),
    Need(
        "parallel.scatter_gather",
        _sends_whole_hidden_states,
        "parallel.pp and parallel.tp over 1, without parallel.sequence_parallel",
    ),
    Need("parallel.cp_method", lambda config: config.parallel.cp > 1, "parallel.cp over 1"),
    Need("parallel.sequence_parallel", lambda config: config.parallel.tp > 1, "parallel.tp over 1"),
    Need("parallel.zero_stage", _chooses_zero_stage, "parallel.dp_shard x cp over 1"),
    Need(
        "parallel.keep_last_block",
        lambda config: _shards_weights(config) and config.parallel.zero_stage == 3,
        "parallel.dp_shard x cp over 1 and parallel.zero_stage = 3",
    ),
    Need("parallel.prefetch", _shards_weights, SHARDED),
    # How to read raw text is no contradiction to reading shards that recipes/prepare.py made from it.
    Need("data.on_bad_record", _may_read_bad_records, "a source of your own raw text"),
    Need("data.max_raw_mib", _reads_raw_text, "a source of raw text"),
)
"""keys that need a layout or a source which this run does not have: a printed line"""


def contradictions(config: Config) -> list[Inert]:
    """Return the keys that do nothing because another key is set against them."""
    unmet = [inert._replace(message=f"{inert.message}; or remove it") for inert in _unmet(config, CONTRADICTIONS)]
    return [*unmet, *_unused_source_keys(config.data.sources)]


def idle_keys(config: Config) -> list[Inert]:
    """Return the keys that do nothing in this layout. No degree may be -1."""
    return list(_unmet(config, IDLE))


def _unmet(config: Config, needs: Iterable[Need]) -> Iterator[Inert]:
    for need in needs:
        section_name, name = need.key.split(".")
        section = getattr(config, section_name)
        if getattr(section, name) != _default(type(section), name) and not need.is_met(config):
            yield Inert(need.key, f"does nothing in this run: it needs {need.text}")


def _unused_source_keys(sources: Iterable[Source]) -> Iterator[Inert]:
    for index, source in enumerate(sources):
        for name, kinds in SOURCE_KINDS.items():
            if getattr(source, name) != _default(Source, name) and source.kind not in kinds:
                yield Inert(f"data.sources.{index}.{name}", f"does nothing with kind = {source.kind!r}")


def _default(schema: type[Any], name: str) -> Any:
    """Return the default of a field, which a section of a forked recipe may have changed."""
    (field,) = (field for field in fields(schema) if field.name == name)
    return field.default
