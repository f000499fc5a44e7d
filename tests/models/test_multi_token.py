"""Multi-token prediction in one process, by its definition. The logits of transformers: tests/tools/hub."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.models.decoder import Decoder, build_model
from torchllm.models.head import IGNORED, take_sum
from torchllm.parallel.initialize import initialize

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 50, "initial_std": 0.1}
DEPTH, WEIGHT, LENGTH = 2, 0.6, 12
IDS = torch.randint(50, (3, LENGTH + 1 + DEPTH), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(LENGTH).expand(3, LENGTH)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and the tokens and labels ahead; some are no labels."""
    ids_at = [IDS[:, shift : shift + LENGTH] for shift in range(DEPTH + 2)]
    labels = [ids.where(torch.arange(LENGTH) % (3 + shift) > 0, IGNORED) for shift, ids in enumerate(ids_at)]
    ahead = torch.stack([torch.stack(ids_at[1 : 1 + DEPTH], 1), torch.stack(labels[2:], 1)], 1)
    return ids_at[0], labels[1], ahead


def built(depth: int = DEPTH, chunk: int = 0, z_loss: float = 0.0, **parts: object) -> Decoder:
    model = Model(**SIZES, **parts, mtp_depth=depth, mtp_weight=WEIGHT)  # type: ignore[arg-type]  # keys of Model
    decoder = build_model(model, chunk, z_loss)
    initialize([decoder], model, CPU, seed=0)
    return decoder


def gradients_by_definition(decoder: Decoder, z_loss: float) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss of the tokens ahead, and the gradients of the loss plus that, from the states of all depths.

    Every operation is written out.
    """
    tokens, labels, ahead = batch()
    assert decoder.embed_tokens is not None
    assert decoder.norm is not None
    assert decoder.lm_head is not None
    inputs = decoder.inputs_of_blocks(POSITIONS, None, 0)
    x = decoder.embed_tokens(tokens)
    for index in range(decoder.model.layers):
        x = decoder.layers[str(index)](x, *inputs[index])
    states = [decoder.norm(x)]
    for depth in range(DEPTH):
        block = decoder.layers[str(decoder.model.layers + depth)]
        embeddings = decoder.embed_tokens(ahead[:, 0, depth])
        joined = F.linear(torch.cat((block.enorm(embeddings), block.hnorm(states[-1])), -1), block.eh_proj.weight)
        plain = super(type(block).__mro__[1], block).forward  # of the block's own class
        states.append(block.post_norm(plain(joined, *inputs[-1])))
    losses = []
    for state, targets in zip(states, (labels, *ahead[:, 1].unbind(1)), strict=True):
        logits = F.linear(state, decoder.lm_head.weight).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        squares = logits.logsumexp(-1).square()[targets.flatten() != IGNORED].sum()
        losses.append((loss, loss + z_loss * squares))
    objective = losses[0][1] + WEIGHT / DEPTH * sum(of_depth for _, of_depth in losses[1:])
    objective.backward()
    found = {name: parameter.grad.clone() for name, parameter in decoder.named_parameters()}
    return sum(loss.item() for loss, _ in losses[1:]) / DEPTH, found


@pytest.mark.parametrize(("chunk", "z_loss"), [(0, 0.0), (7, 0.0), (0, 0.02), (7, 0.02)])
def test_gradients_are_of_the_loss_and_the_weighted_mean_of_the_depths(chunk: int, z_loss: float) -> None:
    tokens, labels, ahead = batch()
    decoder = built(chunk=chunk, z_loss=z_loss)
    mean, expected = gradients_by_definition(built(), z_loss)
    loss = decoder(tokens, POSITIONS, None, labels, 0, ahead)
    loss.backward()
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    without = built(depth=0, chunk=chunk, z_loss=z_loss)(tokens, POSITIONS, None, labels)
    assert loss.item() == pytest.approx(without.item(), rel=1e-6)  # chunks may end at other tokens
    taken = take_sum([decoder], "ahead")
    assert taken is not None
    assert taken.item() == pytest.approx(mean, rel=1e-5)
    assert take_sum([decoder], "ahead") is None  # it is taken


def test_an_evaluation_has_the_same_loss_and_leaves_no_sum() -> None:
    tokens, labels, ahead = batch()
    decoder = built()
    with torch.no_grad():
        loss = decoder(tokens, POSITIONS, None, labels, 0, ahead)
    assert loss.item() == decoder(tokens, POSITIONS, None, labels, 0, ahead).item()
    take_sum([decoder], "ahead")
    with torch.no_grad():
        decoder(tokens, POSITIONS, None, labels, 0, ahead)
    assert take_sum([decoder], "ahead") is None


def test_a_pass_without_labels_is_that_of_the_model_without_the_blocks() -> None:
    tokens, _, _ = batch()
    assert torch.equal(built()(tokens, POSITIONS), built(depth=0)(tokens, POSITIONS))


def test_batches_without_tokens_ahead_are_refused() -> None:
    tokens, labels, _ = batch()
    with pytest.raises(UserError, match=r"model\.mtp_depth: the batches have no tokens further ahead"):
        built()(tokens, POSITIONS, None, labels)
