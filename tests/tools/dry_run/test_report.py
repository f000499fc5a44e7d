"""The report: what it says in words and in JSON, whether it fits, which links are crossed, what is warned of."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.parity import Settings, tiny
from torchllm.tools.dry_run import run
from torchllm.tools.dry_run.report import Report, as_json, as_text, size, warnings
from torchllm.tools.planner import cluster
from torchllm.tools.planner.cluster import tensor_parallel_bytes

LAYOUT: Settings = {
    "model.layers": 8,
    "parallel.pp": 4,
    "parallel.dp_shard": 2,
    "parallel.tp": 2,
    "training.global_batch_size": 16,
    "cluster.name": "llama3_24k",
}


@pytest.fixture(scope="module")
def progress() -> list[Callable[[], str]]:
    """What the examination below has shown of its progress."""
    return []


@pytest.fixture(scope="module")
def report(progress: list[Callable[[], str]]) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "show_progress", progress.append)
        return run.examine(tiny(LAYOUT))


def test_its_progress_is_told_by_blocks(report: Report, progress: list[Callable[[], str]]) -> None:
    """Two steps are traced of each of three kinds of rank, which have two blocks."""
    blocks, _, kinds = progress[0]().partition(", of ")
    assert kinds == "3 kinds of rank"
    done, _, total = blocks.removeprefix("block ").partition(" of ")
    assert done == total
    assert int(total) == 2 * 2 * sum(kind.traced_micro_batches for kind in report.kinds)


def test_it_says_what_every_kind_of_rank_holds_and_sends(report: Report) -> None:
    lines = as_text(report).splitlines()
    words = [line.split() for line in lines]
    assert lines[0].startswith(
        "dry run of 16 ranks: pp 4 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 2, zero_stage 2, 1F1B"
    )
    assert "a step is 16 sequences of 32 tokens, 8 of them a data rank in 8 micro batches" in lines[1]
    assert ["pipeline", "ranks", "0", "1-2", "3"] in words
    assert any(
        line.startswith("blocks (e embedding, h head)") and "e 0-1" in line and "6-7 h" in line for line in lines
    )
    for purpose in ("parameters", "optimizer", "gradients", "gathered", "activations", "buffers", "temporary"):
        (row,) = (row for row in words if row[:1] == [purpose])
        assert len(row) == 1 + 2 * 3
    (sums,) = (row for row in words if row[:1] == ["sum"])
    assert sums[1] == size(sum(report.kinds[0].memory.values())).split()[0]
    assert any(row[-3:] == ["fits", "fits", "fits"] for row in words)
    assert any(line.startswith("assumed: computation in bfloat16, which auto is there;") for line in lines)
    assert not any("warning" in line for line in lines)
    assert not any(word in as_text(report).lower() for word in ("grad_norm", "nan", "nats"))  # nothing was computed


def test_json_has_the_same_in_bytes(report: Report) -> None:
    found = json.loads(as_json(report))
    assert (found["ranks"], found["micro_batches"], found["dtype"]) == (16, 8, "bfloat16")
    assert [kind["pp_ranks"] for kind in found["kinds"]] == [[0], [1, 2], [3]]
    assert [kind.shown for kind in report.kinds] == [0, 1, 3]  # 1F1B: rank 1 waits for one micro batch more than rank 2
    vocabulary = 96 / 2  # of a tp rank: its part of the logits in bfloat16 and in float32, shifted, and their gradient
    assert 32 * vocabulary * (2 + 4) <= found["kinds"][-1]["at_most"]["logits"] <= 32 * vocabulary * (2 + 3 * 4)
    assert [kind["at_most"]["logits"] for kind in found["kinds"][:-1]] == [0, 0]
    assert [kind["stages"] for kind in found["kinds"]] == [["e 0-1"], ["2-3"], ["6-7 h"]]
    for kind, same in zip(found["kinds"], report.kinds, strict=True):
        assert kind["peak"] == sum(kind["memory"].values()) == sum(same.memory.values())
        assert all(kind["at_most"][purpose] >= count for purpose, count in kind["memory"].items())
        assert {(s["axis"], s["collective"]): (s["count"], s["bytes"]) for s in kind["sent"]} == same.sent
    links = {link["axis"]: (link["ranks"], link["link"]) for link in found["links"]}
    assert links == {
        "world": (16, "rack"),
        "pp": (4, "rack"),
        "tp": (2, "NVLink"),
        "loss": (2, "NVLink"),
        "fsdp": (2, "NVLink"),
    }


def test_a_rank_that_does_not_fit_and_one_that_only_just_does(report: Report) -> None:
    assert report.hardware is not None
    peak = sum(report.kinds[0].memory.values())
    for memory, verdict in ((peak - 1, "does not fit"), (peak / 0.95, "tight"), (peak / 0.89, "fits")):
        changed = report._replace(hardware=replace(report.hardware, memory=memory))
        assert changed.verdict(changed.kinds[0]) == verdict
    without = report._replace(hardware=None)
    assert without.verdict(report.kinds[0]) == "unknown"
    assert not re.search("NVLink|fits", as_text(without))
    assert json.loads(as_json(without))["device_memory"] is None


def test_a_tp_degree_that_leaves_the_node_and_more_ranks_than_gpus_are_warnings(report: Report) -> None:
    assert list(warnings(report)) == []
    assert report.hardware is not None
    small = replace(
        report.hardware, gpus_per_node=1, links=(replace(report.hardware.links[0], gpus=1), *report.hardware.links[1:])
    )
    (said,) = warnings(report._replace(hardware=small))
    sent = max(sum(sent for (axis, _), (_, sent) in kind.sent.items() if axis == "tp") for kind in report.kinds)
    assert said.startswith(f"parallel.tp = 2 leaves the node (1 ranks): {sent / 1e9:.3g} GB per rank and step")
    assert "over rack, 9 times slower" in said
    few = replace(report.hardware, links=report.hardware.links[:1])
    assert list(warnings(report._replace(hardware=few))) == ["16 ranks, but the cluster has 8 GPUs"]


def test_a_run_warns_of_tp_off_the_node_too() -> None:
    config = tiny({"parallel.tp": 4, "cluster.name": "dgx_a100"})
    assert cluster.tensor_parallel_warning(config, 4, 2) == ""
    said = cluster.tensor_parallel_warning(config, 2, 2)
    sent = tensor_parallel_bytes(config.model, config.training, config.parallel, 2)
    assert f"{sent / 1e9:.3g} GB" in said
    assert "12 times slower" in said  # 300 against 25 GB/s


ASSUMED: dict[str, tuple[Settings, str]] = {
    "a missing kernel": ({"model.attention": "flash"}, "attention sdpa in place of flash"),
    "a compiled loss off a GPU": ({"compile.loss": True}, "nothing compiled"),
    "a compiled loss that tp cuts": (
        {"compile.loss": True, "compile.block": True, "parallel.tp": 2, "cluster.name": "dgx_h100"},
        "the loss as compiled, the rest not",
    ),
    "compiled blocks": (
        {"compile.loss": True, "compile.block": True, "cluster.name": "dgx_h100"},
        "the loss as compiled, the rest not",
    ),
    "the type": ({"training.dtype": "float32"}, "computation in float32;"),
}


@pytest.mark.parametrize("name", ASSUMED)
def test_what_it_assumes_is_said_and_traced(name: str) -> None:
    settings, words = ASSUMED[name]
    report = run.examine(tiny(settings))
    assert any(words in line for line in as_text(report).splitlines() if line.startswith("assumed: "))


@pytest.fixture(autouse=True)
def _no_ranks_of_another() -> Iterator[None]:
    yield
    assert not torch.distributed.is_initialized()
