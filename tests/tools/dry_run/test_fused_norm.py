"""The norms in the dry run of a GPU."""

import torch

from tests.parity import tiny
from tests.tools.dry_run import apart
from torchllm.tools.dry_run.replay import Traced
from torchllm.tools.dry_run.trace import trace


def saved_by_a_forward(gpu: bool) -> int:
    """Return the bytes that a forward of one micro batch keeps for its backward."""
    config = tiny({"training.dtype": "bfloat16", "training.micro_batch_size": 2})
    traced: Traced = apart(trace, config, torch.bfloat16, 0, 1, 1, 0, gpu)
    (saved,) = traced.saved
    return saved


def test_a_norm_on_a_gpu_keeps_its_input_once() -> None:
    """In 16 bits, 2 bytes per element; on a CPU the input and the normalized input, in float32."""
    norms, tokens, hidden = 2 * 4 + 1, 2 * 32, 64
    assert saved_by_a_forward(gpu=False) - saved_by_a_forward(gpu=True) == norms * tokens * hidden * (8 - 2)
