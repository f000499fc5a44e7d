"""Steps as CUDA graphs, with a stand-in for graphs on a CPU: what a step computes is noted, and computed again on the
same memory. `tests/hollow/test_capture.py` has CUDA's rules, `tests/gpu/test_graphs.py` the real thing.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tests.parity import Settings, Trainer, tiny, whole
from tests.workers import run
from torchllm.config.errors import UserError
from torchllm.parallel.forward_backward import OneStage
from torchllm.parallel.graphs import WARM_UP, Graphed
from torchllm.runtime.torch_compat import PROFILER_MARKS, TorchDispatchMode

STEPS = WARM_UP + 3
TWO: Settings = {"training.global_batch_size": 4}
"""micro batches"""
LAYOUTS: dict[str, tuple[int, Settings]] = {
    "one rank": (1, TWO),
    "chunks, z loss": (1, {**TWO, "training.loss_chunk": 16, "training.z_loss": 0.1}),
    "two tokens ahead": (1, {**TWO, "model.mtp_depth": 2}),
    "full": (1, {**TWO, "recompute.mode": "full"}),
    "zero 3": (2, {**TWO, "parallel.dp_shard": 2}),
    "zero 1": (2, {**TWO, "parallel.dp_shard": 2, "parallel.zero_stage": 1}),
    "tp": (2, {**TWO, "parallel.tp": 2}),
}


class CpuGraph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.computed: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    @torch.no_grad()
    def replay(self) -> None:
        for function, arguments, keywords, results in self.computed:
            again = function(*arguments, **keywords)
            for place, value in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(value, torch.ScriptObject):  # of FSDP's collectives
                    Work.unbox(value).wait()
                elif isinstance(value, Tensor):
                    place.copy_(wait_tensor(value))  # wait_tensor: for those of tensor parallelism


class Notes(TorchDispatchMode):
    """Notes each operation with its tensors."""

    def __init__(self, graph: CpuGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # the operations on its shards come next
        results = function(*arguments, **(keywords or {}))
        callers = [frame.name for frame in traceback.extract_stack(limit=4)]
        is_gloos = function is torch.ops.aten.copy_.default and any("reduce_scatter_" in name for name in callers)
        if function not in PROFILER_MARKS and not is_gloos:  # which copies from memory of its own
            self.graph.computed.append((function, arguments, keywords or {}, results))
        return results


def capture(graph: CpuGraph, stream: object, capture_error_mode: str) -> Notes:
    """In the place of `torch.cuda.graph`."""
    return Notes(graph)


@contextmanager
def graphs_on_cpu() -> Iterator[None]:
    """Give torch the stand-in. FSDP must not free what it gathers: the memory of a graph stays where it is."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.CUDAGraph", CpuGraph))
        stack.enter_context(mock.patch("torch.cuda.graph", capture))
        for name in ("Stream", "stream", "current_stream"):
            stack.enter_context(mock.patch(f"torch.cuda.{name}"))
        stack.enter_context(mock.patch("torch.distributed.fsdp._fully_shard._fsdp_param.free_storage"))
        yield


def train(settings: Settings, graphs: bool) -> dict[str, Any]:
    """Return what logged results and weights are after `STEPS` steps, each of other numbers of targets."""
    trainer = Trainer(tiny(settings))
    logged = []
    with graphs_on_cpu():
        if graphs:
            assert isinstance(trainer.forward_backward, OneStage)
            trainer.step.forward_backward = Graphed(trainer.forward_backward, torch.device("cuda"))
        for step in range(1, STEPS + 1):
            result = trainer.step(step, trainer.batches(step, ragged=True))
            losses = [x for x in (result.loss, result.grad_norm, result.z_loss, result.mtp_loss) if x is not None]
            losses.append(trainer.step.forward_backward.loss_sum(trainer.batches(step)[0]))  # an evaluation
            logged.append([float(x) for x in losses])
    weights = {name: whole(weight) for stage in trainer.stages for name, weight in stage.named_parameters()}
    return {"logged": logged, **{name: weight.tolist() for name, weight in weights.items()}}


@pytest.mark.parametrize("layout", [n if n != "tp" else pytest.param(n, marks=pytest.mark.exhaustive) for n in LAYOUTS])
def test_replays_train_as_steps_do(layout: str) -> None:
    """To the last bit: the same operations in the same order."""
    ranks, settings = LAYOUTS[layout]
    assert run(train, ranks, settings, True) == run(train, ranks, settings, False)


def test_other_shapes_are_refused() -> None:
    run(_change_the_shapes, 1)


def _change_the_shapes() -> None:
    trainer = Trainer(tiny(TWO))
    scale = torch.ones(())
    with graphs_on_cpu():
        graphed = Graphed(OneStage(trainer.stages, trainer.config.parallel), torch.device("cuda"))
        for _ in range(WARM_UP + 1):
            graphed(trainer.batches(1), scale)
        with pytest.raises(UserError, match=r"compile.graphs: a step's micro batches have other shapes than before"):
            graphed(trainer.batches(1)[:1], scale)


def test_a_cpu_and_an_older_torch_are_refused() -> None:
    plain: Any = None
    with pytest.raises(UserError, match=r"compile.graphs: needs a GPU and torch 2.13 or later, and this is cpu"):
        Graphed(plain, torch.device("cpu"))
    with mock.patch("torch.__version__", "2.12.1"), pytest.raises(UserError, match=r"this is cuda with torch 2.12.1"):
        Graphed(plain, torch.device("cuda"))
