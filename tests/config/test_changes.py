import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest

from torchllm.config import Config, Data, Evaluate, Kinds, Model, Optimizer, Source, Training
from torchllm.config.errors import UserError
from torchllm.config.paths import absolute_paths
from torchllm.config.schema import Lora
from torchllm.optim.schedule import LearningRate
from torchllm.tools.config.changes import log_config_changes
from torchllm.tools.config.compare import check_frozen_weights, config_changes

pytestmark = pytest.mark.quick


def saved(config: Config) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return stored


def texts(before: Config, current: Config) -> list[str]:
    return [str(change) for change in config_changes(saved(before), current)]


def test_every_key_that_differs_is_told_with_both_values() -> None:
    before = Config()
    current = replace(
        before,
        optimizer=replace(before.optimizer, learning_rate=3.1e-5),
        schedule=replace(before.schedule, name="constant"),
        parallel=replace(before.parallel, split=(1, 3)),
        data=replace(before.data, sources=(Source(kind="text", path="a.txt"),)),
    )
    assert texts(before, current) == [
        'data.sources.0.kind: "stdlib" in the checkpoint, "text" now',
        'data.sources.0.path: "" in the checkpoint, "a.txt" now',
        "optimizer.learning_rate: 0.0003 in the checkpoint, 3.1e-05 now",
        "parallel.split: [] in the checkpoint, [1, 3] now",
        'schedule.name: "cosine" in the checkpoint, "constant" now',
    ]


def test_a_path_is_the_same_however_it_is_written() -> None:
    """A run's config.toml has it absolute; the checkpoint has it as it was given, in that or another working folder."""
    given = Config(
        lora=Lora(rank=2),
        data=Data(sources=(Source(kind="text", path="./a/*.txt"),)),
        model=Model(from_hf="tests"),
        evaluate=Evaluate(tasks=("arc_easy", "tests")),
    )
    changes = config_changes(saved(given), absolute_paths(given))
    assert changes == []
    log_config_changes({"config": saved(given)}, absolute_paths(given))  # no other frozen weights
    elsewhere = replace(given.data, sources=(Source(kind="text", path="/b/a/*.txt"),))
    assert config_changes(saved(given), replace(given, data=elsewhere)) == []
    other = replace(given.data, sources=(Source(kind="text", path="/b/aa/*.txt"),))
    assert [change.key for change in config_changes(saved(given), replace(given, data=other))] == [
        "data.sources.0.path"
    ]


@pytest.mark.parametrize("check", [log_config_changes, check_frozen_weights])
def test_updates_of_other_frozen_weights_are_refused(check: Callable[..., None]) -> None:
    given, other = (Config(lora=Lora(rank=2), model=Model(from_hf=name)) for name in ("one", "two"))
    with pytest.raises(UserError, match=r'^model\.from_hf: "one" in the checkpoint, "two" now: .* low-rank updates'):
        check({"config": saved(given)}, other)


def test_a_source_more_and_a_source_fewer() -> None:
    one, two = Config(), replace(Config(), data=replace(Config().data, sources=(Source(), Source(kind="synthetic"))))
    assert 'data.sources.1.kind: no such key in the checkpoint, "synthetic" now' in texts(one, two)
    assert 'data.sources.1.kind: "synthetic" in the checkpoint, no such key now' in texts(two, one)


LOCAL = Config(model=Model(pattern=("local",), kinds=Kinds(local={"window": 16, "rotary_fraction": 0.0})))
WIDER = Config(model=Model(pattern=("local",), kinds=Kinds(local={"window": 32})))


def test_a_key_of_a_kind_is_told_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    assert texts(LOCAL, WIDER) == [
        "model.kinds.local.rotary_fraction: 0.0 in the checkpoint, no such key now",
        "model.kinds.local.window: 16 in the checkpoint, 32 now",
    ]
    assert texts(Config(), WIDER) == [
        "model.kinds.local.window: no such key in the checkpoint, 32 now",
        'model.pattern: [] in the checkpoint, ["local"] now',
    ]
    without = saved(Config())
    for key in ("pattern", "kinds"):  # of a version that did not know them
        del without["model"][key]
    assert config_changes(without, Config()) == []
    log_config_changes({"config": saved(LOCAL)}, WIDER)
    cures = [record.getMessage().partition("; to keep it, ")[2] for record in caplog.records[-2:]]
    assert cures == ["set model.kinds.local.rotary_fraction to 0.0", "set model.kinds.local.window to 16"]


@dataclass(frozen=True)
class Fork:
    rate: float = 0.5


@dataclass(frozen=True)
class ForkConfig(Config):
    fork: Fork = field(default_factory=Fork)


def test_a_key_that_the_checkpoint_does_not_know_is_told_unless_it_is_the_default() -> None:
    assert texts(Config(), ForkConfig()) == []
    assert texts(Config(), ForkConfig(fork=Fork(0.25))) == ["fork.rate: no such key in the checkpoint, 0.25 now"]
    assert texts(ForkConfig(), Config()) == ["fork.rate: 0.5 in the checkpoint, no such key now"]


