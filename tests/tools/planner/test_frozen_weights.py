"""LoRA as the planner and the dry run see it: frozen weights have two bytes, no gradient and no moments."""

from dataclasses import replace

import pytest

from tests.parity import Settings, tiny
from tests.tools.dry_run import apart
from tests.tools.planner.memory_layouts import planned_memory
from tests.tools.planner.test_predict import LLAMA, case
from torchllm.config.schema import Config, Lora
from torchllm.facts.flops import ALL_TRAINED, parameter_count, trained_parameter_count
from torchllm.tools.dry_run.replay import Traced
from torchllm.tools.dry_run.trace import trace
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.frozen_weights import with_frozen_weights
from torchllm.tools.planner.predict import predict

UPDATES = Config(lora=Lora(rank=16)).trained


def with_updates(plain: Case) -> Case:
    software = with_frozen_weights(plain.software, plain.model, UPDATES)
    return replace(plain, trained=UPDATES, software=software)


def test_memory_is_that_of_frozen_weights_and_of_trained_updates() -> None:
    plain = case(dp_shard=8, zero_stage=3, global_batch_size=8)
    memory = predict(with_updates(plain)).memory
    frozen = parameter_count(LLAMA) / 8
    trained = trained_parameter_count(LLAMA, UPDATES) / 8
    assert memory.weights == pytest.approx(2 * frozen + 4 * trained, rel=1e-3)
    assert memory.optimizer == pytest.approx(8 * trained, rel=1e-3)
    plain_memory = predict(plain).memory
    saved = plain_memory.total - memory.total
    assert saved > 0.98 * (12 - 2) * frozen
    assert memory.gradients == 0
    eight_micro_batches = case(dp_shard=8, zero_stage=3, global_batch_size=64)
    assert predict(with_updates(eight_micro_batches)).memory.gradients == pytest.approx(4 * trained)


def test_a_step_lacks_the_gradients_of_weights_but_has_the_updates() -> None:
    plain = case(dp_shard=8, zero_stage=3, global_batch_size=64, tp=2, pp=2)
    whole = predict(plain)
    updated = predict(with_updates(plain))
    assert 0.55 < updated.step / whole.step < 0.95
    assert updated.terms["gradient reduction"] < 0.1 * whole.terms["gradient reduction"]
    nothing = replace(UPDATES, targets=())
    without_targets = predict(replace(with_updates(plain), trained=nothing))
    assert without_targets.terms["matmul"] < updated.terms["matmul"]


def traced(settings: Settings, rank: int) -> dict[str, int]:
    """Bytes of parameters and moments, in a step of fake tensors on one of two ranks."""
    import torch

    config = tiny(settings)
    step: Traced = trace(config, torch.bfloat16, rank, 2, config.parallel.pp, rank)
    _, *actions, _ = step.spans
    assert len(actions) == len(step.keys)  # a stage that trains nothing has backwards in the schedule
    begin = step.spans[0]
    return {purpose: begin.end[purpose] for purpose in ("parameters", "optimizer")}


FROZEN: Settings = {"parallel.pp": 2, "model.frozen": r"embed_tokens.*|layers\.[01]\..*"}


@pytest.mark.parametrize(
    ("settings", "rank", "tensors_of_block"),
    [({"lora.rank": 4, "parallel.dp_shard": 2}, 0, 14), (FROZEN, 0, 9), (FROZEN, 1, 9)],
    ids=["updates", "first stage", "last stage"],
)
def test_the_dry_run_holds_what_the_planner_counts(settings: Settings, rank: int, tensors_of_block: int) -> None:
    """Frozen parameters have no moments on any stage; each trained tensor has a counter of steps, too."""
    config = tiny(settings)
    memory = planned_memory(config, rank)
    held = apart(traced, settings, rank)
    assert held["parameters"] == pytest.approx(memory.weights, rel=0.01)
    counters = 4 * tensors_of_block * config.model.layers
    assert memory.optimizer <= held["optimizer"] <= 1.01 * memory.optimizer + counters


def test_time_and_gradients_follow_the_trained_share() -> None:
    plain = case(dp_shard=8, zero_stage=3, global_batch_size=64)
    model = replace(plain.model, frozen=r"(?!lm_head|norm).*")
    frozen = replace(plain, model=model, software=with_frozen_weights(plain.software, model, ALL_TRAINED))
    whole, part = predict(plain), predict(frozen)
    share = trained_parameter_count(model, ALL_TRAINED) / parameter_count(model)
    assert part.memory.weights == whole.memory.weights
    assert part.memory.optimizer == pytest.approx(share * whole.memory.optimizer)
    assert part.memory.gradients == pytest.approx(share * whole.memory.gradients)
    assert part.terms["optimizer"] == pytest.approx(share * whole.terms["optimizer"])
    assert part.terms["matmul"] == pytest.approx(2 / 3 * whole.terms["matmul"], rel=0.05)  # of the blocks
