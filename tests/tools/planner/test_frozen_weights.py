"""LoRA as the planner and the dry run see it: frozen weights have two bytes, no gradient and no moments."""

from dataclasses import replace

import pytest

from tests.parity import tiny
from tests.tools.dry_run import apart
from tests.tools.planner.test_predict import LLAMA, case
from torchllm.config import Lora
from torchllm.facts.flops import parameter_count, trained_parameter_count
from torchllm.tools.dry_run.replay import Traced
from torchllm.tools.dry_run.trace import trace
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.frozen_weights import with_frozen_weights
from torchllm.tools.planner.predict import predict

LORA = Lora(rank=16)


def with_updates(plain: Case) -> Case:
    software = with_frozen_weights(plain.software, plain.model, LORA)
    return replace(plain, lora=LORA, software=software)


def test_memory_is_that_of_frozen_weights_and_of_trained_updates() -> None:
    plain = case(dp_shard=8, zero_stage=3, global_batch_size=8)
    memory = predict(with_updates(plain)).memory
    frozen = parameter_count(LLAMA) / 8
    trained = trained_parameter_count(LLAMA, LORA) / 8
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
    nothing = replace(LORA, targets=())
    without_targets = predict(replace(with_updates(plain), lora=nothing))
    assert without_targets.terms["matmul"] < updated.terms["matmul"]


def test_without_it_nothing_changes() -> None:
    plain = case()
    software = with_frozen_weights(plain.software, plain.model, Lora())
    assert software == plain.software


def traced(rank: int) -> dict[str, int]:
    """Bytes of parameters and moments, in a step of fake tensors on one of two ranks that share the weights."""
    import torch

    config = tiny({"lora.rank": rank, "parallel.dp_shard": 2})
    step: Traced = trace(config, torch.bfloat16, 0, 2, 1, 0)
    begin = step.spans[0]
    return {purpose: begin.end[purpose] for purpose in ("parameters", "optimizer")}


def test_the_dry_run_holds_what_the_planner_counts() -> None:
    model = tiny({}).model
    frozen = parameter_count(model) / 2
    trained = trained_parameter_count(model, Lora(rank=4)) / 2
    traced_bytes = apart(traced, 4)
    assert traced_bytes["parameters"] == pytest.approx(2 * frozen + 4 * trained, rel=0.01)
    moments = 8 * trained
    step_counters = 4 * 2 * 7 * model.layers * 4
    assert moments <= traced_bytes["optimizer"] <= 1.02 * moments + step_counters
