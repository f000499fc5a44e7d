"""`model.attention = "flash"` computes attention, by the real flash-attn package in Triton's interpreter."""

import json
import sys
from importlib.metadata import version

import pytest

from tests.hollow.bed import run
from tests.hollow.flash_attn_values import CASES, ENVIRONMENT, IGNORED, missing


def test_flash_attn_computes_attention_and_its_gradients() -> None:
    """float32 on both sides of a softmax over 70 tokens; the eager core computes in float64."""
    if reason := missing():
        pytest.skip(f"{reason}: .ci/cuda installs it")
    if version("triton") >= "3.9":
        pytest.skip("flash-attn 2.8.3 names arguments to Triton's tuner that 3.9 refuses")
    done = run([sys.executable, "-m", "tests.hollow.flash_attn_values"], **ENVIRONMENT)
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["errors"]) == len(CASES) + 2  # documents
    assert max(max(errors) for errors in found["errors"].values()) < 2e-6
    assert found["refused"] == list(IGNORED)
