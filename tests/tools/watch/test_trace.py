"""Traces on request, in a real run of two ranks."""

import gzip
import json
import re
from pathlib import Path

import pytest

from tests.recipes.warm import pretrain
from tests.tiny_run import metrics
from torchllm.tools.watch.trace import parse_steps


def test_profile_steps_are_a_range() -> None:
    assert list(parse_steps("10:13")) == [10, 11, 12]
    assert not parse_steps("")


def test_a_run_writes_traces_and_a_page(tmp_path: Path) -> None:
    assert pretrain(2, tmp_path, "--metrics.profile_steps=2:4", "--metrics.breakdown_interval=0") == ["", ""]
    assert [record["step"] for record in metrics(tmp_path) if "breakdown/forward" in record] == [2, 3]
    folder = tmp_path / "profile"
    names = {f"step-{step}-rank-{rank}.json.gz" for step in (2, 3) for rank in (0, 1)}
    assert {file.name for file in folder.iterdir()} == names | {"summary.md"}
    for name in names:
        with gzip.open(folder / name) as file:
            events = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"torchllm:step", "torchllm:forward_backward", "aten::mm", "gloo:all_gather"} <= events
    page = (folder / "summary.md").read_text()
    assert [page.count(f"# Step {step}: ") for step in (1, 2, 3)] == [0, 1, 1]
    shares = [float(share) for share in re.findall(r"^- .* s, ([\d.]+)%$", page, re.MULTILINE)]
    assert sum(shares) == pytest.approx(200, abs=2)
    assert page.count("Self CPU time total") == 2  # a table of each step; its operators depend on the machine's load
