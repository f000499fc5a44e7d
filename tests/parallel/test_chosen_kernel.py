"""Which heads torch is asked about, and what is said of its answer; docs/hollow_gpu.md has torch's answers."""

import logging
from unittest import mock

import pytest
import torch

from torchllm.config import Model, Parallel
from torchllm.models import varlen_attention
from torchllm.models.document_attention import QUERY_BLOCK
from torchllm.runtime import torch_operations
from torchllm.tools.watch import chosen_kernel
from torchllm.tools.watch.chosen_kernel import attention_kernel, log_attention_kernel

pytestmark = pytest.mark.quick
META = torch.device("meta")
CUDA = torch.device("cuda")
GROUPED = Model(heads=8, kv_heads=2, hidden=8 * 16)
LONG = 3 * QUERY_BLOCK
SDPA = Model(attention="sdpa")
RING = Parallel(cp=2, cp_method="ring")
ULYSSES = Parallel(tp=2, cp=2, cp_method="ulysses")


@pytest.mark.parametrize(
    ("parallel", "length", "documents", "q_shape", "k_shape"),
    [
        (Parallel(), LONG, False, (1, 8, LONG, 16), (1, 2, LONG, 16)),
        (ULYSSES, LONG, False, (1, 2, LONG, 16), (1, 1, LONG, 16)),  # a key-value head is on two ranks
        (Parallel(), LONG, True, (1, 8, QUERY_BLOCK, 16), (1, 2, LONG, 16)),  # about a block of queries
        (Parallel(), 20, True, (1, 8, 20, 16), (1, 2, 20, 16)),
    ],
)
def test_torch_is_asked_about_the_heads_of_a_rank(
    parallel: Parallel, length: int, documents: bool, q_shape: tuple[int, ...], k_shape: tuple[int, ...]
) -> None:
    with mock.patch.object(torch_operations, "chosen_attention", return_value="flash") as chosen:
        assert attention_kernel(GROUPED, parallel, length, documents, torch.bfloat16, META) == "flash"
    q, k, v, mask = chosen.call_args.args
    assert q.shape == q_shape
    assert k.shape == v.shape == k_shape
    for x in (q, k, v):
        assert x.dtype == torch.bfloat16
        assert x.device == META
        assert x.requires_grad  # some kernels have no backward
        assert x.transpose(1, 2).is_contiguous()
    assert (mask is not None) == documents
    if documents:
        assert mask.shape == (1, 1, q_shape[2], k_shape[2])
        assert (mask.dtype, mask.device) == (torch.bool, META)


@pytest.mark.parametrize(
    ("documents", "dtype", "has_flash", "kernel"),
    [
        (True, torch.bfloat16, True, "varlen"),
        (True, torch.float32, True, "efficient"),
        (True, torch.bfloat16, False, "efficient"),
        (False, torch.bfloat16, True, "efficient"),
    ],
)
def test_varlen_is_for_documents_in_16_bit(documents: bool, dtype: torch.dtype, has_flash: bool, kernel: str) -> None:
    with (
        mock.patch.object(torch_operations, "chosen_attention", return_value="efficient"),
        mock.patch.object(varlen_attention, "has_flash_attention", return_value=has_flash) as asked,
    ):
        assert attention_kernel(GROUPED, Parallel(), LONG, documents, dtype, META) == kernel
    assert all(call.args == (META,) for call in asked.call_args_list)


NO_FUSED = "no fused kernel on this GPU for these heads in float32: the scores of a layer, (H, S, S)"


@pytest.mark.parametrize(
    ("model", "parallel", "device", "kernel", "level", "message"),
    [
        (SDPA, ULYSSES, CUDA, "flash", "INFO", "attention: torch's flash kernel"),
        (SDPA, Parallel(), CUDA, "math", "WARNING", NO_FUSED),  # it keeps all scores
        (SDPA, Parallel(), torch.device("cpu"), "math", "", ""),
        (Model(attention="eager"), Parallel(), CUDA, "math", "", ""),
        (SDPA, RING, CUDA, "math", "", ""),
    ],
)
def test_torchs_kernel_is_named(
    model: Model,
    parallel: Parallel,
    device: torch.device,
    kernel: str,
    level: str,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        mock.patch.object(chosen_kernel, "attention_kernel", return_value=kernel) as chosen,
        caplog.at_level(logging.INFO),
    ):
        log_attention_kernel(model, parallel, LONG, True, torch.float32, device)
    for call in chosen.call_args_list:
        assert call.args == (model, parallel, LONG, True, torch.float32, device)
    assert [record.levelname for record in caplog.records][-1:] == ([level] if level else [])
    assert message in caplog.text
