"""The Triton kernels that inductor makes for a GPU compute what they replace, and build for GPUs of other kinds."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.hollow.bed import run
from tests.hollow.kernel_builds import TARGETS, Build, build_all, kernels_of
from tests.hollow.kernel_graphs import cases, collect

pytestmark = pytest.mark.timeout(1800)
CASE = "norm alone, odd sizes"
VALUES = "tests.hollow.kernel_values"


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the graphs of one case."""
    folder = tmp_path_factory.mktemp("graphs")
    assert list(collect({CASE: cases()[CASE]}, folder))
    return folder


def values(folder: Path, *arguments: str) -> tuple[int, str]:
    """Compare the kernels of the graphs in a folder; return the exit status and what was printed."""
    done = run([sys.executable, "-m", VALUES, f"--folder={folder}", *arguments], seconds=1700)
    return done.returncode, done.stdout


def planted(graphs: Path, folder: Path, old: str, new: str) -> Path:
    """Return a copy of graphs whose kernels have other text."""
    shutil.copytree(graphs, folder)
    found = 0
    for file in folder.rglob("output_code.py"):
        text = file.read_text()
        found += len(re.findall(old, text))
        file.write_text(re.sub(old, new, text))
    assert found, old
    return folder


def test_kernels_compute_what_they_replace(graphs: Path) -> None:
    status, printed = values(graphs, CASE)
    assert status == 0, printed
    assert re.search(r"^[1-9]\d* kernels, [1-9]\d* run, [1-9]\d* results compared", printed, re.MULTILINE)
    assert "not run" not in printed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"tl\.full\(\[1, 1\], 1e-05,", "tl.full([1, 1], 1e-02,"),
        (r"r0_mask = r0_index < r0_numel", "r0_mask = r0_index < r0_numel - 1"),
    ],
    ids=["another epsilon", "a mask off by one"],
)
def test_a_wrong_kernel_is_named(graphs: Path, tmp_path: Path, old: str, new: str) -> None:
    status, printed = values(planted(graphs, tmp_path / "wrong", old, new), CASE)
    assert status == 1, printed
    assert re.search(r"^WRONG: triton_\w*rms_norm", printed, re.MULTILINE)


def test_kernels_build_for_all_targets(graphs: Path) -> None:
    kernels = kernels_of(collect({CASE: cases()[CASE]}, graphs))
    builds = build_all(kernels)
    assert len(builds) == len(kernels) * len(TARGETS)
    assert [build for build in builds if build.finding] == []


def test_what_a_kernel_takes_too_much_of_is_a_finding() -> None:
    assert Build("kernel", "sm_90", registers=255).finding == ""
    assert Build("kernel", "sm_90", spilled=8).finding == "spills 8"
    assert Build("kernel", "gfx942", shared=70_000).finding == "shares 70000 bytes of 65536"
