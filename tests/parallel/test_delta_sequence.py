"""Gated DeltaNet over parts of sequences is Gated DeltaNet over whole ones; tests of what is sent and kept."""

from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.operations import Operations
from tests.parallel import tiers
from tests.parallel.test_context import DOCUMENTS as WITH_DOCUMENTS
from tests.parallel.test_context import RING2, ULYSSES2
from tests.parallel.test_ring import DOCUMENTS, LENGTH, part_of
from tests.parity import FEW, check
from tests.workers import run
from torchllm.facts.parts.gated_delta import DeltaSizes
from torchllm.models.parts import delta_rule
from torchllm.models.parts.delta_rule import DeltaCore, HeadWeights, Streams
from torchllm.parallel.delta_sequence import RingDelta, UlyssesDelta
from torchllm.parallel.recompute import save_products_and_rings
from torchllm.tools.proof.layouts import Settings

EXACT = 1e-13  # of the largest element, in float64: the same sums in another order
BATCH, WIDTH, VALUE_WIDTH, KERNEL = 2, 6, 5, 4
METHODS: dict[str, Any] = {"ring": RingDelta, "ulysses": UlyssesDelta}


def sizes(key_heads: int) -> DeltaSizes:
    return DeltaSizes(key_heads, 2 * key_heads, WIDTH, VALUE_WIDTH, KERNEL)


def whole_inputs(key_heads: int) -> list[Tensor]:
    """Return streams, weights and the gradient of the results."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    value_heads = 2 * key_heads
    keys, values = key_heads * WIDTH, value_heads * VALUE_WIDTH
    of_values = random(BATCH, LENGTH, value_heads, VALUE_WIDTH)
    q, k = random(BATCH, LENGTH, key_heads, WIDTH), random(BATCH, LENGTH, key_heads, WIDTH)
    a, b = random(BATCH, LENGTH, value_heads) - 3, random(BATCH, LENGTH, value_heads)
    weights = random(keys, KERNEL), random(keys, KERNEL), random(values, KERNEL), random(value_heads)
    d_out = random(BATCH, LENGTH, value_heads, VALUE_WIDTH)
    return [q, k, of_values, a, b, *weights, random(value_heads), d_out]


def forward_backward(core: Any, inputs: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    """Return the results and the gradients of all inputs, in chunks of 5 tokens."""
    *inputs, d_out = [x.clone() for x in inputs]
    with mock.patch.object(delta_rule, "CHUNK", 5):
        leaves = [x.requires_grad_() for x in inputs]
        out = core(Streams(*leaves[:5]), HeadWeights(*leaves[5:]), core.mask(documents))
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def of_rank(method: str, x: Tensor, rank: int, ranks: int) -> Tensor:
    """Return a rank's tokens: two pieces, or under Ulysses one."""
    return x.chunk(ranks, dim=1)[rank] if method == "ulysses" else part_of(x, rank, ranks)


def in_parts(method: str, key_heads: int) -> list[list[Tensor]]:
    """Return this rank's results with each of `DOCUMENTS`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    *streams_and_weights, d_out = whole_inputs(key_heads)
    streams = [of_rank(method, x, rank, ranks) for x in streams_and_weights[:5]]
    inputs = [*streams, *streams_and_weights[5:], of_rank(method, d_out, rank, ranks)]
    core = METHODS[method](mesh, DeltaCore(sizes(key_heads)))
    parts = [None if ids is None else of_rank(method, ids, rank, ranks) for ids in DOCUMENTS.values()]
    return [forward_backward(core, inputs, documents) for documents in parts]


@pytest.mark.parametrize(("method", "ranks"), [("ring", 2), ("ring", 3), ("ring", 4), ("ulysses", 2), ("ulysses", 3)])
def test_parts_of_sequences_are_whole_sequences(method: str, ranks: int) -> None:
    """A state in the order of the ranks, or a convolution of the wrong neighbor's tokens, would be found here."""
    key_heads = ranks if method == "ulysses" else 1
    core = DeltaCore(sizes(key_heads))
    of_documents = zip(*run(in_parts, ranks, method, key_heads), strict=True)
    for (name, documents), results in zip(DOCUMENTS.items(), of_documents, strict=True):
        out, *gradients = forward_backward(core, whole_inputs(key_heads), documents)
        for rank, (part, *of_inputs) in enumerate(results):
            for result, whole in zip([part, *of_inputs[:5]], [out, *gradients[:5]], strict=True):
                close(result, of_rank(method, whole, rank, ranks), whole, f"{name}, rank {rank}")
        for index, whole in enumerate(gradients[5:], 6):  # of weights: ranks have parts of the sum
            close(torch.stack([result[index] for result in results]).sum(0), whole, whole, f"{name}, weight {index}")


def close(result: Tensor, expected: Tensor, whole: Tensor, name: str) -> None:
    largest = float(whole.abs().max().clamp(min=1.0))
    torch.testing.assert_close(result, expected, rtol=0, atol=EXACT * largest, msg=lambda text: f"{name}: {text}")


