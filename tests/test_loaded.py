"""The wall between core and tools counts what a run loads, and not only what its recipe imports."""

from pathlib import Path

import pytest

from tests.loaded import RUNS, lines_of, listed
from tests.sizes import size_of
from tests.tiny_run import ROOT

LIMITS = {
    "minimal": 9_486,  # the goal is 9,500; 371: lookup of a cached corpus
    "minimal_on_prepared_tokens": 9_111,
    "debug": 16_840,  # 26: no capacities, best fit; 5: interrupted copies, bytes of unknown labels
    "prepared_tokens": 16_465,
    "resumed": 18_982,  # 8: sums of checkpoints and corpora of format 2
    "planned": 16_840,
    "tracked": 17_058,
}
"""run -> lines of ours that rank 0 may have loaded at its end; lower one with the size, raise one only with a reason"""
NEVER = {
    "minimal": ["torchllm/tools/launch", "torchllm/tools/watch", "torchllm/tools/front", "torchllm/tools/planner"],
    "minimal_on_prepared_tokens": ["torchllm/tools/prepare", "torchllm/tools/launch", "torchllm/tools/watch"],
    "debug": ["torchllm/tools/planner", "torchllm/tools/watch/trackers.py", "torchllm/tools/watch/step_profiler.py"],
    "prepared_tokens": ["torchllm/tools/prepare", "torchllm/tools/planner", "torchllm/tools/config/checks.py"],
    "planned": ["torchllm/tools/planner"],
}
"""run -> what it needs nothing of"""
BY_DEFAULT = ("minimal",)


@pytest.mark.parametrize(
    "name", [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive) for name in RUNS]
)
def test_a_run_loads_what_it_needs(tmp_path: Path, name: str) -> None:
    files = RUNS[name](tmp_path)
    new = sorted(files - listed()[name])
    described = [f"{file} ({size_of([ROOT / file]).lines} lines)" for file in new]
    assert lines_of(files) <= LIMITS[name], f"new since `python -m tests.loaded` wrote its list: {described}"
    assert not new, "must it be loaded? then write the list: python -m tests.loaded"
    assert not [file for file in files for room in NEVER.get(name, []) if file.startswith(room)]
