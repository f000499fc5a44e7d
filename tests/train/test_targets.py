"""Conversations in a step: labels that are not targets change nothing, and packing changes nothing."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tools.prepare.test_conversation_writer import LENGTH, TALKS, settings, write_lines, written
from torchllm.config import Model
from torchllm.data.batch import Batch
from torchllm.data.corpus import Corpus, Window
from torchllm.data.packing import PackedBatches, pack_windows
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.initialize import initialize

CPU = torch.device("cpu")
SIZES = Model(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=512, initial_std=0.2)


class Gradients(NamedTuple):
    loss: Tensor
    of_parameter: dict[str, Tensor]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("talks")
    return written(folder / "corpus", write_lines(folder / "talks.jsonl", TALKS), settings(folder))


@pytest.fixture(scope="module")
def model() -> Decoder:
    with torch.device("meta"):
        made = build_model(SIZES)
    initialize([made], SIZES, CPU, seed=1)
    return made


def batch_of(*windows: Window) -> Batch:
    pieces = [range(len(windows[0].ids) - 1)]
    values = torch.from_numpy(pack_windows(windows, document_mask=True))
    (batch,) = PackedBatches(values, 1, len(windows), pieces, document_mask=True, has_targets=True).unpack(CPU)
    return batch


def gradients_of(model: Decoder, batch: Batch) -> Gradients:
    """Of the sum of the loss."""
    model.zero_grad()
    loss = model(batch.tokens, batch.positions, labels=batch.labels, document_ids=batch.document_ids)
    loss.backward()
    named = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Gradients(loss.detach(), named)


def test_a_label_counts_if_and_only_if_it_is_a_target(corpus: Corpus, model: Decoder) -> None:
    """The label alone is changed: the tokens that the model reads stay as they are."""
    window = corpus.window("train", 0, LENGTH)
    assert window.targets is not None
    batch = batch_of(window)
    expected = gradients_of(model, batch)
    labels = range(1, LENGTH)
    targets = [index for index in labels if window.targets[index]]
    others = [index for index in labels if not window.targets[index]]
    assert len(targets) > 10
    assert len(others) > 10
    for index in [*targets[::4], *others[::8]]:
        ids = window.ids.copy()
        ids[index] = (int(ids[index]) + 1) % SIZES.vocab
        changed = batch_of(window._replace(ids=ids))._replace(tokens=batch.tokens)
        actual = gradients_of(model, changed)
        is_same = torch.equal(actual.loss, expected.loss)
        same = [torch.equal(actual.of_parameter[name], gradient) for name, gradient in expected.of_parameter.items()]
        if window.targets[index]:
            assert not is_same, index
            assert not any(same), index
        else:
            assert is_same, index
            assert all(same), index


def test_packed_examples_train_as_each_alone(corpus: Corpus, model: Decoder) -> None:
    """Loss and gradients of sequences are the sums over their examples."""
    windows = [corpus.window("train", number, LENGTH) for number in range(2)]
    packed = gradients_of(model, batch_of(*windows))
    loss = torch.zeros(())
    sums = {name: torch.zeros_like(gradient) for name, gradient in packed.of_parameter.items()}
    for window in windows:
        assert window.targets is not None
        assert len(window.begins) >= 3
        for start, stop in zip(window.begins[:-1], window.begins[1:], strict=True):
            ids, targets = window.ids[start:stop], window.targets[start:stop]
            filler = np.zeros(1, dtype=ids.dtype), np.zeros(1, dtype=np.bool_)
            alone = Window(
                np.concatenate([ids, filler[0]]), np.array([0, len(ids)]), targets=np.concatenate([targets, filler[1]])
            )
            own = gradients_of(model, batch_of(alone))
            loss += own.loss
            for name, gradient in own.of_parameter.items():
                sums[name] += gradient
    torch.testing.assert_close(packed.loss, loss, rtol=1e-5, atol=0)
    for name, gradient in packed.of_parameter.items():
        scale = float(gradient.abs().max())
        assert float((gradient - sums[name]).abs().max()) <= 1e-5 * scale, name
