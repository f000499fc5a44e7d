"""What is wrong before the first step is found on all nodes. The rest is in tests/tools/front/test_preflight.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launched import Started, start_nodes
from tests.tiny_run import QUIET, SMALL


@pytest.mark.exhaustive
def test_nodes_with_different_configs_end_with_status_2_before_they_train(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    own = iter([[], ["--optimizer.learning_rate=0.01", "--schedule.final_fraction=0.5"]])
    folder = tmp_path / "run"
    nodes = start_nodes(lambda *words, **pod: start(*words, *next(own), **pod), folder, *SMALL, *QUIET)
    assert [node.wait() for node in nodes] == [2, 2]
    texts = [node.err.read_text() for node in nodes]
    lines = texts[0].splitlines()
    assert lines[-3:] == [
        "error: the ranks did not start the same job: start every node with the same config, code and torch",
        "  optimizer.learning_rate: 0.003 on rank 0, 0.01 on rank 1",
        "  schedule.final_fraction: 0.0 on rank 0, 0.5 on rank 1",
    ]
    assert f"rank 1: {lines[-3]}" in texts[1].splitlines()  # each node says why it ends
    assert not [text for text in texts if "Traceback" in text or "terminate" in text]
    assert not (folder / "metrics.jsonl").exists()
    assert not (folder / "config.toml").exists()