class Messages(Operations):
    """Notes the numbers that this rank sends, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func.name():
            case "c10d::send":
                self.sent.append(("next", args[0][0].numel()))
            case "c10d::allgather_":
                self.sent.append(("all", args[1][0].numel()))
            case "_c10d_functional::all_to_all_single":
                self.sent.append(("each", args[0].numel()))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Step(NamedTuple):
    forward: list[tuple[str, int]]
    """numbers sent"""
    backward: list[tuple[str, int]]
    kept: int
    """numbers between the two, beyond the inputs"""
    scans: int
    """computations of all chunks in the backward"""


def step_of(method: str, recompute: bool) -> Step:
    """Return what this rank sends, keeps and computes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    core = METHODS[method](mesh, DeltaCore(sizes(2)))
    *inputs, d_out = whole_inputs(2)
    streams = [of_rank(method, x, mesh.get_local_rank(), mesh.size()) for x in inputs[:5]]
    leaves = [x.requires_grad_() for x in (*streams, *inputs[5:])]
    of_leaves = {x.untyped_storage().data_ptr() for x in leaves}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in of_leaves:
            kept[x.data_ptr()] = x.numel()
        return x

    def forward(*leaves: Tensor) -> Tensor:
        return core(Streams(*leaves[:5]), HeadWeights(*leaves[5:]), None)

    with Messages() as of_forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        if recompute:
            out = checkpoint(forward, *leaves, use_reentrant=False, context_fn=save_products_and_rings)
        else:
            out = forward(*leaves)
    with Messages() as of_backward:
        out.backward(of_rank(method, d_out, mesh.get_local_rank(), mesh.size()))
    operations = Counter(of_backward.all)
    gradients = operations[torch.ops.torchllm.gated_delta_gradients.default]  # one operation, which computes them again
    scans = operations[torch.ops.torchllm.gated_delta.default] + gradients
    if method == "ring":  # another solution is the gradient of the first
        scans = operations[torch.ops.aten.linalg_solve_triangular.default] // 2
    return Step(of_forward.sent, of_backward.sent, sum(kept.values()), scans)


TOKENS = BATCH * LENGTH // 2
CHANNELS = 2 * 2 * WIDTH + 4 * VALUE_WIDTH
SENT_TO_NEXT = BATCH * (KERNEL - 1) * CHANNELS
OF_STATES = 2 * BATCH * 4 * WIDTH * (WIDTH + VALUE_WIDTH)
"""transitions and additions of two pieces"""


def test_a_ring_sends_a_few_tokens_and_a_state_for_each_piece() -> None:
    """Over 2 ranks each has one neighbor, which takes the last tokens of one of its pieces."""
    for forward, backward, kept, _ in run(step_of, 2, "ring", False):
        assert forward == [("next", SENT_TO_NEXT), ("all", OF_STATES)]
        assert backward == [("all", OF_STATES), ("next", SENT_TO_NEXT)]
        pieces_with_tokens_before = TOKENS * CHANNELS + 2 * SENT_TO_NEXT
        states = 2 * BATCH * 4 * WIDTH * VALUE_WIDTH
        assert kept == pieces_with_tokens_before + 2 * TOKENS * 4 + states  # a and b, in the order of the pieces


def test_ulysses_sends_streams_and_results() -> None:
    streams, results = TOKENS * (CHANNELS + 2 * 4), TOKENS * 4 * VALUE_WIDTH
    for forward, backward, kept, _ in run(step_of, 2, "ulysses", False):
        assert forward == [("each", streams), ("each", results)]
        assert backward == forward[::-1]
        assert kept == streams


@pytest.mark.parametrize("method", METHODS)
def test_selective_recomputation_sends_and_scans_nothing_again(method: str) -> None:
    """Only the core's own backward computes its chunks again."""
    for plain, selective in zip(run(step_of, 2, method, False), run(step_of, 2, method, True), strict=True):
        assert plain[:2] == selective[:2]
        assert plain.scans == selective.scans == 1


MIXED: Settings = {
    **{"model.delta_key_dim": 6, "model.delta_value_dim": 10, "model.layers": 3},
    "model.pattern": ("recurrent", "recurrent", "full"),
    "model.kinds": {"recurrent": {"mixer": "gated_delta"}, "full": {}},
}


@tiers.train(
    [{**RING2, **WITH_DOCUMENTS}, {"parallel.tp": 2, "parallel.sequence_parallel": True}],
    [
        {**ULYSSES2, "recompute.mode": "selective_half"},
        {"compile.block": True, **WITH_DOCUMENTS},
        {"compile.block": True, "parallel.tp": 2, "recompute.mode": "selective"},
    ],
    FEW,
)
def test_layouts_train_the_same_model(settings: Settings) -> None:
    """The lattice has others, and models without attention."""
    check({**MIXED, **settings})
