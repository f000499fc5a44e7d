"""Forward and backward of a step can be captured into a CUDA graph: none of CUDA's calls forbids it (`capture.py`)."""

import pytest

from tests.hollow import capture, test_experts
from tests.hollow.bed import run
from tests.hollow.capture import capture_all, kinds, obstacles
from tests.hollow.launches import measure_all
from tests.hollow.layouts import CONFIG, MODEL, SHARDING, Settings, as_arguments, layouts
from tests.hollow.memory import CONFIGS, WITHIN, Choice, peaks

pytestmark = pytest.mark.timeout(1800)

KINDS = kinds()
SOME = ("one rank", "zero 1", "zero 3, compile", "hsdp, sp", "zero 3, ring", "zero 3, ulysses", "selective, compile")
GRAPHS: Settings = {"compile.graphs": True}
AFTER = 140
"""launches of a step after its backward: the norm, the update of the debug model"""


@pytest.mark.parametrize("layout", SOME)
def test_a_dense_layout_is_captured_whole(layout: str) -> None:
    (report,) = capture_all({layout: KINDS["dense"][layout]}).values()
    assert obstacles(report) == []
    assert report["replayed"] == {"cudaGraphLaunch": 1}
    assert report["nodes"] > 500


@pytest.mark.exhaustive
def test_all_dense_layouts_are_captured_whole() -> None:
    reports = capture_all(KINDS["dense"])
    found = {layout: obstacles(report) for layout, report in reports.items() if obstacles(report)}
    # compile.graphs keeps this recomputation outside of the compiled blocks: must_recompute_outside
    assert found.keys() == {"full, compile"}


def test_experts_of_other_ranks_make_the_host_wait() -> None:
    (report,) = capture_all({"ep": KINDS["experts"]["experts, ep"]}).values()
    assert "torchllm/parallel/expert.py" in report["stopped"]


def test_experts_in_padded_buffers_are_captured_whole() -> None:
    """The host waits in no forward or backward: compile.graphs refuses capacities that change."""
    names = ["experts, ep, selective, optimistic", "experts, ep, compiled, optimistic"]
    for report in capture_all({name: KINDS["experts"][name] for name in names}).values():
        assert obstacles(report) == []


CHUNKS: dict[str, Settings] = {
    "ep": test_experts.EP,
    "ep, full": {**test_experts.EP, "recompute.mode": "full"},
    "ep, compiled": {**test_experts.EP, **test_experts.COMPILED},
    "ep over tp": {**test_experts.TP, "parallel.ep": 2},
}


def test_the_products_of_a_chunk_and_the_rows_of_another_are_not_ordered() -> None:
    """By the events that streams wait for, in a captured forward and backward. In one chunk each waits for its rows.

    Over tp, ep has the queue of tp: the shared experts' gather in the backward waits for the rows of all chunks.
    """
    cases = {}
    for name, settings in CHUNKS.items():
        for chunks in (1, 2):
            keys = {**settings, "parallel.expert_dispatch": "optimistic", "parallel.expert_chunks": chunks}
            cases[f"{name} {chunks}"] = as_arguments(test_experts.CONFIG, MODEL, keys)
    found = {name: (report["concurrent"], report["products"]) for name, report in capture_all(cases).items()}
    products = (
        3 * test_experts.BLOCKS * test_experts.MICRO_BATCHES
    )  # of a forward of one chunk; a backward has twice as many
    expected = {}
    for name, settings in CHUNKS.items():
        passes = 3 + ("recompute.mode" in settings)
        expected[f"{name} 1"] = (0, passes * products)
        overlapped = 2 if "parallel.tp" in settings else passes
        expected[f"{name} 2"] = (2 * overlapped * products, 2 * passes * products)
    assert found == expected


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        ("torch.cuda.current_stream().synchronize()", "cudaStreamSynchronize"),
        ("torch.cuda.synchronize()", "cudaDeviceSynchronize"),
        ("before.query()", "cudaEventQuery"),
        ("before.wait()", "cudaStreamWaitEvent: an event from before the capture"),
        ("other.wait_stream(torch.cuda.current_stream()); on(other)", "not joined"),
        ("on(torch.cuda.Stream())", "work of a stream that is not captured"),
        ("torch.cuda.cudart().cudaHostRegister(0, 0, 0); torch.ones(9).pin_memory().fill_(0)", ""),
        ("kept.to('cuda', non_blocking=True); kept.fill_(3)", "host memory that a captured copy reads has changed"),
    ],
)
def test_what_a_capture_forbids_is_named(planted: str, named: str) -> None:
    """A line in a captured function, and the stand-in's name for it."""
    program = f"""
import torch
from tests.hollow import counts
def on(stream):
    with torch.cuda.stream(stream):
        x.add_(1)
x = torch.ones(4, device="cuda")
other, before, kept = torch.cuda.Stream(), torch.cuda.Event(), torch.ones(4).pin_memory()
before.record()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x.mul_(2)
    {planted}
graph.replay()
print(counts.names(counts.read(), "obstacle"))
"""
    done = run([capture.sys.executable, "-c", program])
    assert done.returncode == 0, done.stdout
    found = done.stdout.splitlines()[-1]
    assert named in found if named else found == "{}", done.stdout


@pytest.mark.parametrize("layout", ["zero 3, compile", "full, compile", "sp, selective"])
def test_a_step_of_a_graph_is_one_launch_and_its_update(layout: str) -> None:
    (report,) = measure_all({layout: [*layouts()[layout], *as_arguments("", GRAPHS)[1:]]}).values()
    assert report["kernels"]["cudaGraphLaunch"] == 1
    assert report["launches"] < AFTER
    assert (report["syncs"], report["forbidden"]) == ({}, {})


def test_an_average_in_place_of_the_weights_leaves_the_addresses() -> None:
    keys: Settings = {**GRAPHS, "optimizer.ema_decay": 0.9, "optimizer.name": "muon", "training.z_loss": 0.001}
    (report,) = measure_all({"": as_arguments(CONFIG, MODEL, SHARDING["zero 3"], keys)}).values()
    assert (report["kernels"]["cudaGraphLaunch"], report["syncs"], report["forbidden"]) == (1, {}, {})


def test_the_dry_run_predicts_the_peak_of_a_captured_step() -> None:
    """And torch's allocator holds no more for the graph than for steps without it, to 1 %."""
    settings = Choice("8b", "none", "tp 1", "cp 1", "pp 1").settings
    ((plain,), (graphed,)) = (list(peaks(as_arguments(CONFIGS["8b"], settings, keys), 8)) for keys in ({}, GRAPHS))
    assert abs(graphed.difference) <= WITHIN
    assert graphed.reserved <= 1.01 * plain.reserved
