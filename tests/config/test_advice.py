"""The advice of an error cures it: with what the message says to set, a config has no problem left."""

from typing import NamedTuple

import pytest

from tests.config.conftest import config_of
from torchllm.tools.config.checks import problems
from torchllm.tools.proof.layouts import Settings

pytestmark = pytest.mark.quick
BFLOAT16 = {"training.dtype": "bfloat16"}
ROWWISE = {**BFLOAT16, "float8.recipe": "rowwise"}
FLASH = {**BFLOAT16, "model.attention": "flash"}
UPCYCLED = {"model.experts": 4, "model.upcycle": True, "checkpoint.initial": "x"}
SPLIT_BACKWARD = {
    "parallel.pp": 2,
    "parallel.schedule": "InterleavedZeroBubble",
    "parallel.virtual_stages": 2,
    "training.global_batch_size": 8,
}
V_SCHEDULE = {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", "training.global_batch_size": 8}
PLAIN_SCHEDULE = {"parallel.schedule": "1F1B", "parallel.virtual_stages": 1}


class Advice(NamedTuple):
    """A wrong config, and what its error says to set, each alone."""

    wrong: Settings
    key: str
    """of the error"""
    cures: list[Settings]
    ranks: int = 1


ADVICE = [
    *(
        Advice(
            {**schedule, **settings},
            key,
            [PLAIN_SCHEDULE, {"parallel.schedule": "Interleaved1F1B"}, off],
            ranks=2,
        )
        for schedule in (SPLIT_BACKWARD, V_SCHEDULE)
        for settings, key, off in (
            ({"compile.block": True}, "compile.block", {"compile.block": False}),
            (ROWWISE, "parallel.schedule", {"float8.recipe": "none"}),
        )
    ),
    Advice(
        {"compile.block": True, "parallel.cp": 2, "recompute.mode": "full"},
        "compile.block",
        [{"compile.block": False}, {"recompute.mode": "segment"}, {"recompute.mode": "ffn"}],
        ranks=2,
    ),
    Advice({"parallel.dp_shard": 0}, "parallel.dp_shard", [{"parallel.dp_shard": 1}, {"parallel.dp_shard": -1}]),
    Advice({"model.heads": 6, "model.kv_heads": 6}, "model.heads", [{"model.head_dim": 32}]),
    Advice({"model.block": "x:y", "lora.rank": 4}, "model.block", [{"model.block": ""}, {"lora.rank": 0}]),
    Advice(
        {**FLASH, "data.document_mask": True},
        "model.attention",
        [
            {"model.attention": "sdpa"},
            {"model.attention": "flex"},
            {"data.document_mask": False},
        ],
    ),
    Advice(
        {**FLASH, "data.document_mask": False, "training.dtype": "float32"},
        "training.dtype",
        [
            BFLOAT16,
            {"model.attention": "sdpa"},
        ],
    ),
    Advice({"model.experts": 4, "model.top_k": 1}, "model.router_renormalize", [{"model.router_renormalize": False}]),
    Advice({**UPCYCLED, "model.expert_ffn": 32}, "model.expert_ffn", [{"model.expert_ffn": 0}]),
    Advice({**UPCYCLED, "model.shared_experts": 1}, "model.shared_experts", [{"model.shared_experts": 0}]),
    Advice({"model.experts": 4, "model.family": "gpt"}, "model.experts", [{"model.family": "llama"}]),
    Advice({"model.experts": 4, "lora.rank": 4}, "lora.rank", [{"lora.rank": 0}]),
    Advice({"model.experts": 4, **ROWWISE}, "float8.recipe", [{"float8.recipe": "none"}]),
    Advice({**ROWWISE, "training.dtype": "float32"}, "training.dtype", [BFLOAT16]),
    Advice({**ROWWISE, "model.ffn": 1000}, "float8.recipe", [{"model.ffn": 1024}, {"float8.recipe": "none"}]),
    Advice(
        {**ROWWISE, "training.sequence_length": 100},
        "training.micro_batch_size",
        [
            {"training.micro_batch_size": 4},
            {"float8.recipe": "none"},
        ],
    ),
    *(
        Advice({"compile.graphs": True, **keys}, "compile.graphs", [{"compile.graphs": False}, cure], ranks)
        for keys, cure, ranks in (
            ({"data.document_mask": True}, {"data.document_mask": False}, 1),
            ({"model.experts": 4, "model.top_k": 2}, {"model.experts": 0}, 1),
            ({**ROWWISE}, {"float8.recipe": "none"}, 1),
            ({"run.device": "cpu"}, {"run.device": "auto"}, 1),
            ({"parallel.pp": 2, "parallel.dp_shard": -1}, {"parallel.pp": 1}, 2),
        )
    ),
    Advice({"lora.rank": 4, "model.frozen": ["x"]}, "model.frozen", [{"model.frozen": []}]),
    Advice({"lora.rank": 4, "model.family": "gpt"}, "lora.rank", [{"lora.rank": 0}, {"model.family": "llama"}]),
    Advice({"lora.rank": 4, **ROWWISE}, "float8.recipe", [{"lora.rank": 0}, {"float8.recipe": "none"}]),
    Advice({"lora.rank": 4, "lora.targets": []}, "lora.targets", [{"lora.targets": ["q_proj"]}]),
    Advice(
        {"evaluate.interval": 10, "data.validation_fraction": 0.0},
        "evaluate.interval",
        [
            {"data.validation_fraction": 0.01},
        ],
    ),
    Advice(
        {"parallel.tp": 2, "parallel.pp": 2, "training.sequence_length": 101, "training.global_batch_size": 8},
        "parallel.tp",
        [{"parallel.scatter_gather": False}],
        ranks=4,
    ),
    Advice(
        {"model.experts": 4, "parallel.dp_shard": 2, "parallel.ep": 2, "parallel.zero_stage": 0},
        "parallel.zero_stage",
        [{"parallel.zero_stage": 1}],
        ranks=2,
    ),
    Advice(
        {"model.vocab": 259, "parallel.tp": 2, "parallel.dp_shard": -1},
        "model.vocab",
        [{"model.vocab_padding": 1}, {"parallel.tp": 1}],
        ranks=8,
    ),
    Advice(
        {"parallel.cp": 8, "model.kv_heads": 4, "parallel.cp_method": "ulysses", "parallel.dp_shard": -1},
        "parallel.cp",
        [{"parallel.cp": 4}, {"parallel.cp_method": "ring"}],
        ranks=8,
    ),
    Advice(
        {"parallel.cp": 2, "model.attention": "flex"},
        "model.attention",
        [
            {"model.attention": "sdpa"},
            {"model.attention": "eager"},
            {"parallel.cp_method": "ulysses"},
        ],
        ranks=2,
    ),
    Advice(
        {"parallel.cp": 2, "model.window": 1000}, "parallel.cp_method", [{"parallel.cp_method": "ulysses"}], ranks=2
    ),
]


def left(settings: Settings, ranks: int) -> dict[str, str]:
    """Return the message of each key that has a problem."""
    return {problem.key: problem.message for problem in problems(config_of(settings), ranks)}


@pytest.mark.parametrize("advice", ADVICE, ids=lambda advice: advice.key)
def test_what_an_error_says_to_set_cures_it(advice: Advice) -> None:
    wrong = {"training.global_batch_size": 8 * advice.ranks, **advice.wrong}
    message = left(wrong, advice.ranks)[advice.key]
    for cure in advice.cures:
        for key, value in cure.items():
            assert key == advice.key or key.split(".")[1] in message or (isinstance(value, str) and value in message)
        assert left({**wrong, **cure}, advice.ranks) == {}, f"{message}: tried {cure}"
