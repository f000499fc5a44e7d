"""`model.attention = "flash"` computes attention, by the real flash-attn package in Triton's interpreter.

flash-attn-4 compiles its kernels for our call.
"""

import json
import sys
from importlib.metadata import version

import pytest

from tests.hollow import flash_attn_4
from tests.hollow.bed import Machine, run
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize("case", flash_attn_4.CASES)
def test_flash_attn_4_takes_our_call(case: str, architecture: str) -> None:
    """Forward and backward, whose kernels it compiles; no value is computed."""
    if reason := flash_attn_4.missing():
        pytest.skip(f"{reason}: .ci/cuda installs it")
    command = [sys.executable, "-m", "tests.hollow.flash_attn_4", case]
    done = run(command, Machine(architecture), 560, **flash_attn_4.architecture(architecture))
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kernel"] == "flash_attn.cute.interface"
    queries, *keys_and_values = (
        [2, 256, flash_attn_4.CASES[case][key], 64] for key in ("heads", "kv_heads", "kv_heads")
    )
    assert found["shapes"] == [queries, queries, *keys_and_values]
