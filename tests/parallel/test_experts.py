"""Mixtures of experts under every technique. The lattice draws them too, and all of their settings."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import SAC_IGNORED_OPS

from tests.checkpoint.test_resume_layouts import hop_over, train
from tests.parity import CPU, FEW, Settings, Trainer, build, check, check_bfloat16, tiny
from tests.workers import run
from torchllm.facts.parameters import canonical_name
from torchllm.models.decoder import build_model
from torchllm.models.experts import Router, Routing
from torchllm.parallel.initialize import initialize
from torchllm.tools.proof.forced_routing import routers_of
from torchllm.tools.proof.layouts import describe_layout

exhaustive = pytest.mark.exhaustive
EXPERTS: Settings = {
    "model.experts": 6,
    "model.top_k": 2,
    "model.expert_ffn": 32,
    "model.shared_experts": 1,
    "model.shared_gate": True,
    "model.dense_layers": 1,
}
BIAS: Settings = {"model.router_bias": True, "model.router_bias_rate": 0.03, "model.router_score": "sigmoid"}
"""the rate is a share of the scores' standard deviation, so that tokens go elsewhere in the next step"""
FSDP2: Settings = {"parallel.dp_shard": 2}
TWO: Settings = {"model.layers": 2, "training.micro_batch_size": 2}
"""the dense block, and one with experts; half of the micro batches"""
TENSOR: Settings = {**TWO, "parallel.tp": 2, "parallel.sequence_parallel": True, "recompute.mode": "selective"}
# a rank's first stage is freed between the forward and the backward of its later micro batches
PIPELINE: Settings = {
    **{"parallel.pp": 2, "parallel.schedule": "Interleaved1F1B", "recompute.mode": "selective"},
    "training.micro_batch_size": 1,
}


BALANCED: dict[str, Settings] = {
    "bias": BIAS,
    "sequence": {"model.balance_loss": "sequence", "model.balance_weight": 1.0, "model.router_z_loss": 0.3},
    "global": {"model.balance_loss": "global", "model.balance_weight": 1.0, "model.router_score": "sigmoid"},
}
"""of weights with which a penalty is the larger part of a router's gradient"""


@pytest.mark.parametrize(
    ("layout", "balance"),
    [
        ({**BIAS, **TENSOR}, "sequence"),
        ({**TWO, "parallel.tp": 2}, "bias"),  # without sequence parallelism other gradients are sums over tp
        (PIPELINE, "global"),
        pytest.param({**FSDP2, "model.router_dtype": "compute", "parallel.ep": 2}, "sequence", marks=exhaustive),
    ],
)
def test_gradients_are_those_of_one_process(layout: Settings, balance: str) -> None:
    """The lattice has other layouts."""
    check({**FEW, **EXPERTS, **BALANCED[balance], **layout}, ragged=True)


def local_shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Return what this rank holds of the first sparse block's experts, by the name of the matrix."""
    _, (stage,) = build(tiny({**EXPERTS, **settings}))
    shapes = {}
    for name, parameter in stage.layers["1"].named_parameters():
        assert isinstance(parameter, DTensor)
        *_, owner, matrix = canonical_name(name).split(".")
        if owner == "experts":
            shapes[matrix] = tuple(parameter.to_local().shape)
    return shapes


@pytest.mark.parametrize(
    ("ranks", "settings", "gate", "down"),
    [
        (2, FSDP2, (3, 32, 64), (3, 64, 32)),  # by expert
        (4, {"parallel.dp_shard": 4}, (6, 32, 16), (6, 16, 32)),  # 6 experts are not 4 equal parts
        (4, {**FSDP2, "parallel.tp": 2}, (3, 16, 64), (3, 64, 16)),
        (4, {**FSDP2, "parallel.tp": 2, "parallel.ep": 4, "model.experts": 8}, (2, 32, 64), (2, 64, 32)),
        # 4 ranks share 2 experts, 2 of them one by hidden states
        (4, {"parallel.dp_shard": 4, "parallel.ep": 2, "model.experts": 2}, (1, 32, 32), (1, 32, 32)),
    ],
)
def test_ranks_hold_equal_parts_of_the_experts(
    ranks: int, settings: Settings, gate: tuple[int, ...], down: tuple[int, ...]
) -> None:
    for shapes in run(local_shapes, ranks, settings):
        assert shapes == {"gate_proj": gate, "up_proj": gate, "down_proj": down}


