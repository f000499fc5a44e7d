"""Which heads torch is asked about, and what is said of its answer; docs/hollow_gpu.md has torch's answers."""

import logging
from typing import Any
from unittest import mock

import pytest
import torch

from torchllm.config import Model, Parallel
from torchllm.models.document_attention import QUERY_BLOCK
from torchllm.tools.watch import chosen_kernel
from torchllm.tools.watch.chosen_kernel import attention_kernel, log_attention_kernel

pytestmark = pytest.mark.quick
META = torch.device("meta")
CUDA = torch.device("cuda")
GROUPED = Model(heads=8, kv_heads=2, hidden=8 * 16)
LONG = 3 * QUERY_BLOCK


def question(parallel: Parallel, length: int, documents: bool) -> Any:
    """Return what torch was asked: q, k, v and the mask."""
    with mock.patch.object(chosen_kernel, "chosen_attention", return_value="flash") as chosen:
        assert attention_kernel(GROUPED, parallel, length, documents, torch.bfloat16, META) == "flash"
    return chosen.call_args.args


@pytest.mark.parametrize(
    ("parallel", "heads", "kv_heads"),
    [
        (Parallel(), 8, 2),
        (Parallel(tp=2, cp=2, cp_method="ulysses"), 2, 1),  # a key-value head is on two ranks
    ],
)
def test_torch_is_asked_about_the_heads_of_a_rank(parallel: Parallel, heads: int, kv_heads: int) -> None:
    q, k, v, mask = question(parallel, LONG, documents=False)
    assert mask is None
    assert q.shape == (1, heads, LONG, 16)
    assert k.shape == v.shape == (1, kv_heads, LONG, 16)
    for x in (q, k, v):
        assert x.dtype == torch.bfloat16
        assert x.device == META
        assert x.requires_grad  # some kernels have no backward
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("length", "queries"), [(LONG, QUERY_BLOCK), (20, 20)])
def test_with_documents_about_a_block_of_queries_and_its_mask(length: int, queries: int) -> None:
    q, k, _, mask = question(Parallel(), length, documents=True)
    assert q.shape == (1, 8, queries, 16)
    assert k.shape == (1, 2, length, 16)
    assert mask.shape == (1, 1, queries, length)
    assert mask.dtype == torch.bool
    assert mask.device == META


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
        mock.patch.object(chosen_kernel, "chosen_attention", return_value="efficient"),
        mock.patch.object(chosen_kernel, "has_flash_attention", return_value=has_flash) as asked,
    ):
        assert attention_kernel(GROUPED, Parallel(), LONG, documents, dtype, META) == kernel
    assert all(call.args == (META,) for call in asked.call_args_list)


SDPA = Model(attention="sdpa")
RING = Parallel(cp=2, cp_method="ring")
ULYSSES = Parallel(cp=2, cp_method="ulysses")


def messages(
    caplog: pytest.LogCaptureFixture, model: Model, parallel: Parallel, device: torch.device, kernel: str
) -> list[tuple[str, str]]:
    """Return levels and texts of what is logged where torch chooses `kernel`."""
    with (
        mock.patch.object(chosen_kernel, "attention_kernel", return_value=kernel) as chosen,
        caplog.at_level(logging.INFO),
    ):
        log_attention_kernel(model, parallel, LONG, True, torch.float32, device)
    for call in chosen.call_args_list:
        assert call.args == (model, parallel, LONG, True, torch.float32, device)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_fused_kernel_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert messages(caplog, SDPA, ULYSSES, CUDA, "flash") == [("INFO", "attention: torch's flash kernel")]


def test_the_kernel_that_keeps_all_scores_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    (_, (level, text)) = messages(caplog, SDPA, Parallel(), CUDA, "math")
    assert level == "WARNING"
    assert "no fused kernel on this GPU for these heads in float32: the scores of a layer, (H, S, S)" in text


def test_other_kinds_of_attention_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    assert messages(caplog, SDPA, Parallel(), torch.device("cpu"), "math") == []
    assert messages(caplog, Model(attention="eager"), Parallel(), CUDA, "math") == []
    assert messages(caplog, SDPA, RING, CUDA, "math") == []
