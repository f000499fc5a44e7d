"""Muon against torch's, and every layout against one process, to the bit; what is sent, by counts."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests import parity
from tests.optim.test_optimizer import RATES, give_gradients, train
from tests.parity import Settings, tiny, whole
from tests.workers import run
from torchllm.checkpoint.state import optimizer_tensors
from torchllm.config import Config, Kinds, Model, Optimizer, Parallel
from torchllm.facts.parameters import canonical_name, rule_of
from torchllm.models.decoder import Decoder
from torchllm.optim.muon import Muon, orthogonalize
from torchllm.optim.optimizer import apply_if_finite, build_optimizer
from torchllm.tools.dry_run.trace import fake_ranks
from torchllm.tools.proof.layouts import with_settings

# over 4 ranks, or 2 x 2, the rows of most matrices are not shared evenly
MODEL = Model(
    family="gpt", layers=2, hidden=20, heads=4, kv_heads=2, head_dim=5, ffn=18, vocab=16, max_sequence_length=6
)
EXPERTS = Model(
    layers=2, hidden=20, heads=4, kv_heads=2, head_dim=6, ffn=18, vocab=16, experts=6, expert_ffn=14, dense_layers=1
)
KINDS = replace(
    EXPERTS,
    **{"layers": 3, "dense_layers": 0, "pattern": ("dense", "few", "usual")},
    kinds=Kinds(dense={"experts": 0, "ffn": 26}, few={"heads": 2, "head_dim": 10, "expert_ffn": 8}, usual={}),
)
UNEVEN = replace(EXPERTS, hidden=22)  # over 4 ranks by expert, and the last rank has none
MUON = Optimizer(name="muon", learning_rate=0.1, weight_decay=0.3)

EP2: Settings = {"parallel.ep": 2}
FSDP4: Settings = {"parallel.dp_shard": 4}
ZERO0: Settings = {"parallel.dp_shard": 2, "parallel.zero_stage": 0}
HSDP: Settings = {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}
FSDP_AND_TP: Settings = {"parallel.dp_shard": 2, "parallel.tp": 2}
PIPELINES: Settings = {"parallel.pp": 2, "parallel.dp_shard": 2}
SAME_STEPS: dict[str, tuple[Model, Settings]] = {
    "fsdp2xtp2": (MODEL, FSDP_AND_TP),
    "pp2xfsdp2": (MODEL, PIPELINES),
    "zero0": (MODEL, ZERO0),
    "experts fsdp4+ep2": (EXPERTS, {**FSDP4, **EP2}),  # by expert, and 3 of them along the hidden states
    "a rank without experts": (UNEVEN, FSDP4),
    "kinds fsdp2xtp2": (KINDS, FSDP_AND_TP),
}


def build(settings: Settings, of: Model = MODEL) -> list[Decoder]:
    return parity.build(with_settings(Config(model=of, parallel=Parallel(dp_shard=1)), settings))[1]


def trained(settings: Settings, model: Model, optimizer: Optimizer) -> dict[str, np.ndarray]:
    """Return the whole matrices of this rank's stages and their states, by name."""
    stages = build(settings, model)
    trained_by = train(stages, optimizer)
    tensors = {canonical_name(name): weight for stage in stages for name, weight in stage.named_parameters()}
    tensors = {name: weight for name, weight in tensors.items() if rule_of(name).role == "matrix"}
    for key, state in optimizer_tensors(stages, trained_by).items():
        if key.removeprefix("optimizer.").rpartition(".")[0] in tensors:
            tensors[key] = state
    return {name: whole(tensor) for name, tensor in tensors.items()}


def check_layout(settings: Settings, model: Model, optimizer: Optimizer) -> dict[str, np.ndarray]:
    """Compare a layout with one process, whose tensors are returned, to the bit."""
    (expected,) = run(trained, 1, {}, model, optimizer)
    names: set[str] = set()
    for of_rank in run(trained, tiny(settings).parallel.ranks, settings, model, optimizer):
        names |= of_rank.keys()
        for tensor, value in of_rank.items():
            np.testing.assert_array_equal(value, expected[tensor], tensor)
    assert names == expected.keys()
    return expected


@pytest.mark.parametrize("name", SAME_STEPS)
def test_from_the_same_gradients_a_layout_takes_the_same_step_to_the_bit(name: str) -> None:
    model, settings = SAME_STEPS[name]
    names = check_layout(settings, model, MUON)
    assert any(name.startswith("optimizer.layers.1.mlp") and name.endswith(".momentum_buffer") for name in names)


def test_each_expert_is_a_matrix_of_its_own() -> None:
    stack = torch.randn(3, 24, 10, generator=torch.Generator().manual_seed(3))
    stacked = nn.Parameter(stack.clone())
    single = [nn.Parameter(matrix.clone()) for matrix in stack]
    for parameters in ([stacked], single):
        optimizer = Muon([{"params": parameters, "weight_decay": 0.3, "orthogonalized": True}], MUON)
        for parameter in parameters:
            parameter.grad = parameter.detach().exp()
        apply_if_finite(optimizer, 0.1, torch.tensor(True))
    assert torch.equal(stacked.detach(), torch.stack([parameter.detach() for parameter in single]))


# -- the formulas


def torchs_steps(weight: Tensor, gradients: list[Tensor], adjust_lr_fn: str, nesterov: bool = True) -> Tensor:
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.Muon(
        [parameter], lr=RATES[0], weight_decay=0.3, momentum=0.95, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn
    )
    for step_gradient in gradients:
        parameter.grad = step_gradient
        optimizer.step()
    return parameter.detach()


