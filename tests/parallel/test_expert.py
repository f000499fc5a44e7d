"""Expert parallelism: the layouts that it meets, what ranks hold, what is under way while shared experts compute."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parity import Settings, Trainer, build, compare, decided, reference_of, tiny, train_config, whole_gradients
from tests.workers import run
from torchllm.config import Config
from torchllm.models.experts import ExpertRows, Experts, Router, Routing, SharedExperts, in_chunks
from torchllm.parallel import expert
from torchllm.parallel.expert import ExchangeDispatch, routed_experts
from torchllm.tools.dry_run.trace import even_splits
from torchllm.tools.proof.compare import GRADIENT_ERROR
from torchllm.tools.proof.record import Trained

EXPERTS: Settings = {
    "model.experts": 8,
    "model.top_k": 2,
    "model.expert_ffn": 32,
    "model.shared_experts": 1,
    "model.dense_layers": 1,
}
FSDP2: Settings = {"parallel.dp_shard": 2}
SEQUENCE_PARALLEL: Settings = {"parallel.tp": 2, "parallel.sequence_parallel": True}
TWO: Settings = {"model.layers": 2, "training.micro_batch_size": 2}
"""the dense block, and one with experts: many ranks with tp need seconds per block, and half as many micro batches"""


def calls_of_a_step(settings: Settings) -> list[str]:
    """Return the order in which a block's forward and backward send rows and compute the shared experts."""
    calls: list[str] = []
    begin, end = expert.begin_all_to_all, expert.end_all_to_all

    def noting_begin(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        calls.append("begin" if x.is_floating_point() else "begin counts")
        return begin(x, sent, received, group)

    def noting_end(x: Tensor) -> Tensor:
        calls.append("end" if x.is_floating_point() else "end counts")
        return end(x)

    def note_product(name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        calls.append(name)
        output.register_hook(lambda gradient: calls.append(f"{name} backward"))

    with mock.patch.multiple(expert, begin_all_to_all=noting_begin, end_all_to_all=noting_end):
        _, (stage,) = build(tiny({**EXPERTS, "model.layers": 1, "model.dense_layers": 0, **settings}))
        for shared in (module for module in stage.modules() if isinstance(module, SharedExperts)):
            for name in ("gate", "up", "down"):
                shared.get_submodule(f"{name}_proj").register_forward_hook(partial(note_product, name))
        (experts,) = (module for module in stage.modules() if isinstance(module, Experts))
        gated = experts.gated

        def noting_gated(gate: Tensor, up: Tensor) -> Tensor:
            out = gated(gate, up)
            note_product("experts", experts, gate, out)
            return out

        if settings.get("parallel.expert_chunks", 1) > 1:
            experts.gated = noting_gated
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        stage(tokens, torch.arange(8).unsqueeze(0), None, tokens).backward()
    return calls


@pytest.mark.parametrize("settings", [{**FSDP2, "parallel.ep": 2}, {**SEQUENCE_PARALLEL, "parallel.ep": 2}])
def test_the_shared_experts_compute_while_rows_are_under_way_there_and_back(settings: Settings) -> None:
    counts = ["begin counts", "end counts"]
    forward = [*counts, "begin", "gate", "end", "begin", "up", "down", "end"]
    backward = ["begin", "down backward", "up backward", "end", "begin", "gate backward", "end"]
    assert run(calls_of_a_step, 2, settings) == [forward + backward] * 2


def test_one_chunk_is_sent_while_the_experts_compute_another() -> None:
    """Of each pass one chunk's way there is not overlapped, and another's way back."""
    counts = ["begin counts", "end counts"]
    forward = [*counts, "begin", *counts, "begin", "end", "experts", "begin", "end", "experts", "begin", "end", "end"]
    backward = ["begin", "begin", "end", "experts backward", "begin", "end", "experts backward", "begin", "end", "end"]
    settings = {**FSDP2, "parallel.ep": 2, "model.shared_experts": 0, "parallel.expert_chunks": 2}
    assert run(calls_of_a_step, 2, settings) == [forward + backward] * 2


@pytest.mark.parametrize("settings", [{"parallel.ep": 2}, {"parallel.ep": 2, "recompute.mode": "full"}])
def test_chunks_of_other_sizes_train_the_same_model(settings: Settings) -> None:
    """Of 32 tokens in five chunks: two have one more than the others."""
    config = decided(tiny({**EXPERTS, **TWO, **FSDP2, **settings, "parallel.expert_chunks": 5}), ragged=True)
    trained = run(train_config, 2, config, ragged=True)[0]
    compare(trained, reference_of(config, ragged=True))


def test_chunks_have_all_tokens_in_their_order() -> None:
    tokens, experts = torch.arange(8).view(4, 2), torch.arange(4).view(4, 1)
    routing = Routing(experts, experts.float())
    for count in (1, 2, 3, 6):  # six chunks of four tokens: two have none
        chunks = in_chunks(tokens, routing, count)
        assert len(chunks) == count
        assert torch.equal(torch.cat([tokens for tokens, _ in chunks]), tokens)
        for of_chunk in zip(*(routing for _, routing in chunks), strict=True):
            assert torch.equal(torch.cat(of_chunk).long(), experts)


def dispatch_of_zeros() -> mock.Mock:
    """Return a dispatch that brings each of 4 experts one row of zeros: stands for a library's kernels."""
    dispatch = mock.Mock()
    dispatch.send.side_effect = lambda tokens, routing: routing
    dispatch.receive.return_value = ExpertRows(torch.zeros(1, 64), torch.tensor([1] * 4, dtype=torch.int32))
    dispatch.send_back.side_effect = lambda results, sent: results
    dispatch.receive_back.side_effect = lambda returned, sent: returned.expand(*sent.experts.shape, -1)
    return dispatch


def out_of_another_dispatch(settings: Settings) -> float:
    """Return the largest number that the experts add with a dispatch that brings them zeros."""
    _, (stage,) = build(tiny({**EXPERTS, "model.shared_experts": 0, **settings}))
    largest = 0.0

    def note(module: object, inputs: object, output: Tensor) -> None:
        nonlocal largest
        largest = max(largest, output.abs().max().item())

    for block in list(stage.layers.values())[1:]:
        block.get_submodule("mlp").register_forward_hook(note)
    for routed in routed_experts(stage):
        assert isinstance(routed.dispatch, ExchangeDispatch)
        routed.dispatch = dispatch_of_zeros()
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    stage(tokens, torch.arange(8).unsqueeze(0), None, tokens)
    return largest


def test_the_dispatch_can_be_replaced() -> None:
    assert run(out_of_another_dispatch, 2, {**FSDP2, "parallel.ep": 2}) == [0.0, 0.0]


def choose_first(router: Router, inputs: object, routing: Routing) -> Routing:
    """Forward hook: all tokens use the first experts."""
    first = torch.arange(routing.experts.shape[1])
    return routing._replace(experts=first.expand_as(routing.experts).contiguous())


MANY: Settings = {"model.experts": 48, "model.expert_ffn": 8, "model.layers": 2}


def whole_gradients_of_experts(settings: Settings) -> dict[str, Any]:
    """Return the gradients of a step in which all tokens use the first two of many experts, on rank 0."""
    trainer = Trainer(tiny({**EXPERTS, **MANY, **settings}))
    (stage,) = trainer.stages
    for routed in routed_experts(stage):
        routed.router.register_forward_hook(choose_first)
    trainer.forward_backward(trainer.batches(1), torch.tensor(1 / 64))
    return whole_gradients(trainer.stages)


def test_ranks_of_whose_many_experts_none_is_chosen() -> None:
    (expected,) = run(whole_gradients_of_experts, 1, {})
    found = run(whole_gradients_of_experts, 2, {**FSDP2, "parallel.ep": 2})[0]  # 24 on each rank
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert abs(found[name] - gradient).max() <= GRADIENT_ERROR * abs(gradient).max(), name
        if ".experts." in name:
            assert gradient[:2].any(axis=(1, 2)).all()
            assert not found[name][2:].any()


def trained_twice(config: Config) -> list[Trained | None]:
    """Train twice as run.deterministic does, which also fills all memory that is not initialized with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        return [train_config(config, ragged=True) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_kernels_train_the_same_model_and_the_same_bits_again() -> None:
    layout: Settings = {**FSDP2, "parallel.ep": 2, "model.balance_loss": "sequence"}
    config = decided(tiny({**EXPERTS, **TWO, **layout}), ragged=True)
    first, second = run(trained_twice, config.parallel.ranks, config)[0]
    compare(first, reference_of(config, ragged=True))
    assert (first.losses, first.norms) == (second.losses, second.norms)
    for name, weight in first.weights[-1].items():
        assert weight.tobytes() == second.weights[-1][name].tobytes(), name
    for step, gradients in enumerate(first.gradients):
        for name, gradient in gradients.items():
            assert gradient.tobytes() == second.gradients[step][name].tobytes(), name


def test_even_splits_send_all_rows() -> None:
    splits = even_splits(torch.empty(4), torch.empty(4), 10)
    assert splits.sent == splits.received == [3, 3, 2, 2]
