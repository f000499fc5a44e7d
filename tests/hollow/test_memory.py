"""The dry run's peak against the true one, of torch's allocator in a step of a whole model; the rest is a command."""

import pytest

from tests.hollow.layouts import as_arguments
from tests.hollow.memory import CONFIGS, WITHIN, Choice, peaks

pytestmark = pytest.mark.timeout(900)

CHOICES = (
    Choice("8b", "none", "tp 1", "cp 1", "pp 1"),
    Choice("8b", "none", "tp 4, sp", "ring 2", "pp 1"),
    Choice("8b", "selective", "tp 4", "ring 2", "pp 4"),
)


@pytest.mark.parametrize("choice", CHOICES, ids=", ".join)
def test_the_dry_run_predicts_the_peak_of_a_real_step(choice: Choice) -> None:
    for peak in peaks(choice.arguments, choice.ranks_per_stage):
        assert abs(peak.difference) <= WITHIN, peak


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_dry_run_counts_a_compiled_loss(mode: str) -> None:
    """To half a per cent: inductor's kernels keep the logits in 16 bits, and no float32 copy of them."""
    settings = Choice("8b", mode, "tp 1", "cp 1", "pp 1").settings
    settings |= {"compile.loss": True, "training.loss_chunk": 0}
    for peak in peaks(as_arguments(CONFIGS["8b"], settings), 8):
        assert abs(peak.difference) <= 0.005, peak


def test_the_dry_run_counts_a_compiled_loss_of_logits_that_tp_cuts() -> None:
    """Of two blocks, where 0.03 GiB of small tensors are a per cent; a softmax in float32 would be 20."""
    settings = Choice("8b", "none", "tp 4", "cp 1", "pp 1").settings
    settings |= {"compile.loss": True, "training.loss_chunk": 0, "model.layers": 2}
    for peak in peaks(as_arguments(CONFIGS["8b"], settings), 32):
        assert abs(peak.difference) <= 0.015, peak
