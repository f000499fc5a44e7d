"""Ranks that were started with another config, code or torch than rank 0 end the job before it trains."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import workers
from tests.tools.launch.test_records import collectives_begun
from torchllm.config import Config, Optimizer, Source
from torchllm.config.errors import RefusedStart
from torchllm.tools.launch import same_start
from torchllm.tools.launch.same_start import compare_starts, facts_of_start, refuse_different_starts

CONFIG = Config()
OTHER_RATE = replace(CONFIG, optimizer=Optimizer(learning_rate=0.01))


def refuse(configs: list[Config], torch_version: str = "") -> tuple[str, list[str]]:
    """Compare the starts; `configs` by rank. Return the error, and the names of the collectives."""
    error = ""
    version = torch.__version__
    if torch_version and dist.get_rank() == 1:
        torch.__version__ = torch_version  # type: ignore[assignment]  # torch's is a class of its own
    try:
        with collectives_begun() as collectives:
            refuse_different_starts([configs[dist.get_rank()]], dist.group.WORLD)
    except RefusedStart as refused:
        error = str(refused)
    finally:
        torch.__version__ = version
    return error, collectives


def test_equal_starts_exchange_one_hash() -> None:
    assert workers.run(refuse, 3, [CONFIG] * 3) == [("", ["gloo:all_reduce"])] * 3


def test_keys_that_differ_are_named_with_both_values_on_all_ranks() -> None:
    for error, _ in workers.run(refuse, 4, [CONFIG, OTHER_RATE, CONFIG, OTHER_RATE]):
        assert error.splitlines() == [
            "the ranks did not start the same job: start every node with the same config, code and torch",
            "  optimizer.learning_rate: 0.0003 on rank 0, 0.01 on rank 1 and 1 more",
        ]


def test_another_torch_is_named() -> None:
    for error, _ in workers.run(refuse, 2, [CONFIG] * 2, "2.0.0"):
        assert error.splitlines()[1:] == [f"  torch: {torch.__version__} on rank 0, 2.0.0 on rank 1"]


def test_arrays_and_layouts_are_compared_key_by_key() -> None:
    two_sources = replace(CONFIG, data=replace(CONFIG.data, sources=(Source(), Source("text", "a"))))
    differences = compare_starts(facts_of_start([CONFIG, CONFIG]), facts_of_start([CONFIG, two_sources]))
    assert differences[0] == 'layout 2: data.sources.1.kind: missing on rank 0, "text"'
    assert {difference.split(".")[2] for difference in differences} == {"1"}


def test_edited_code_is_another_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = facts_of_start([CONFIG])["torchllm"]
    (tmp_path / "a.py").write_text("a = 1")
    monkeypatch.setattr(same_start, "PACKAGE", tmp_path)
    second = facts_of_start([CONFIG])["torchllm"]
    (tmp_path / "a.py").write_text("a = 2")
    assert len({first, second, facts_of_start([CONFIG])["torchllm"]}) == 3
