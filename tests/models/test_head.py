"""The head: sums of losses, ignored labels, chunks that change nothing but memory."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.operations import Operations
from torchllm.config import Model, Parallel, Training
from torchllm.facts.flops import recomputes_logits
from torchllm.models.head import IGNORED, Head, cross_entropy_sum, take_sum

pytestmark = pytest.mark.quick
MODEL = Model(hidden=16, heads=2, vocab=37)
TOKENS = 22  # of two sequences


def head(chunk: int, z_loss: float = 0.0) -> Head:
    made = Head(MODEL, chunk, z_loss)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(made.weight.shape, generator=generator)
        made.weight.copy_(values)
    return made


def hidden_and_labels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(MODEL.vocab, (2, TOKENS // 2), generator=generator)
    labels[0, :4] = labels[1, -1] = IGNORED
    hidden = torch.randn(2, TOKENS // 2, MODEL.hidden, generator=generator)
    return hidden, labels


def loss_and_gradients(chunk: int, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    module = head(chunk)
    hidden, _ = hidden_and_labels()
    hidden.requires_grad_()
    loss = module(hidden, labels)
    gradients = torch.autograd.grad(loss, (hidden, module.weight))
    return loss.detach(), *gradients


@pytest.mark.parametrize("chunk", [0, 7])
def test_no_targets_give_no_loss_and_no_gradient(chunk: int) -> None:
    no_targets = torch.full((2, TOKENS // 2), IGNORED)
    for value in loss_and_gradients(chunk, no_targets):
        assert torch.equal(value, torch.zeros_like(value))  # zero, not nan


class LogitsOfChunks:
    """A cross entropy that notes the sizes of the logits it gets, and that those of the chunks before are freed."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.storages: list[weakref.ref[Any]] = []

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        assert not self.exist()
        self.rows.append(len(logits))
        self.storages.append(weakref.ref(logits.untyped_storage()))
        return cross_entropy_sum(logits, targets)

    def exist(self) -> bool:
        return any(storage() is not None for storage in self.storages)


@pytest.mark.parametrize("recomputes", [False, True])
def test_at_most_a_chunk_of_logits_exists_and_none_is_saved(recomputes: bool) -> None:
    module = head(7)
    module.recomputes_logits = recomputes
    module.cross_entropy = logits = LogitsOfChunks()
    hidden, labels = hidden_and_labels()
    loss = module(hidden.requires_grad_(), labels)
    assert not logits.exist()
    assert logits.rows == [7, 7, 7, 1]
    loss.backward()
    assert logits.rows[4:] == ([1, 7, 7, 7] if recomputes else [])


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm.out)


@pytest.mark.parametrize(("recomputes", "products"), [(False, 3 * 4), (True, 4 * 4)])
def test_a_chunk_takes_three_products_and_four_with_recomputation(recomputes: bool, products: int) -> None:
    module = head(7)
    module.recomputes_logits = recomputes
    hidden, labels = hidden_and_labels()
    with Operations() as step:
        module(hidden.requires_grad_(), labels).backward()
    with torch.no_grad(), Operations() as evaluation:
        module(hidden, labels)
    assert [sum(map(operations.all.count, PRODUCTS)) for operations in (step, evaluation)] == [products, 4]


def test_chunks_under_autocast_are_the_whole_loss() -> None:
    """The recipe for one device has float32 weights, and products in bfloat16: an error of 2^-9 of each factor."""
    gradients = []
    for chunk in (0, 7):
        module = head(chunk)
        hidden, labels = hidden_and_labels()
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(hidden.requires_grad_(), labels)
        loss.backward()
        assert module.weight.grad is not None
        assert hidden.grad is not None
        gradients.append((module.weight.grad, hidden.grad))
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=float(expected.abs().max()) / 128)


def test_schedules_that_would_keep_many_gradients_recompute() -> None:
    cases: list[tuple[int, int, Any, bool]] = [
        (8, 1, "GPipe", False),
        (8, 2, "1F1B", False),
        (8, 2, "Interleaved1F1B", False),
        (8, 2, "GPipe", True),
        (8, 2, "LoopedBFS", True),
        (8, 2, "ZBVZeroBubble", True),
        (0, 2, "GPipe", False),
    ]
    for chunk, pp, schedule, expected in cases:
        recomputes = recomputes_logits(Training(loss_chunk=chunk), Parallel(pp=pp, schedule=schedule))
        assert recomputes is expected, (chunk, pp, schedule)