def test_a_model_that_computes_something_else_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    values: dict[str, Any] = {"rope_theta": 5e5, "norm_epsilon": 1e-6, "heads": 4}
    same: dict[str, Any] = {
        **{"attention": "eager", "from_hf": "other", "mtp_weight": 0.5, "router_bias_rate": 0.0},
        **{"balance_loss": "global", "balance_weight": 0.5, "router_z_loss": 0.5},
    }
    """another kernel, initial weights and gradients for the same function"""
    for key, value in {**values, **same}.items():
        caplog.clear()
        log_config_changes(
            {"config": saved(Config())}, replace(Config(), model=replace(Config().model, **{key: value}))
        )
        differs, *warnings = caplog.records
        assert differs.getMessage().startswith("the config is not the checkpoint's in 1 key(s):\n  model.")
        assert f"model.{key}: " in differs.getMessage()
        if key in same:
            assert warnings == []
            continue
        (warning,) = warnings
        assert warning.levelno == logging.WARNING
        assert f"model.{key} changes the function of the model" in warning.getMessage()


DROPPED_STATE = "the optimizer state of 9 parameters is dropped: they are frozen now"
DROPPED_AVERAGE = "the moving average of 9 parameters is dropped: they are frozen now"
NEW_STATE = "9 parameters that were frozen start without optimizer state, as in a new run"
BLOCK_0, BLOCK_1 = r"layers\.0\..*", r"layers\.1\..*"


@pytest.mark.parametrize(
    ("before", "now", "optimizer", "lines"),
    [
        ("", BLOCK_0, Optimizer(), [DROPPED_STATE]),
        ("", BLOCK_0, Optimizer(ema_decay=0.9), [DROPPED_STATE, DROPPED_AVERAGE]),
        ("", BLOCK_0, Optimizer(name="sgd", ema_decay=0.9), [DROPPED_AVERAGE]),
        (BLOCK_0, "", Optimizer(ema_decay=0.9), [NEW_STATE]),
        (BLOCK_0, BLOCK_1, Optimizer(name="sgd", momentum=0.9), [DROPPED_STATE, NEW_STATE]),
        (BLOCK_0, BLOCK_1, Optimizer(name="sgd"), []),
        (BLOCK_0, rf"({BLOCK_0})", Optimizer(ema_decay=0.9), []),
    ],
)
def test_freezing_and_thawing_are_told_where_something_is_lost(
    before: str, now: str, optimizer: Optimizer, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    frozen, other = (Config(model=Model(layers=3, frozen=pattern), optimizer=optimizer) for pattern in (before, now))
    log_config_changes({"config": saved(frozen)}, other)
    _, *told = caplog.messages
    assert told == lines


def test_an_average_that_begins_with_the_freezing_has_lost_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = Config(model=Model(layers=3, frozen=BLOCK_0), optimizer=Optimizer(ema_decay=0.9))
    log_config_changes({"config": saved(Config(model=Model(layers=3)))}, now)
    assert caplog.messages[1:] == [DROPPED_STATE]


def test_the_advice_gives_the_key_its_value_of_the_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    """Whether the checkpoint has another value of the key, has no such key, or has one that this version has not."""
    record, now = saved(Config(model=Model(rope_theta=5e5))), Config(model=Model(norm_epsilon=1e-6))
    model: Any = record["model"]
    del model["norm_epsilon"]
    model["gone"] = True
    log_config_changes({"config": record}, now)
    for message, advice in zip(
        caplog.messages,
        (
            "go on with the version that wrote the checkpoint",
            "remove model.norm_epsilon",
            "set model.rope_theta to 500000.0",
        ),
        strict=True,
    ):
        assert message.endswith(f" changes the function of the model, though all tensors fit; to keep it, {advice}")


def test_a_learning_rate_that_is_a_function_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint does not know its rate; that of a schedule of the library is told if it jumps."""
    caplog.set_level(logging.INFO)
    record, now = {"config": saved(Config())}, Config(schedule=replace(Config().schedule, warmup_steps=99))
    log_config_changes(record, now, learning_rate=lambda step: 1 / step, step=3)
    (told,) = caplog.messages
    assert "schedule.warmup_steps" in told
    log_config_changes(record, now, learning_rate=LearningRate(now.schedule, 1e-3, 100), step=3)
    assert caplog.messages[-1].startswith("the learning rate jumps from ")


def test_nothing_is_said_where_nothing_differs_or_is_known(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = replace(Config(), parallel=replace(Config().parallel, split=(1, 3)))
    log_config_changes({"config": saved(config)}, config)
    log_config_changes({}, replace(Config(), training=Training(steps=3)))
    assert caplog.records == []
