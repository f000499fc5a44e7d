"""The cluster descriptions: every file reads, what is wrong is said with its line, and links are the right ones."""

import itertools
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.parity import tiny
from tests.tools.planner.test_comms import cluster as read
from torchllm.tools.planner import cluster
from torchllm.tools.planner.cluster import (
    read_cluster,
    slow_tensor_parallel,
    tensor_parallel_bytes,
    unknown_cluster,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", sorted(file.stem for file in cluster.FOLDER.glob("*.toml")))
def test_a_files_numbers_are_plausible_and_each_has_a_source(name: str) -> None:
    hardware = read(name)
    spans = [link.gpus for link in hardware.links]
    assert spans == sorted(spans)
    bandwidths = [link.bandwidth for link in hardware.links]
    assert bandwidths == sorted(bandwidths, reverse=True)
    assert (1e9 if hardware.gpu == "CPU" else 20e9) < hardware.memory < 300e9
    assert hardware.achievable <= hardware.peak.bfloat16
    assert all(0 < link.efficiency <= 1 for link in hardware.links)
    sourced, whole_table = set(), False
    for line in (cluster.FOLDER / f"{name}.toml").read_text().splitlines():
        setting, has_source = line.partition("#")[0].strip(), "#" in line
        if line.startswith("["):
            whole_table = has_source
        elif setting and not setting.startswith(("gpu =", "name =", "base =")):
            assert has_source or whole_table or setting in sourced, line  # or said of the link before
            sourced.add(setting)


def test_a_cluster_of_ones_own_builds_on_a_shipped_one_from_any_folder(tmp_path: Path) -> None:
    for base in ("dgx_h100.toml", "clusters/dgx_h100.toml"):
        (tmp_path / "mine.toml").write_text(f'base = "{base}"\nmemory = 7e10\n')
        hardware = read(str(tmp_path / "mine.toml"))
        assert hardware == replace(read("dgx_h100"), memory=7e10)


def test_an_unknown_cluster_is_told_the_nearest() -> None:
    assert unknown_cluster("dgx_h100") == ""
    assert unknown_cluster("dgxh100").endswith('did you mean "dgx_h100"?')
    assert unknown_cluster("zzz").endswith("add it there")
    assert unknown_cluster("../models/llama3_1b")  # a name, not a path


GOOD = """gpu = "X"
gpus_per_node = 4
memory = 1e9
multiprocessors = 1
memory_bandwidth = 1e9
achievable = 1e12
[peak]
bfloat16 = 1e12
tf32 = 1e12
[attention]
flash1 = 1e12
flash2 = 1e12
flash3 = 1e12
[[links]]
name = "in"
gpus = 4
bandwidth = 1e9
efficiency = 0.8
latency = 1e-6
[[links]]
name = "out"
gpus = 8
bandwidth = 1e8
efficiency = 0.8
latency = 1e-6
"""


def test_the_page_on_cluster_files_names_every_key_and_those_that_may_be_missing() -> None:
    page = (Path(__file__).parents[3] / "docs/clusters.md").read_text().partition("\n## A file for your cluster\n")[2]
    for key in fields(cluster.Hardware):
        assert re.search(rf"`\[*{key.name}\]*`", page), key.name
    optional = page.partition("Every key but ")[2].partition(" is required")[0]
    assert set(re.findall(r"`\[?(\w+)\]?`", optional)) == set(cluster.OPTIONAL)


def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for change, line in [
        (("memory = 1e9\n", ""), "memory: required key is missing"),
        (("memory = 1e9", "memory = 0.0"), ":3: memory: must be a number over 0, not 0.0"),
        (("memory = 1e9", "memroy = 1e9"), ":3: memroy: unknown section or key; did you mean memory?"),
        (
            ("[[links]]", "[constants]\nflush = 0.5\n[[links]]"),
            "(constants.message); fit them with recipes/plan.py calibrate",
        ),
        (
            ("memory = 1e9", "nics_per_node = 8\nmemory = 1e9"),
            ":3: nics_per_node: is not read any more: remove the line",
        ),
        (("tf32 = 1e12\n", ""), "peak.tf32: required key is missing"),
        (("gpus = 8\n", "gpus = 6\n"), ":22: links.1.gpus: 6 must be a multiple of the 4 of in"),
        (("latency = 1e-6\n[[", "[["), "links.0.latency: required key is missing"),
        (("gpus_per_node = 4", "gpus_per_node = 2"), "links: none has gpus = 2, the number on a node (gpus_per_node)"),
    ]:
        monkeypatch.setattr(cluster, "FOLDER", tmp_path)
        (tmp_path / "x.toml").write_text(GOOD)
        assert read("x").links[1].name == "out", change
        assert change[0] in GOOD, change
        (tmp_path / "x.toml").write_text(GOOD.replace(*change, 1))
        found: list[str] = []
        assert read_cluster("x", found) is None, change
        assert len(found) == 1, change
        assert found[0].endswith(line), found
    errors: list[str] = []
    assert read_cluster("nosuch.toml", errors) is None
    assert errors == ["nosuch.toml: no such file"]


def test_link_among_equals_looking_at_every_group() -> None:
    hardware = read("llama3_24k")
    assert hardware.link_among((1, 1, 4096, 1, 8), (2,)) is None  # more ranks than there are
    for shape in ((2, 3, 2, 1, 2), (3, 1, 5, 2, 1), (2, 2, 2, 2, 2), (1, 2, 3, 1, 6)):
        for count in (1, 2, 3):
            for dimensions in itertools.combinations(range(5), count):
                groups: dict[tuple[int, ...], list[int]] = {}
                for rank, place in enumerate(itertools.product(*map(range, shape))):
                    groups.setdefault(tuple(p for d, p in enumerate(place) if d not in dimensions), []).append(rank)
                slowest = max(
                    next(i for i, link in enumerate(hardware.links) if len({r // link.gpus for r in ranks}) == 1)
                    for ranks in groups.values()
                )
                assert hardware.link_among(shape, dimensions) == hardware.links[slowest], (shape, dimensions)


def test_tensor_parallel_off_the_node_is_warned_of_with_its_cost() -> None:
    hardware = read("llama3_24k")
    assert slow_tensor_parallel(8, 8, 1e9, hardware) == ""
    assert slow_tensor_parallel(2, 4, 1e9, None) == ""
    said = slow_tensor_parallel(16, 8, 12.34e9, hardware)
    assert "parallel.tp = 16 leaves the node (8 ranks): 12.3 GB per rank and step" in said
    assert "over rack, 9 times slower" in said
    assert "a tp that divides 8 stays inside" in said
    assert slow_tensor_parallel(3, 4, 1e9, None)  # inside a node by number, but some groups are on two
    assert slow_tensor_parallel(4, 1, 1e9, None)


def test_tensor_parallel_bytes_are_the_formula() -> None:
    config = tiny({"parallel.tp": 2, "parallel.dp_shard": 2, "parallel.cp": 2})
    tokens = 8 / 2 * 32 / 2
    blocks, hidden = 4, 64
    want = 4 * blocks * 2 * (1 / 2) * tokens * hidden * 4
    assert math.isclose(tensor_parallel_bytes(config.model, config.training, config.parallel, 4), want)
