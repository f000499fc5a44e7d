"""Settings that free memory, by the planner's figures."""

from dataclasses import replace

import pytest

from torchllm.config import Cluster, Config, Model, Parallel, Recompute, Training
from torchllm.config.checks import problems
from torchllm.planner.search.auto import planned
from torchllm.planner.search.explain import GIB
from torchllm.planner.search.savers import savers

LLAMA = Config(
    cluster=Cluster("dgx_a100"),
    model=Model(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000),
    training=Training(micro_batch_size=4, global_batch_size=64, sequence_length=2048),
    parallel=Parallel(dp_shard=8),
)


def test_they_free_what_they_say() -> None:
    found = savers(LLAMA, count=20)
    assert [saver.freed for saver in found] == sorted((saver.freed for saver in found), reverse=True)
    full = next(saver for saver in found if saver.setting == "--recompute.mode=full")
    before, after = planned(LLAMA), planned(replace(LLAMA, recompute=Recompute("full")))
    assert before is not None
    assert after is not None
    assert full.freed == before.memory.total - after.memory.total > 10 * GIB
    assert full.slower == after.step / before.step > 1.1
    assert str(full).startswith("--recompute.mode=full frees ")
    assert {saver.setting for saver in found} >= {
        "--training.micro_batch_size=2",
        "--parallel.tp=2 --parallel.dp_shard=4",
    }


def test_three_that_free_something_and_that_the_config_accepts() -> None:
    assert len(savers(LLAMA)) == 3
    odd = replace(LLAMA, model=replace(LLAMA.model, heads=31, hidden=31 * 128))  # tp 2 does not divide them
    assert not [saver for saver in savers(odd, count=20) if "tp" in saver.setting]
    thrifty = replace(LLAMA, recompute=Recompute("full"), training=replace(LLAMA.training, micro_batch_size=1))
    assert not [
        saver for saver in savers(thrifty, count=20) if "recompute" in saver.setting or "micro" in saver.setting
    ]


def test_of_an_unknown_machine_nothing_is_known() -> None:
    assert savers(replace(LLAMA, cluster=Cluster(), parallel=Parallel(dp_shard=4))) == []  # this_cpu is of eight ranks


@pytest.mark.parametrize("steps", ["10", "10:", "0:3", "3:3", "a:b", "5:4"])
def test_wrong_profile_steps(steps: str) -> None:
    config = replace(LLAMA, metrics=replace(LLAMA.metrics, profile_steps=steps))
    assert [problem.key for problem in problems(config, 8)] == ["metrics.profile_steps"]
