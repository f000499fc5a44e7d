"""Captures forward and backward of every layout's step as a CUDA graph, on the hollow GPU, and names what forbids it.

    python -m tests.hollow.capture                            a table in Markdown, of all layouts
    python -m tests.hollow.capture "zero 3, compile" ep       of some

A call that a capture forbids ends it on a GPU; here it is named, with its line in torchllm, and the capture goes on
(`stand_in/capture.cpp`): a wait of the host for the GPU, memory that is not torch's allocator's, pageable memory, an
event from before the capture, a stream that is not joined, work that the graph would lack. After the capture the graph
is replayed, with an evaluation in between. A kernel's values are not computed, so the replay's results are not seen.
"""

import ctypes
import os
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from tests.hollow import counts, one_rank, test_experts
from tests.hollow.bed import H100, ROOT, missing
from tests.hollow.launches import Report, measure
from tests.hollow.layouts import CONFIG, MODEL, PIPELINE, SHARDING, Arguments, Settings, as_arguments, layouts
from torchllm.config import Config

GIB = 2**30
OPTIMISTIC = {name: keys for name, keys in test_experts.OPTIMISTIC.items() if "parallel.pp" not in keys}
DOCUMENTS: dict[str, Settings] = {
    "sdpa": {"data.document_mask": True},
    "flex": {"data.document_mask": True, "model.attention": "flex"},
}


def is_pipeline(layout: str) -> bool:
    """Return whether a layout of `layouts` is of a pipeline."""
    return any(name in PIPELINE for name in layout.split(", "))


def kinds() -> dict[str, dict[str, Arguments]]:
    """Return the command line of every layout by kind and name."""
    dense = layouts()
    documents = {
        f"documents, {name}": as_arguments(CONFIG, MODEL, SHARDING["zero 3"], keys) for name, keys in DOCUMENTS.items()
    }
    experts = {
        f"experts, {name}": as_arguments(test_experts.CONFIG, MODEL, keys)
        for name, keys in {**{name: keys for name, (keys, _) in test_experts.PASSES.items()}, **OPTIMISTIC}.items()
    }
    return {
        "dense": {name: arguments for name, arguments in dense.items() if not is_pipeline(name)},
        "pipelines": {name: arguments for name, arguments in dense.items() if is_pipeline(name)},
        "documents": documents,
        "experts": experts,
    }


@dataclass
class CaptureReport:
    """What a capture met."""

    nodes: int
    """kernels, copies, fills and collectives of the graph"""
    products: int
    """products of experts among them"""
    concurrent: int
    """of these: a GPU may run them while rows are sent to another rank"""
    pool: float
    """memory that the graph's pool holds, GiB"""
    obstacles: dict[str, int]
    """calls that it forbids, each with its place, and how often"""
    replayed: dict[str, int]
    """launches of the GPU by a replay, by name"""
    stopped: str
    """the error that ended it; empty: none did"""


def place(frame: FrameType | None) -> str:
    """Return the innermost line of torchllm that led here, or what torch computes: "FILE:LINE function"."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "torchllm"):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    return f"in {node.name()}" if node is not None else "in torch"


_met: Counter[str] = Counter()


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _listener(call: bytes) -> None:
    """Count an obstacle with its place; called by the stand-in, in the thread that met it."""
    _met[f"{call.decode()} ({place(sys._getframe(1))})"] += 1


def capture(config: Config, rank: int) -> CaptureReport:
    """Take steps as `rank` of the ranks of a resolved config, then capture one's forward and backward."""
    step, batches = one_rank.build(config, rank)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(1, one_rank.STEPS):
            step(number, batches)
    run = step.forward_backward
    scale = torch.ones((), device=step.device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    counts.reset()
    ctypes.CDLL(None).hollow_listen(_listener)
    graph = torch.cuda.CUDAGraph()
    stopped = ""
    try:
        with torch.cuda.graph(graph, stream=stream):
            run(batches, scale)
    except RuntimeError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        stopped = f"{str(error).splitlines()[0]} ({place(frames[-1])})"
    counted = counts.read()
    pool = torch.cuda.memory_reserved() - before
    replayed = {}
    if not stopped:
        counts.reset()
        graph.replay()
        replayed = counts.names(counts.read(), "launch")
        run.loss_sum(batches[0])
        graph.replay()
    nodes, concurrent = counts.names(counted, "node"), counts.names(counted, "concurrent")
    return CaptureReport(
        sum(nodes.values()), _products(nodes), _products(concurrent), pool / GIB, dict(_met), replayed, stopped
    )


def _products(names: Mapping[str, int]) -> int:
    """Return the number of grouped products among kernels."""
    return sum(times for name, times in names.items() if "GroupProblemShape" in name)


def capture_all(cases: Mapping[str, Arguments]) -> dict[str, Report]:
    """Return the `CaptureReport` of each case, as a dict."""
    reports = measure(cases, H100, __spec__.name)
    assert {name: report["error"] for name, report in reports.items() if "error" in report} == {}
    return reports


def obstacles(report: Report) -> list[str]:
    """Return what stands in the way of a capture, each once."""
    return [*filter(None, [report["stopped"]]), *(f"{times} x {call}" for call, times in report["obstacles"].items())]


def main(names: list[str]) -> int:
    """Print the table; exit status 1 where a dense layout is not captured whole."""
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    print(f"| layout, torch {torch.__version__} | nodes | pool, GiB | obstacles |\n|---|--:|--:|---|")
    failed = False
    for kind, cases in kinds().items():
        wanted = {name: arguments for name, arguments in cases.items() if not names or name in names}
        for name, report in capture_all(wanted).items():
            found = obstacles(report)
            failed |= kind == "dense" and bool(found)
            print(f"| {name} | {report['nodes']} | {report['pool']:.2f} | {'; '.join(found) or 'none'} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:] == ["--cases"]:
        one_rank.main(sys.argv[1:], capture)
        sys.stdout.flush()
        os._exit(0)
    sys.exit(main(sys.argv[1:]))
