"""What a config that is sent to experiment trackers must not hold: by the names of keys, and by texts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any

import pytest

from torchllm.config import Config, Data, Metrics, Model, Optimizer, Parallel, Source
from torchllm.tools.config.checks import problems, setting_problems

pytestmark = pytest.mark.quick
SECRET_NAMES = [
    *("password", "passphrase", "secret", "credential", "credentials", "token", "hub_token", "wandb_api_key"),
    *("api_key", "access_key", "auth_key", "private_key", "apikey", "privatekey"),
]
OTHER_NAMES = ["tokens", "tokenizer", "key", "text_key", "secretary", "passwords", "token_limit", "secret_folder"]
SECRET_TEXTS = [
    "https://bee:honey@hub.example/corpus",
    "s3://bee:honey@bucket",
    "token hf_" + "a1B2" * 5,
    "AKIA" + "A1" * 8,
    *("gh" + kind + "_" + "a1B2c" * 6 for kind in "pousr"),
]
OTHER_TEXTS = [
    "https://hub.example:80/c@v2",
    "https://bee@hub.example/c",
    "hf_" + "a1B2" * 4,
    "my_hf_" + "a1B2" * 5,
    "AKIA" + "A1" * 7,
    "AKIA" + "A1" * 8 + "B",
    "ghp_" + "a" * 29,
    "ghx_" + "a" * 30,
]


@dataclass(frozen=True)
class Forked(Config):
    mine: Any = None


def refused(config: Config) -> list[str]:
    """Return the keys whose values are not to be sent, and assert that no message has the value."""
    found = [problem for problem in problems(config, 1) if "uploads the config" in problem.message]
    assert not any("honey" in problem.message for problem in found)
    return [problem.key for problem in found]


def sent(names: Sequence[str], value: str) -> Forked:
    """Return a config with these keys in a section of a fork's, which a tracker is sent."""
    section = make_dataclass("Mine", [(name, str, field(default=value)) for name in names])
    return Forked(mine=section(), metrics=Metrics(wandb="bees"))


def test_keys_with_the_name_of_a_secret() -> None:
    config = sent([*SECRET_NAMES, *OTHER_NAMES], "honey")
    assert refused(config) == [f"mine.{name}" for name in SECRET_NAMES]
    assert not refused(sent(SECRET_NAMES, ""))
    assert not refused(replace(config, metrics=Metrics()))  # it stays here


def test_texts_that_look_like_a_secret() -> None:
    texts = [*SECRET_TEXTS, *OTHER_TEXTS]
    sources = tuple(Source(kind="text", path=text) for text in texts)
    for trackers in ({"wandb": "bees"}, {"mlflow": "bees"}, {"trackio": "bees"}):
        config = Config(data=Data(sources=sources), metrics=Metrics(**trackers))
        assert refused(config) == [f"data.sources.{index}.path" for index in range(len(SECRET_TEXTS))]


OFFLOADED = {dtype: Optimizer(state_dtype=dtype, offload=True) for dtype in ("float32", "bfloat16", "int8")}
CUTS = (
    ({"ffn": 96}, {"tp": 2}, "parallel.tp cuts the rows of layers.0.mlp.down_proj.weight, of 96, into 2 parts"),
    ({"ffn": 128}, {"tp": 2}, ""),
    ({"ffn": 96}, {"tp": 1}, ""),
    ({"experts": 4, "expert_ffn": 96}, {"dp_shard": 2, "tp": 2, "ep": 2}, ""),
    (
        {"experts": 6},
        {"dp_shard": 4},
        "parallel.dp_shard cuts the rows of layers.0.mlp.routed.experts.gate_proj, of 64, into 4 parts",
    ),
    ({"experts": 8}, {"dp_shard": 4}, ""),
    ({"experts": 6}, {"dp_shard": 2}, ""),
)


@pytest.mark.parametrize(("model", "degrees", "text"), CUTS)
def test_layouts_that_cut_blocks_of_moments(model: dict[str, int], degrees: dict[str, int], text: str) -> None:
    config = Config(
        model=Model(layers=2, hidden=64, heads=2, **{"ffn": 128, **model}),
        optimizer=Optimizer(state_dtype="int8"),
        parallel=Parallel(**{"dp_shard": 1, **degrees}),
    )
    found = [problem.message for problem in setting_problems(config) if problem.key == "optimizer.state_dtype"]
    assert len(found) == (text != "")
    assert text in "".join(found)


def test_moments_in_8_bits_are_not_on_the_host() -> None:
    found = {
        state_dtype: [problem.key for problem in setting_problems(Config(optimizer=optimizer))]
        for state_dtype, optimizer in OFFLOADED.items()
    }
    assert found == {"float32": [], "bfloat16": [], "int8": ["optimizer.offload"]}
