"""Keys that a recipe applies by a call of its own: before the first step none of them may have been forgotten.

Most keys reach the library through an argument that a recipe must pass. Those of `RULES` do not: a fork without the
call, because it is older than the key or because the call was removed, would train another model. The function that a
recipe calls for such a key says so (`applied`), and `refuse_unapplied` ends a run in which a key is set and no function
has applied it. A fork that applies a key by code of its own calls `applied` itself.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from torchllm.config.errors import UserError
from torchllm.config.schema import Config
from torchllm.config.toml import toml_value

AS_SET = object()
"""a key is applied with whatever value the config has"""


class Rule(NamedTuple):
    """What a recipe calls to apply a key."""

    key: str
    """section.key, or a section for all of its keys that have no rule of their own"""
    call: str
    is_replaceable: bool = False
    """a fork may have a part of its own instead, which need not read the keys: they are told, and nothing is refused"""
    is_late: bool = False
    """the call belongs behind a step: it is missed at the second step that is logged"""


_BUILD = "build_model(config.model, config.training.loss_chunk, config.training.z_loss)"
_PARALLELIZE = "parallelize(...) with config.recompute, config.compile and config.float8"
_INITIAL = "Checkpointer(..., initial=initial_weights(config)) and its resume()"
_CHECKPOINTS = "Checkpointer(config.checkpoint, ...) and its resume()"
_AVERAGE = (
    "WeightAverage(stages, config.optimizer.ema_decay), its follow(optimizer), and below checkpoints.resume() its "
    "restart(checkpoints.missing_extra_state)"
)
_BALANCE = "ExpertBalance(stages, config.training), which TrainStep has"
_EVALUATION = "data.validation_sequences(config.evaluate.sequences), and evaluate(...) where it is due"
_HEALTH = "read_health(config.training, n, result, validation_loss).check() at each logged step"

RULES = (
    Rule("run.dry_run", "dry_run(config) instead of training"),
    Rule("run.deterministic", "start_runtime(config.run, [config])"),
    Rule("model.from_hf", _INITIAL),
    Rule("model.upcycle", _INITIAL),
    Rule("model.upcycle_noise", _INITIAL),
    Rule("model.router_bias", _BALANCE),
    Rule("model.router_bias_rate", _BALANCE),
    Rule("model.balance_loss", _BALANCE),
    Rule("data", "build_loader(config.data, ...)", is_replaceable=True),
    Rule("training.loss_chunk", _BUILD),
    Rule("training.z_loss", _BUILD),
    Rule("training.on_nonfinite", _HEALTH, is_late=True),
    Rule("training.max_consecutive_nonfinite", _HEALTH, is_late=True),
    Rule("optimizer.ema_decay", _AVERAGE),
    Rule("optimizer", "build_optimizer(stages, config.optimizer)", is_replaceable=True),
    Rule("schedule", "LearningRate(config.schedule, ...)", is_replaceable=True),
    Rule("recompute", _PARALLELIZE),
    Rule("compile", _PARALLELIZE),
    Rule("float8", _PARALLELIZE),
    Rule("lora", "apply_lora(model, config.lora, dtype), right after build_model"),
    Rule("checkpoint.initial", _INITIAL),
    Rule("checkpoint", _CHECKPOINTS),
    Rule("evaluate.interval", _EVALUATION),
    Rule("finetune.epochs", "data.steps_of_epochs(config.finetune.epochs), whose steps are trained"),
)
"""every key that a recipe may ignore, and what applies it; all others are arguments that a recipe must pass, or are
read by the library or by other recipes (tests/config/test_applied_keys.py says which)"""


@dataclass
class _Training:
    """What was applied in a training, or in this process where none is under way."""

    config: Config | None = None
    """None: outside of `new_training`"""
    values: dict[str, object] = field(default_factory=dict)
    """by key: the value that was applied, or AS_SET"""
    state: dict[str, str] = field(default_factory=dict)
    """by the name of a tensor that checkpoints must have: the key that needs it"""
    is_checked: bool = False
    """`refuse_unapplied` was called"""
    saved: Collection[str] | None = None
    """names of the extra tensors that checkpoints have; None: the recipe has no checkpoints"""


_training = _Training()


class _Loaded(NamedTuple):
    """The config that this process has loaded last."""

    config: Config
    origins: Mapping[str, str]
    """where each key was written, by key"""


_loaded = _Loaded(Config(), {})


@contextmanager
def new_training(config: Config) -> Iterator[None]:
    """Return a context around a training: it begins with nothing applied but [run], which the process has."""
    global _training
    before = _training
    of_process = {key: value for key, value in before.values.items() if key.startswith("run.")}
    _training = _Training(config, of_process)
    try:
        yield
    finally:
        _training = before


def applied(key: str, value: object = AS_SET) -> None:
    """Note that the recipe applies a key, "training.z_loss", or with a dataclass as value a section, "lora".

    value: the one that is applied, where it may not be the config's, as of an argument that has a default.
    """
    if is_dataclass(value):
        for item in fields(value):
            _training.values[f"{key}.{item.name}"] = getattr(value, item.name)
    else:
        _training.values[key] = value


def needs_state(key: str, names: Iterable[str]) -> None:
    """Note that a key is applied only if checkpoints have these tensors."""
    _training.state.update(dict.fromkeys(names, key))


def saves_state(names: Collection[str]) -> None:
    """Note the names of all tensors that checkpoints have beside those of model and optimizer."""
    _training.saved = names


def note_origins(config: Config, origins: Mapping[str, str]) -> None:
    """Note where the keys of a config were written ("x.toml:12", "--training.z_loss"), for messages."""
    global _loaded
    _loaded = _Loaded(config, origins)


class Unapplied(NamedTuple):
    """A key that is set, and that nothing has applied."""

    key: str
    value: object
    rule: Rule


def unapplied(config: Config, *, late: bool = False) -> list[Unapplied]:
    """Return the keys with another value than their default that nothing has applied with this value.

    late: also those whose call belongs behind a step.
    """
    found = []
    for key, value, default in _values(config):
        rule = rule_for(key)
        is_off = value is False and default == "auto"  # a Switch, which no function needs to apply
        if rule is None or value == default or is_off or (rule.is_late and not late):
            continue
        if _training.values.get(key, default) not in (value, AS_SET):
            found.append(Unapplied(key, value, rule))
    return found


def rule_for(key: str) -> Rule | None:
    """Return the rule of a key: its own, or that of its section; None if a recipe cannot ignore it."""
    for name in (key, key.partition(".")[0]):
        for rule in RULES:
            if rule.key == name:
                return rule
    return None


def refuse_unapplied(config: Config, *, late: bool = False, left_out: Collection[str] = ()) -> list[str]:
    """Raise UserError if a key is set that nothing has applied; return the keys that were passed over.

    These are what the recipe says that it leaves out, and in `new_training` keys of parts that a fork may replace.
    left_out: keys, and sections for all of their keys. late: also check what a recipe calls after a step.
    """
    _training.is_checked = True
    lines, passed_over = [], []
    for item in unapplied(config, late=late):
        if item.key in left_out or item.key.partition(".")[0] in left_out:
            passed_over.append(item.key)
        elif item.rule.is_replaceable:
            passed_over += [item.key] if _training.config is not None else []
        else:
            lines.append(
                f"{_located(item.key, config)}: is {_shown(item.value)}, but this recipe does not apply it: call "
                f"{item.rule.call}, as torchllm's own recipes do; or remove the key"
            )
    lines += _unsaved_state(config)
    if lines:
        raise UserError("\n".join(lines))
    return passed_over


def refuse_unchecked_step() -> None:
    """Do what `refuse_unapplied` does, before the first step of a training whose recipe has no monitor to do it."""
    if _training.config is not None and not _training.is_checked:
        refuse_unapplied(_training.config)


def refuse_evaluation_of_weights() -> None:
    """Raise UserError if the training evaluates its weights, and its config wants their average (`evaluate.ema`)."""
    config = _training.config
    if config is not None and config.evaluate.ema and _training.values.get("evaluate.ema") not in (True, AS_SET):
        raise UserError(
            f"{_located('evaluate.ema', config)}: is true, but this recipe evaluates the weights: call evaluate(...) "
            "inside of `with average.in_place_of_weights(config.evaluate.ema):`, as torchllm's own recipes do; or "
            "remove the key"
        )


def _unsaved_state(config: Config) -> list[str]:
    """Return a line for each key whose state is in no checkpoint, although the recipe has checkpoints."""
    if _training.saved is None:
        return []
    missing = {key: name for name, key in _training.state.items() if name not in _training.saved}
    return [
        f"{_located(key, config)}: needs {name} in every checkpoint, and this recipe does not save it: give "
        "Checkpointer extra_state=average.tensors | step.expert_balance.tensors, as torchllm's own recipes do; or "
        "remove the key"
        for key, name in missing.items()
    ]


def _values(config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield every key of the sections with its value and its default."""
    defaults = type(config)()
    for section in fields(config):
        table, default = getattr(config, section.name), getattr(defaults, section.name)
        for item in fields(table) if is_dataclass(table) else ():
            yield f"{section.name}.{item.name}", getattr(table, item.name), getattr(default, item.name)


def _located(key: str, config: Config) -> str:
    """Return a key behind where it was written, as `config.load` does; alone, where its value is not that one."""
    section, name = key.split(".")
    is_loaded = getattr(getattr(config, section), name) == getattr(getattr(_loaded.config, section), name)
    origin = _loaded.origins.get(key, "") if is_loaded else ""
    return origin if origin.startswith("--") else f"{origin}: {key}" if origin else key


def _shown(value: Any) -> str:
    return "set" if isinstance(value, tuple) and value and is_dataclass(value[0]) else toml_value(value)
