"""Whether saves are in the background where the config says "auto"."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchllm.checkpoint import background
from torchllm.checkpoint.background import saves_in_background
from torchllm.runtime import host_limits

pytestmark = pytest.mark.quick

GIB = 2**30


def parts(device: str, gib: int) -> Any:
    """Return parts of a rank that take so much on a GPU, or on a CPU, beside the state of a generator."""
    state = SimpleNamespace(local=SimpleNamespace(is_cuda=False, nbytes=5056))
    weights = SimpleNamespace(local=SimpleNamespace(is_cuda=device == "cuda", nbytes=gib * GIB))
    return {"rng.cpu": state, "model.weight": weights}


def test_auto_is_true_on_a_gpu_whose_host_has_twice_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, available, expected in (
        ("cuda", 100, True),
        ("cuda", 20, True),
        ("cuda", 19, False),
        ("cuda", 0, False),
        ("cpu", 100, False),
    ):
        memory = available and available * GIB + 10_112
        monkeypatch.setattr(host_limits, "host_memory_per_rank", lambda memory=memory: memory)
        assert saves_in_background("auto", parts(device, gib=10), None) is expected
    monkeypatch.setattr(host_limits, "host_memory_per_rank", lambda: 0)
    for asynchronous in (False, True):  # what the config says is not judged
        assert saves_in_background(asynchronous, parts("cuda", gib=10), None) is asynchronous


def test_a_rank_whose_host_is_too_small_decides_for_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_limits, "host_memory_per_rank", lambda: 100 * GIB)
    monkeypatch.setattr(background, "first_problem", lambda group, problem: problem or "rank 3: its host is too small")
    assert not saves_in_background("auto", parts("cuda", gib=10), None)
    assert "checkpoint.asynchronous: auto is false: rank 3: its host is too small" in caplog.text