@pytest.mark.parametrize("chunk", [0, 7])
def test_padding_changes_neither_loss_nor_logits_and_has_no_gradient(chunk: int) -> None:
    plain = head(chunk, Z_LOSS)
    padded = Head(replace(MODEL, vocab_padding=3), chunk, Z_LOSS)
    with torch.no_grad():
        padded.weight.copy_(torch.cat([plain.weight, torch.full((3, MODEL.hidden), 5.0)]))
    hidden, labels = hidden_and_labels()
    results = []
    for module in (plain, padded):
        leaf = hidden.clone().requires_grad_()
        loss = module(leaf, labels)
        d_hidden, d_weight = torch.autograd.grad(loss, (leaf, module.weight))
        results.append([loss.detach(), d_hidden, d_weight[: MODEL.vocab], module(hidden), module.squares])
        torch.testing.assert_close(module(hidden), hidden @ module.weight[: MODEL.vocab].T)  # logits, without labels
    assert not d_weight[MODEL.vocab :].any()
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("chunk", [0, 7])
def test_loss_of_bfloat16_states_is_summed_in_float32(chunk: int) -> None:
    module = head(chunk).bfloat16()
    hidden, labels = hidden_and_labels()
    hidden = hidden.bfloat16()
    loss = module(hidden, labels)
    assert loss.dtype == torch.float32
    logits = (hidden @ module.weight.T).float().flatten(0, 1)
    expected = cross_entropy_sum(logits, labels.flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


Z_LOSS = 0.03


def loss_with_penalty(weight: Tensor, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the loss and of the squared log-sum-exps, as they are defined, in float64."""
    logits = (hidden @ weight.T).flatten(0, 1)[labels.flatten() != IGNORED]
    targets = labels.flatten()[labels.flatten() != IGNORED]
    log_sum_exp = logits.exp().sum(-1).log()
    loss = (log_sum_exp - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).sum()
    return loss, log_sum_exp.square().sum()


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("chunk", [0, 1, 7, TOKENS, TOKENS + 5])
def test_z_loss_is_in_the_gradients_and_beside_the_loss(chunk: int, recomputes: bool) -> None:
    module = head(chunk, Z_LOSS)
    module.recomputes_logits = recomputes
    hidden, labels = hidden_and_labels()
    hidden.requires_grad_()
    loss = module(hidden, labels)
    torch.testing.assert_close(loss.detach(), head(chunk)(*hidden_and_labels()).detach(), rtol=1e-6, atol=0.0)
    gradients = torch.autograd.grad(3.0 * loss, (hidden, module.weight))

    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = module.weight.detach().double().requires_grad_()
    expected, squares = loss_with_penalty(exact_weight, exact_hidden, labels)
    expected_gradients = torch.autograd.grad(3.0 * (expected + Z_LOSS * squares), (exact_hidden, exact_weight))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for got, exact in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, exact.float(), rtol=1e-5, atol=1e-5)
    stage = nn.Module()
    stage.lm_head = module
    taken = take_sum([nn.Module(), stage], "squares")
    assert taken is not None
    assert taken.item() == pytest.approx(squares.item(), rel=1e-6)
    assert not taken.requires_grad
    assert take_sum([stage], "squares") is None  # they are taken


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("chunk", [0, 7])
def test_logits_are_divided_then_capped_with_and_without_labels(chunk: int, recomputes: bool) -> None:
    module = Head(replace(MODEL, logit_divisor=3.0, logit_softcap=1.5), chunk, Z_LOSS)
    module.load_state_dict(head(chunk).state_dict())
    module.recomputes_logits = recomputes
    hidden, labels = hidden_and_labels()
    hidden.requires_grad_()
    loss = module(hidden, labels)
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = module.weight.detach().double().requires_grad_()
    logits = 1.5 * torch.tanh(exact_hidden @ exact_weight.T / 3.0 / 1.5)
    expected, squares = loss_with_penalty(torch.eye(MODEL.vocab).double(), logits, labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(module(hidden).double(), logits, rtol=0, atol=2e-6)
    exact = torch.autograd.grad(expected + Z_LOSS * squares, (exact_hidden, exact_weight))
    for got, expected_gradient in zip(torch.autograd.grad(loss, (hidden, module.weight)), exact, strict=True):
        torch.testing.assert_close(got.double(), expected_gradient, rtol=1e-5, atol=1e-5)


def test_squares_add_up_over_forwards_with_gradients_alone() -> None:
    module = head(7, Z_LOSS)
    hidden, labels = hidden_and_labels()
    with torch.no_grad():
        without = module(hidden, labels)
    assert module.squares is None
    assert torch.equal(module(hidden, labels).detach(), without)
    once = module.squares
    module(hidden, labels)
    assert torch.equal(module.squares, 2 * once)  # type: ignore[operator]


def test_z_loss_saves_nothing_as_large_as_the_logits_but_what_the_loss_saves() -> None:
    hidden, labels = hidden_and_labels()
    counts = []
    for z_loss in (0.0, Z_LOSS):
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel() if tensor.is_floating_point() else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            head(0, z_loss)(hidden.requires_grad_(), labels)
        counts.append(saved.count(TOKENS * MODEL.vocab))
    assert counts[0] == counts[1] <= 2