def test_steps_are_those_of_torch_but_for_its_rounding() -> None:
    adjustments: tuple[Any, ...] = ("original", "match_rms_adamw")
    for shape, adjust_lr_fn in itertools.product([(24, 10), (10, 24), (12, 12)], adjustments):
        generator = torch.Generator().manual_seed(3)
        weight, *gradients = (torch.randn(shape, generator=generator) for _ in range(4))
        parameter = nn.Parameter(weight.clone())
        group = {"params": [parameter], "weight_decay": 0.3, "orthogonalized": True}
        optimizer = Muon([group], replace(MUON, adjust_lr_fn=adjust_lr_fn))
        for step_gradient in gradients:
            parameter.grad = step_gradient
            apply_if_finite(optimizer, RATES[0], torch.tensor(True))
        expected = torchs_steps(weight, gradients, adjust_lr_fn)
        moved = (expected - weight).norm()
        assert (parameter.detach() - expected).norm() < 0.02 * moved  # its iterations are in bfloat16
        wrong = torchs_steps(weight, gradients, adjust_lr_fn, nesterov=False)
        assert (parameter.detach() - wrong).norm() > 0.04 * moved


# -- what is sent


class Sent(NamedTuple):
    """All-to-alls of a rank in one step."""

    calls: int
    messages: int
    """to another rank, of more than nothing"""
    elements: int
    """of these messages"""
    held: int
    """elements of the matrices that the rank holds"""
    owned: int
    """multiplications of one iteration, of the matrices that the rank owns"""


@contextmanager
def counted(sent: list[Sent]) -> Iterator[None]:
    real = dist.all_to_all_single

    def count(output: Tensor, given: Tensor, received: Any, sizes: list[int], group: Any) -> None:
        others = [size for rank, size in enumerate(sizes) if rank != dist.get_rank(group) and size]
        sent.append(Sent(1, len(others), sum(others), 0, 0))
        real(output, given, received, sizes, group=group)

    with mock.patch.object(dist, "all_to_all_single", count):
        yield


def sent_in_a_step(settings: Settings) -> Sent:
    stages = build(settings)
    optimizer = build_optimizer(stages, MUON)
    assert isinstance(optimizer, Muon)
    give_gradients(stages, 0)
    events: list[Sent] = []
    products: list[int] = []

    def noting(matrices: Tensor) -> Tensor:
        count, *shape = matrices.shape
        fewer, other = sorted(shape)
        products.append(count * (2 * fewer * fewer * other + fewer**3))
        return orthogonalize(matrices)

    with counted(events), mock.patch("torchllm.optim.muon.orthogonalize", noting):
        apply_if_finite(optimizer, 0.1, torch.tensor(True))
    held = 0
    for matrices in optimizer.rounds:
        held += sum(owned.parts(owned.parameter).numel() for owned in matrices)
    totals = [sum(counts) for counts in zip(*events, strict=True)] or [0] * 5
    return Sent(totals[0], totals[1], totals[2], held, sum(products))


def test_a_rank_sends_its_shards_once_there_and_once_back_per_process_group() -> None:
    matrices = 12  # of two blocks
    for settings, groups in ((FSDP4, 1), (FSDP_AND_TP, 2), (HSDP, 1), ({**FSDP4, "parallel.zero_stage": 0}, 0)):
        of_ranks: list[Sent] = run(sent_in_a_step, 4, settings)
        sharing = 2 if "parallel.dp_replicate" in settings else 4
        rounds = matrices // sharing
        for sent in of_ranks:
            assert sent.calls == 2 * groups * rounds
        held = sum(sent.held for sent in of_ranks)
        # there and back, less what stays where it is
        assert sum(sent.elements for sent in of_ranks) <= 2 * groups * held
        if groups == 1:
            assert sum(sent.elements for sent in of_ranks) == pytest.approx(2 * held * (sharing - 1) / sharing, rel=0.2)
        if groups:
            owned = [sent.owned for sent in of_ranks]
            assert max(owned) <= 1.2 * sum(owned) / len(owned)  # the work is shared


def sent_by_first_rank(ranks: int) -> Sent:
    """Count what the first of many ranks sends in a step for 16 matrices, under a process group that sends nothing."""
    with fake_ranks(0, ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        parameters = []
        for _ in range(16):
            parameter = nn.Parameter(DTensor.from_local(torch.ones(256 // ranks, 8), mesh, [Shard(0)], run_check=False))
            parameter.grad = torch.ones_like(parameter)
            parameters.append(parameter)
        optimizer = Muon([{"params": parameters, "weight_decay": 0.0, "orthogonalized": True}], MUON)
        events: list[Sent] = []
        with counted(events):
            apply_if_finite(optimizer, 0.1, torch.tensor(True))
    return Sent(*(sum(counts) for counts in zip(*events, strict=True)))


def test_what_a_rank_sends_does_not_grow_with_the_ranks() -> None:
    """Of 16 matrices the first rank owns one, on 64 ranks as on 16."""
    few, many = sent_by_first_rank(16), sent_by_first_rank(64)
    assert few.calls == many.calls == 2
    assert few.messages == 15 + 15  # to the owners; of its own matrix, to all others
    assert many.messages == 15 + 63
    assert many.elements <= 1.1 * few.elements
