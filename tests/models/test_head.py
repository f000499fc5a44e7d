"""The head: sums of losses, ignored labels, chunks that change nothing but memory."""

import pytest
import torch
from torch import Tensor

from torchllm.config import Model
from torchllm.models.head import IGNORED, Head, cross_entropy_sum

MODEL = Model(hidden=16, heads=2, vocab=37)
TOKENS = 22  # of two sequences


def head(chunk: int) -> Head:
    made = Head(MODEL, chunk)
    with torch.no_grad():
        made.weight.copy_(torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(0)))
    return made


def hidden_and_labels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(MODEL.vocab, (2, TOKENS // 2), generator=generator)
    labels[0, :4] = labels[1, -1] = IGNORED
    return torch.randn(2, TOKENS // 2, MODEL.hidden, generator=generator), labels


def loss_and_gradients(chunk: int, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    module, hidden = head(chunk), hidden_and_labels()[0].requires_grad_()
    loss = module(hidden, labels)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, module.weight))


def test_loss_is_the_sum_over_labels_that_are_not_ignored() -> None:
    hidden, labels = hidden_and_labels()
    logits = hidden.double() @ head(0).weight.detach().double().T
    expected = sum(
        float(row.logsumexp(0) - row[label])
        for row, label in zip(logits.flatten(0, 1), labels.flatten().tolist(), strict=True)
        if label != IGNORED
    )
    assert head(0)(hidden, labels).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, TOKENS + 5])
def test_chunks_change_neither_loss_nor_gradients(chunk: int) -> None:
    labels = hidden_and_labels()[1]
    for got, expected in zip(loss_and_gradients(chunk, labels), loss_and_gradients(0, labels), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=2e-6)  # the same sums in another order


@pytest.mark.parametrize("chunk", [0, 7])
def test_no_targets_give_no_loss_and_no_gradient(chunk: int) -> None:
    for value in loss_and_gradients(chunk, torch.full((2, TOKENS // 2), IGNORED)):
        assert torch.equal(value, torch.zeros_like(value))  # zero, not nan


@pytest.mark.parametrize("chunk", [0, 7])
def test_at_most_a_chunk_of_logits_exists_and_none_is_saved(chunk: int) -> None:
    module, (hidden, labels) = head(chunk), hidden_and_labels()
    rows: list[int] = []
    saved: list[tuple[int, ...]] = []

    def recording(logits: Tensor, targets: Tensor) -> Tensor:
        rows.append(len(logits))
        return cross_entropy_sum(logits, targets)

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    module.cross_entropy = recording
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(hidden.requires_grad_(), labels)
    loss.backward()
    assert sorted(rows) == (sorted([7, 7, 7, 1] * 2) if chunk else [TOKENS])  # chunked: again in the backward pass
    assert any(shape == (TOKENS, MODEL.vocab) for shape in saved) == (not chunk)
    assert any(shape[-1:] == (MODEL.vocab,) for shape in saved) == (not chunk)  # nor smaller ones


@pytest.mark.parametrize("chunk", [0, 7])
def test_without_labels_it_returns_logits(chunk: int) -> None:
    module, (hidden, _) = head(chunk), hidden_and_labels()
    torch.testing.assert_close(module(hidden), hidden @ module.weight.T)


@pytest.mark.parametrize("chunk", [0, 7])
def test_loss_of_bfloat16_states_is_summed_in_float32(chunk: int) -> None:
    module, (hidden, labels) = head(chunk).bfloat16(), hidden_and_labels()
    loss = module(hidden.bfloat16(), labels)
    assert loss.dtype == torch.float32
    logits = (hidden.bfloat16() @ module.weight.T).float().flatten(0, 1)
    assert loss.item() == pytest.approx(cross_entropy_sum(logits, labels.flatten()).item(), rel=1e-6)
