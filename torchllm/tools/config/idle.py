"""Keys that have no effect in a run.

A key has no effect when its value is not the default and a condition is not met: a `Needs` of the schema. This is an
error if it contradicts a choice in the same file (momentum with AdamW). If it only depends on the layout (virtual
stages without a pipeline), one line is printed and the run goes on, so that one file serves a sweep over layouts. Keys
that only other recipes read from the same file are one line as well.

Without a condition are `evaluate.sequences` and the other keys of [generate], which evaluate.py and generate.py read
from the config.toml of the run; `cluster.name`, which describes the machines; `data.cache`, which also holds what
parallel.layout = "tune" measured; the weight of a single source, which is all of the mixture; and `run.lower_ranks`,
which a resolved file keeps although it has no degree of -1 left.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import NamedTuple

from torchllm.config.keys import Needs, OfKinds, field_types, notes_on, notes_on_key
from torchllm.config.schema import (
    DECAY,
    EVALUATED,
    FREE,
    GATHERED,
    KEEPING,
    KIND_KEYS,
    MATRICES,
    OWN_HEAD,
    OWN_TEXT,
    RAW_KINDS,
    ROTARY,
    SCALED,
    SHARDED,
    Config,
    Model,
    Source,
)
from torchllm.facts.parts.registry import mixer
from torchllm.tools.config.toml_files import parse_value

IsMet = Callable[[Config], bool]


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


def contradictions(config: Config) -> list[IdleKey]:
    """Return the keys that have no effect because another key rules them out."""
    unmet = [idle_key._replace(remedy="; or remove it") for idle_key in _unmet(config, "error")]
    return [*unmet, *_unused_source_keys(config.data.all_sources)]


def idle_keys(config: Config) -> list[IdleKey]:
    """Return the keys that have no effect in this layout. No degree may be -1."""
    return [*_unmet(config, "idle"), *_keys_of_no_block(config.model)]


def _keys_of_no_block(model: Model) -> Iterator[IdleKey]:
    """Yield the keys of [model] that each kind of blocks has by itself."""
    kinds = [model.kinds.get(kind, {}) for kind in model.pattern]
    for key in KIND_KEYS:
        if kinds and getattr(model, key) != getattr(Model, key) and all(key in keys for keys in kinds):
            yield IdleKey(f"model.{key}", "needs a kind in model.pattern that does not set it")
    mixers = {view.mixer: set(mixer(view).unread) for view in model.views}
    for key in sorted(set.intersection(*mixers.values())):
        if getattr(model, key) != getattr(Model, key):
            yield IdleKey(f"model.{key}", f"needs a block whose mixer reads it, which {' and '.join(mixers)} does not")
    for kind in dict.fromkeys(model.pattern):
        view = model.of_kind(kind)
        for key in sorted({*mixer(view).unread} & {*model.kinds.get(kind, {})}):
            yield IdleKey(f"model.kinds.{kind}.{key}", f"needs a mixer that reads it, which {view.mixer} does not")


def keys_of_other_recipes(config: Config, is_finetuning: bool) -> list[IdleKey]:
    """Return the keys that have no effect in a training, by recipes/finetune.py or another recipe."""
    found = _unmet(config, "elsewhere")
    return [idle_key for idle_key in found if not (is_finetuning and idle_key.key.startswith("finetune."))]


def _unmet(config: Config, kind: str) -> Iterator[IdleKey]:
    depth = config.model.mtp_depth  # of the whole model, which a kind does not have
    of_kinds = [replace(of, model=replace(of.model, mtp_depth=depth)) for of in config.of_kinds.values()]
    for item in fields(config):
        section = getattr(config, item.name)
        if not is_dataclass(section):  # a fork's key without a section
            continue
        schema: type = type(section)
        defaults = schema()  # which a forked recipe may have changed
        for name, words in conditions(schema, kind).items():
            if getattr(section, name) == getattr(defaults, name):
                continue
            if not any(map(condition(words), of_kinds)):
                yield IdleKey(f"{item.name}.{name}", f"needs {words}")
    if config.model.pattern:
        yield from _unmet_of_kinds(config, kind)


def _unmet_of_kinds(config: Config, unmet: str) -> Iterator[IdleKey]:
    """Yield the keys of kinds of blocks that have no effect: those that differ from [model]."""
    for path, of_kind in config.of_kinds.items():
        words_of_keys = conditions(Model, unmet)
        for name, value in config.model.kinds.get(path.rpartition(".")[2], {}).items():
            words = words_of_keys.get(name, "")
            if words and value != getattr(config.model, name) and not condition(words)(of_kind):
                yield IdleKey(f"{path}.{name}", f"needs {words}")


@cache
def conditions(section: type, kind: str) -> dict[str, str]:
    """Return the keys of a section that need something, and what; a key's own condition counts before the section's."""
    found: dict[str, str] = {}
    for name in field_types(section):
        words = [needs.words for needs in notes_on_key(section, name, Needs) if needs.unmet == kind]
        found |= {name: words[0]} if words else {}
    return found


def _unused_source_keys(sources: Mapping[str, Source]) -> Iterator[IdleKey]:
    for key, source in sources.items():
        for name, annotated in field_types(Source).items():
            for used_by in notes_on(annotated, OfKinds):
                if getattr(source, name) != getattr(Source, name) and source.kind not in used_by.kinds:
                    yield IdleKey(f"{key}.{name}", f"needs another kind than {source.kind!r}")


@cache
def condition(words: str) -> IsMet:
    """Return the function that says whether a config meets a condition in words (`Needs`)."""
    if words in IN_OTHER_WORDS:
        return IN_OTHER_WORDS[words]
    parts = re.split(", or |: ", words)[0].split(" and ")
    are_met = [IN_OTHER_WORDS.get(part) or _comparison(part) for part in parts]
    return lambda config: all(is_met(config) for is_met in are_met)


def _comparison(words: str) -> IsMet:
    """Return the function of KEY over NUMBER, or of KEY = VALUE or VALUE. TypeError for other words."""
    try:
        key, relation, text = words.split(" ", 2)
        values = [parse_value(value) for value in text.split(" or ")]
    except ValueError as error:
        form = "KEY over NUMBER, or KEY = VALUE or VALUE"
        raise TypeError(f"Needs({words!r}): write {form}, or add a function to idle.IN_OTHER_WORDS") from error
    value_of = attrgetter(key)
    if relation == "over":
        return lambda config: bool(value_of(config) > values[0])
    return lambda config: value_of(config) in values


def _trains(*roles: str, decays: bool = False) -> IsMet:
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


def _has_rotary_positions(config: Config) -> bool:
    return not config.model.features.learned_positions


def _reads(*kinds: str) -> IsMet:
    """Return whether a source of a config is of one of these kinds."""
    return lambda config: any(source.kind in kinds for source in config.data.all_sources.values())


def _upcycles(config: Config) -> bool:
    return bool(config.model.experts and (config.model.from_hf or config.checkpoint.initial))


def _profiles_a_step(config: Config) -> bool:
    """Whether the first profiled step may be one of the run's, whose length finetune.epochs may decide."""
    first = re.match(r"\d+", config.metrics.profile_steps)
    return first is None or int(first[0]) <= config.training.steps or config.finetune.epochs > 0


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
    ranks = parallel.data_ranks if parallel.zero == 0 else parallel.dp_shard
    return ranks * parallel.cp > 1