def test_a_checkpoint_resumes_on_layouts_that_cut_the_experts_in_other_ways(tmp_path: Path) -> None:
    layouts: list[Settings] = [
        {**FSDP2, "parallel.ep": 2},
        {"parallel.dp_shard": 4},
        {"parallel.pp": 2, "parallel.tp": 2},
    ]
    common = {**EXPERTS, **TWO, **BALANCED["global"], **BIAS, "training.steps": 3, "data.document_mask": True}
    (uninterrupted,) = run(train, 1, common, range(1, 4), None)
    hops = hop_over(layouts, common, tmp_path)
    assert [hop.losses[0] for hop in hops] == pytest.approx(uninterrupted.losses, rel=1e-5)
    assert hops[0].loaded == uninterrupted.loaded  # initial weights, bit for bit
    assert hops[1].loaded == hops[0].saved != hops[0].loaded
    assert hops[2].loaded == hops[1].saved
    balance = {name: value for name, value in hops[2].saved.items() if "router.bias" in name or "expert_shares" in name}
    assert len(balance) == 2
    assert balance == {name: uninterrupted.saved[name] for name in balance}  # of the same tokens per expert
    assert not balance.items() & hops[2].loaded.items()  # each has changed


def ignored_operations_after_a_step(settings: Settings) -> tuple[int, int]:
    """Return how many operations selective checkpoints ignore, before and after a step's passes."""
    before = len(SAC_IGNORED_OPS)
    _, (stage,) = build(tiny({**EXPERTS, **settings, "recompute.mode": "selective"}))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    stage(tokens, torch.arange(8).unsqueeze(0), None, tokens).backward()
    return before, len(SAC_IGNORED_OPS)


def check_routers_in_bfloat16(settings: Settings) -> int:
    """Check each router of this rank in each pass of a step of a bfloat16 model; return how many passes there were."""
    trainer = Trainer(tiny({**EXPERTS, **settings}), torch.bfloat16)
    config = trainer.config
    whole = build_model(config.model)
    initialize([whole], config.model, CPU, config.run.seed)
    weights = {name: router.weight.detach() for name, router in routers_of([whole]).items()}
    routers = routers_of(trainer.stages)
    passes = 0

    def watch(name: str, router: Router) -> None:
        score, seen = router.score, {}

        def noting_score(logits: Tensor) -> Tensor:
            seen["logits"], seen["scores"] = logits.detach(), score(logits)
            return seen["scores"]

        def check(module: object, inputs: tuple[Tensor], routing: Routing) -> None:
            nonlocal passes
            passes += 1
            assert inputs[0].dtype == torch.bfloat16
            assert {tensor.dtype for tensor in (*seen.values(), routing.weights)} == {torch.float32}
            exact = inputs[0].detach().float() @ weights[name].T
            # a weight or a logit that was rounded to bfloat16 once would be off by up to 2**-9, 2e-3
            assert (seen["logits"] - exact).abs().max() < 1e-5 * exact.abs().max()

        router.score = noting_score
        router.register_forward_hook(check)

    for name, router in routers.items():
        watch(name, router)
    trainer.forward_backward(trainer.batches(1), torch.tensor(1 / 64))
    for router in routers.values():
        assert router.weight.grad is not None
        assert router.weight.grad.dtype == router.weight.dtype == torch.float32
    return passes


@pytest.mark.parametrize(
    "layout", [{}, {**FSDP2, "parallel.zero_stage": 0}, TENSOR, {**FSDP2, "parallel.ep": 2}], ids=describe_layout
)
def test_a_router_is_float32_in_a_bfloat16_model(layout: Settings) -> None:
    assert min(run(check_routers_in_bfloat16, tiny(layout).parallel.ranks, layout)) > 0


def test_bfloat16_adds_no_error_to_that_of_one_process() -> None:
    """With the choices of one process in float32."""
    layout = {**FSDP2, "parallel.tp": 2, "parallel.ep": 2, "parallel.sequence_parallel": True}
    settings: Settings = {"training.micro_batch_size": 2, "recompute.mode": "selective", **BALANCED["sequence"]}
    check_bfloat16(tiny({**EXPERTS, **settings, **layout}), ragged=True)


def test_what_other_selective_checkpoints_see_is_as_it_was() -> None:
    for before, after in run(ignored_operations_after_a_step, 2, FSDP2):
        assert before == after
