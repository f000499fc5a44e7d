"""Cores with a short reach over parts of sequences are the same over whole ones; what is sent, and what is refused."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.models.test_short_reach import Convolution
from tests.parallel.test_delta_sequence import Messages, of_rank
from tests.parallel.test_ring import DOCUMENTS, LENGTH
from tests.workers import run
from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.parallel.context import SharedSequences
from torchllm.parallel.short_reach import share_short_reach

EXACT = 1e-13  # in float64: the same sums in another order
BATCH, CHANNELS = 2, 12
Case = tuple[int, str, tuple[int, ...]]
CASES: list[Case] = [
    (2, "none", ()),
    (2, "a long one", (3,)),
    (1, "one and many", ()),
    (6, "none", (2,)),  # with 4 ranks a whole piece
    (6, "two", ()),
]
"""reach, documents, further dimensions of a channel"""


def whole_inputs(reach: int, beyond: tuple[int, ...]) -> list[Tensor]:
    """Return x, weights and the gradient of the results."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, LENGTH, CHANNELS, *beyond), (CHANNELS, reach + 1), (BATCH, LENGTH, CHANNELS, *beyond)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def forward_backward(core: Any, inputs: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    """Return the results and the gradients of x and of the weights."""
    x, weight, d_out = inputs[0].clone().requires_grad_(), inputs[1].clone().requires_grad_(), inputs[2]
    out = core(x, core.mask(documents, 0), weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), d_out)]


def in_parts(method: str, cases: list[Case]) -> list[tuple[list[Tensor], int]]:
    """Return what `forward_backward` does of this rank's part, and the numbers that it sends, of each case."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    results = []
    for reach, name, beyond in cases:
        x, weight, d_out = whole_inputs(reach, beyond)
        documents = DOCUMENTS[name]
        if documents is not None:
            documents = of_rank(method, documents, rank, ranks)
        mixer: Any = SimpleNamespace(core=Convolution(reach))
        share_short_reach(mixer, Model(), SharedSequences(mesh, method, torch.float64, LENGTH))
        inputs = [of_rank(method, x, rank, ranks), weight, of_rank(method, d_out, rank, ranks)]
        with Messages() as messages:
            result = forward_backward(mixer.core, inputs, documents)
        results.append((result, sum(numbers for _, numbers in messages.sent)))
    return results


@pytest.mark.parametrize(("method", "ranks"), [("ring", 2), ("ring", 4), ("ulysses", 3)])
def test_parts_of_sequences_are_whole_sequences(method: str, ranks: int) -> None:
    """Tokens of the wrong neighbor, or of another document, would be found here."""
    of_ranks = run(in_parts, ranks, method, CASES)
    for index, (reach, name, beyond) in enumerate(CASES):
        out, d_x, d_weight = forward_backward(Convolution(reach), whole_inputs(reach, beyond), DOCUMENTS[name])
        results = [of_rank_[index][0] for of_rank_ in of_ranks]
        for rank, (part, d_part, _) in enumerate(results):
            for result, whole in ((part, out), (d_part, d_x)):
                expected = of_rank(method, whole, rank, ranks)
                torch.testing.assert_close(result, expected, rtol=0, atol=EXACT, msg=f"{reach} {name}, rank {rank}")
        d_weights = torch.stack([d_weight_part for *_, d_weight_part in results]).sum(0)
        torch.testing.assert_close(d_weights, d_weight, rtol=0, atol=100 * EXACT)  # sums over all tokens


def test_a_ring_sends_the_tokens_that_are_reached() -> None:
    """Of two ranks each sends the tokens of one piece, and gradients back; the middle of the sequence is not sent."""
    assert [of_rank_[0][1] for of_rank_ in run(in_parts, 2, "ring", CASES[:1])] == [2 * BATCH * 2 * CHANNELS] * 2


def test_a_reach_over_a_whole_piece_is_refused() -> None:
    shared = SharedSequences(Mock(size=lambda: 4), "ring", torch.float32, 16)
    mixer: Any = SimpleNamespace(core=Convolution(3))
    with pytest.raises(UserError, match=r"a piece of a sequence has 2 tokens, and mixer 'mine' reaches 3 tokens back"):
        share_short_reach(mixer, Model(mixer="mine"), shared)