IN_OTHER_WORDS: dict[str, IsMet] = {
    ROTARY.words: _has_rotary_positions,
    SCALED: lambda config: _has_rotary_positions(config) and config.model.rope_scaling_factor > 1,
    "a model.family whose matrices have no biases yet, as llama": lambda config: not config.model.features.biases,
    "RMSNorm (family llama or nanochat): LayerNorm is one kernel already": lambda config: (
        config.model.features.norm == "rms" or config.model.qk_norm != "none"
    ),
    "model.experts over 0, and model.from_hf or checkpoint.initial": _upcycles,
    "a longer training.sequence_length or model.max_sequence_length": lambda config: (
        config.longest_text > config.model.window
    ),
    'a source of kind "nanogpt"': _reads("nanogpt"),
    'a source of kind "nanogpt", "llmc" or "mds"': _reads("nanogpt", "llmc", "mds"),
    "a source of raw text": _reads(*RAW_KINDS),
    OWN_TEXT: _reads(*(kind for kind in RAW_KINDS if kind != "stdlib")),  # whose unreadable files are always skipped
    MATRICES.words: lambda config: config.optimizer.name != "muon" or _trains("matrix")(config),
    f"embeddings {FREE}": _trains("embedding", "position"),
    f"{DECAY}, and embeddings {FREE}": _trains("embedding", decays=True),
    f"{OWN_HEAD}, and a head {FREE}": _trains("head"),
    f"{OWN_HEAD}, {DECAY}, and a head {FREE}": _trains("head", decays=True),
    f"vectors {FREE}": _trains("vector"),
    f"{DECAY}, and vectors {FREE}": _trains("vector", "position", decays=True),
    "stages of other sizes (data.stage)": lambda config: config.data.changes_size,
    "a schedule.name that is not constant": lambda config: config.schedule.name != "constant",
    GATHERED.words: _sends_whole_hidden_states,
    "parallel.dp_shard x cp over 1": _chooses_zero_stage,
    f"{SHARDED} over 0": _shards_weights,
    f"{SHARDED} = 3": lambda config: _shards_weights(config) and config.parallel.zero == 3,
    "checkpoint.keep and checkpoint.interval over 0": lambda config: (
        config.checkpoint.keep > 0 and config.checkpoint.interval > 0
    ),
    "a first step that is not over training.steps": _profiles_a_step,
    EVALUATED.words: lambda config: config.evaluate.interval > 0 or config.evaluate.tasks_interval > 0,
    KEEPING: lambda config: config.recompute.mode not in ("full", "segment"),
    "evaluate.tasks": lambda config: len(config.evaluate.tasks) > 0,
    "recipes/export.py, after the training": lambda _: False,
    "RECIPE=recipes/finetune.py": lambda _: False,
}
"""conditions, or parts of them before an "and", that are no comparisons"""
