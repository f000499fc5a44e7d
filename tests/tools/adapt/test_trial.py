"""Random batches of trials and benchmarks are packed as those of a run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.parity import tiny
from torchllm.tools.adapt import trial

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_synthetic_batches_hold_documents_and_their_limit(method: str) -> None:
    """With the mask; the kernel of a GPU needs the limit. Ranks of cp have pieces of the same sequences."""
    settings = {"training.sequence_length": 4096, "parallel.cp": 2, "parallel.cp_method": method}
    config = tiny({**settings, "data.document_mask": True, "model.max_sequence_length": 4096})
    ranks = []
    for rank in range(2):
        cp = SimpleNamespace(get_local_rank=lambda rank=rank: rank, size=lambda: 2)
        mesh: Any = SimpleNamespace(data_rank=1, data_size=2, cp=cp, cp_method=method)
        ranks.append(trial.synthetic_batches(config, mesh, torch.device("cpu")))
    of_batches = []
    for first, second in zip(*ranks, strict=True):
        assert first.document_ids is not None
        assert second.document_ids is not None
        assert not first.positions[:, 0].any()
        begins = (first.positions == 0).sum() + (second.positions == 0).sum()  # of both parts, each document once
        documents = first.document_ids.amax(1).maximum(second.document_ids.amax(1)).add(1).sum()
        assert begins == documents
        of_batches.append(int(documents))
    first, second = (batches[0] for batches in ranks)
    most = max(of_batches)
    assert most > 1
    if method == "ulysses":
        assert first.document_limit == second.document_limit == most
    else:
        assert max(first.document_limit, second.document_limit) <= most + 2  # a piece may begin within a document
