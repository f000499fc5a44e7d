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


def test_loss_is_the_sum_over_labels_that_are_not_ignored() -> None:
    hidden, labels = hidden_and_labels()
    module = head(0)
    weight = module.weight.detach().double()
    logits = (hidden.double() @ weight.T).flatten(0, 1)
    expected = 0.0
    for row, label in zip(logits, labels.flatten().tolist(), strict=True):
        if label != IGNORED:
            expected += float(row.logsumexp(0) - row[label])
    loss = module(hidden, labels)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, TOKENS + 5])
def test_chunks_change_neither_loss_nor_gradients(chunk: int) -> None:
    _, labels = hidden_and_labels()
    chunked = loss_and_gradients(chunk, labels)
    whole = loss_and_gradients(0, labels)
    for got, expected in zip(chunked, whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=2e-6)  # the same sums in another order


@pytest.mark.parametrize("chunk", [0, 7])
def test_no_targets_give_no_loss_and_no_gradient(chunk: int) -> None:
    no_targets = torch.full((2, TOKENS // 2), IGNORED)
    for value in loss_and_gradients(chunk, no_targets):
        assert torch.equal(value, torch.zeros_like(value))  # zero, not nan


@pytest.mark.parametrize("chunk", [0, 7])
def test_at_most_a_chunk_of_logits_exists_and_none_is_saved(chunk: int) -> None:
    module = head(chunk)
    hidden, labels = hidden_and_labels()
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
    saved_logits = [shape for shape in saved if shape[-1:] == (MODEL.vocab,)]
    if chunk:
        assert sorted(rows) == [1, 1, 7, 7, 7, 7, 7, 7]  # each chunk twice: again in the backward pass
        assert saved_logits == []
    else:
        assert rows == [TOKENS]
        assert (TOKENS, MODEL.vocab) in saved_logits


@pytest.mark.parametrize("chunk", [0, 7])
def test_without_labels_it_returns_logits(chunk: int) -> None:
    module = head(chunk)
    hidden, _ = hidden_and_labels()
    torch.testing.assert_close(module(hidden), hidden @ module.weight.T)


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
