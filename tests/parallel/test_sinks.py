"""Sinks in every layout: of a ring once for all keys, of Ulysses and tensor parallelism those of a rank's heads."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.models.test_sinks import by_definition
from tests.parallel import tiers
from tests.parallel.test_context import DOCUMENTS as WITH_DOCUMENTS
from tests.parallel.test_delta_sequence import of_rank
from tests.parallel.test_ring import DOCUMENTS, HEADS, LENGTH, whole_inputs
from tests.parity import Settings, check
from tests.workers import run
from torchllm.config import Model
from torchllm.models.attention import core_class
from torchllm.models.attention_kernels import block_kernel
from torchllm.parallel.context import UlyssesAttention
from torchllm.parallel.ring import RingAttention
from torchllm.parallel.windows import WindowAttention

EXACT = 1e-12  # of the largest element, in float64
WITH_SINKS: Settings = {
    "model.sinks": True,
    "model.pattern": ("local", "full"),
    "model.kinds": {"local": {"window": 5}, "full": {}},
}
SINKS = torch.linspace(-2.0, 3.0, HEADS, dtype=torch.float64)


Case = tuple[int, str]
"""a window, and documents"""


def on_rank(method: str, attention: str, cases: list[Case]) -> list[list[Tensor]]:
    """Return of each case this rank's parts of out and of the gradients of q, k, v, and its part of the sum d sinks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    results = []
    for window, name in cases:
        view = Model(heads=HEADS, sinks=True, attention=attention, window=window)  # type: ignore[arg-type]  # a word
        core = core_class(view)(view)
        attend: Any = {
            "ring": lambda view=view: RingAttention(mesh, block_kernel(view, "cpu")),
            "window": lambda core=core: WindowAttention(mesh, core),
            "ulysses": lambda core=core: UlyssesAttention(mesh, core),
        }[method]()
        documents = DOCUMENTS[name]
        if documents is not None:
            documents = of_rank(method, documents, rank, ranks)
        *inputs, d_out = (of_rank(method, x, rank, ranks) for x in whole_inputs(torch.float64))
        leaves = [*(x.requires_grad_() for x in inputs), SINKS.clone().requires_grad_()]
        out = attend(*leaves[:3], attend.mask(documents), leaves[3])
        results.append([out.detach(), *torch.autograd.grad(out, leaves, d_out)])
    return results


def check_method(ranks: int, method: str, attention: str, cases: list[Case]) -> None:
    of_cases = zip(*run(on_rank, ranks, method, attention, cases), strict=True)
    for (window, name), results in zip(cases, of_cases, strict=True):
        documents = DOCUMENTS[name]
        ids = torch.zeros(2, LENGTH, dtype=torch.int64) if documents is None else documents
        *inputs, d_out = whole_inputs(torch.float64)
        leaves = [*(x.requires_grad_() for x in inputs), SINKS.clone().requires_grad_()]
        expected_out = by_definition(*leaves, ids, window)
        expected = [expected_out.detach(), *torch.autograd.grad(expected_out, leaves, d_out)]
        for rank, parts in enumerate(results):
            for result, whole in zip(parts[:-1], expected[:-1], strict=True):
                part = of_rank(method, whole, rank, ranks)
                torch.testing.assert_close(result, part, rtol=0, atol=EXACT, msg=f"{method} {window} {name}")
        d_sinks = torch.stack([parts[-1] for parts in results]).sum(0)
        torch.testing.assert_close(d_sinks, expected[-1], rtol=0, atol=EXACT * float(expected[-1].abs().max()))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_adds_a_sink_once(ranks: int) -> None:
    """Not in each step: out, and the gradients of all inputs, are those of the whole sequence."""
    cases = [(0, name) for name in ("none", "two", "a long one", "one and many")]
    check_method(ranks, "ring", "eager" if ranks == 3 else "sdpa", cases)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_windows_over_pieces_have_sinks(ranks: int) -> None:
    cases = [(1, "none"), (5, "one and many"), (LENGTH // (2 * ranks) + 1, "two")]
    check_method(ranks, "window", "eager" if ranks == 3 else "sdpa", cases)


def test_ulysses_takes_the_sinks_of_its_heads() -> None:
    check_method(2, "ulysses", "sdpa", [(0, "none"), (5, "two")])


@tiers.train(
    [
        {"parallel.tp": 2, "parallel.sequence_parallel": True},
        {"parallel.cp": 2, "recompute.mode": "selective"},
    ],
    [
        {"parallel.cp": 4, "parallel.cp_method": "ring", "model.attention": "eager"},
        {"parallel.cp": 4, "parallel.cp_method": "ulysses", "recompute.mode": "selective_half"},
        {"parallel.dp_shard": 2, "compile.block": True},
        {"parallel.tp": 2, "compile.block": True, "recompute.mode": "selective"},
        {"parallel.cp": 2, "compile.block": True},
        {"model.qkv_bias": True, "model.family": "gpt", "parallel.tp": 2},
    ],
)
def test_a_layout_trains_the_same_model(settings: Settings) -> None:
    check({**WITH_SINKS, **WITH_DOCUMENTS, **settings})
