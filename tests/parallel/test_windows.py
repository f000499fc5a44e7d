"""Windows over zigzag pieces are windows over the whole sequence; tests of what is sent."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel import tiers
from tests.parallel.test_context import DOCUMENTS as WITH_DOCUMENTS
from tests.parallel.test_context import RING2, sends
from tests.parallel.test_ring import (
    DOCUMENTS,
    EXACT,
    LENGTH,
    Results,
    forward_backward,
    inputs_of,
    part_of,
    whole_inputs,
)
from tests.parity import FEW, Settings, check
from tests.workers import run
from torchllm.config import Model
from torchllm.models import varlen_attention
from torchllm.models.attention import CORES
from torchllm.models.attention_cores import EagerAttention
from torchllm.models.document_attention import visible_keys
from torchllm.parallel.windows import WindowAttention

WINDOWED: Settings = {
    **RING2,
    "model.layers": 3,
    "model.pattern": ("local", "pairs", "full"),
    "model.kinds": {"local": {"window": 7}, "pairs": {"window": 2}, "full": {}},
}


def in_pieces(core: str, cases: list[tuple[int, str]]) -> list[Results]:
    """Return this rank's results of each case: a window and documents."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    results = []
    for window, name in cases:
        documents = DOCUMENTS[name]
        if documents is not None:
            documents = part_of(documents, rank, ranks)
        attention = WindowAttention(mesh, CORES[core](Model(window=window)))
        results.append(forward_backward(attention, inputs_of(rank, ranks, torch.float64), documents))
    return results


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_windows_over_pieces_are_windows_over_the_whole_sequence(ranks: int) -> None:
    longest = LENGTH // (2 * ranks) + 1  # it reaches all tokens of the piece before
    cases = [(1, "none"), (2, "two"), (5, "one and many"), (longest, "none"), (longest, "a long one")]
    of_cases = zip(*run(in_pieces, ranks, "eager" if ranks == 4 else "sdpa", cases), strict=True)
    for (window, name), of_ranks in zip(cases, of_cases, strict=True):
        documents = DOCUMENTS[name]
        ids = torch.zeros(2, LENGTH, dtype=torch.int64) if documents is None else documents
        whole = forward_backward(EagerAttention(Model(window=window)), whole_inputs(torch.float64), ids)
        for rank, results in enumerate(of_ranks):
            for result, expected in zip(results, whole, strict=True):
                part = part_of(expected, rank, ranks)
                torch.testing.assert_close(result, part, rtol=0, atol=EXACT, msg=f"{window} {name}")


def offsets_of_pieces(documents: Tensor, limits: list[int]) -> list[int]:
    """Return the offsets of a rank's pieces, as on a GPU. limits: of each rank."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rank = mesh.get_local_rank()
    attention = WindowAttention(mesh, CORES["sdpa"](Model(window=33)))
    with mock.patch.object(varlen_attention, "has_flash_attention", return_value=True):
        pieces = documents.chunk(2 * mesh.size(), dim=1)
        mask = attention.mask(torch.cat((pieces[rank], pieces[-1 - rank]), dim=1), limits[rank])
    offsets: list[int] = mask.offsets.tolist()
    return offsets


def test_documents_of_the_tokens_before_a_piece_are_no_more_than_there_is_room_for() -> None:
    """The loader counts those of a rank's own pieces; here the tokens before have ten times as many."""
    ids = torch.zeros(1, 256, dtype=torch.int64)
    ids[0, 64:128] = 1
    ids[0, 128:192] = torch.arange(2, 66)
    ids[0, 192:] = 66
    rank_0, rank_1 = run(offsets_of_pieces, 2, ids, [2, 65])
    tokens = 2 * (32 + 64)
    assert rank_0[-1] == rank_1[-1] == tokens
    assert [offset for offset in rank_0 if 0 < offset < tokens] == [32, 96, 128]


def test_the_reference_has_the_window() -> None:
    ids = torch.zeros(1, 5, dtype=torch.int64)
    assert visible_keys(ids, ids, 2)[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]


@tiers.train(
    [{}, WITH_DOCUMENTS],
    [
        {"parallel.cp": 3, "model.attention": "eager", "training.sequence_length": 48, **WITH_DOCUMENTS},
        {"compile.block": True, **WITH_DOCUMENTS},
    ],
    FEW,
)
def test_kinds_with_and_without_windows_train_the_same_model(settings: Settings) -> None:
    check({**WINDOWED, **settings})


def test_only_what_a_window_reaches_is_sent_and_selective_recomputation_sends_nothing_again() -> None:
    """6 tokens' keys and values in each direction but beyond the ends. B 2, K 4, Q 8, float32; S 32 over 2 ranks."""
    reached = 2 * 6 * 2 * 4 * 8 * 4
    settings = {**RING2, "model.layers": 2, "model.window": 7}
    for mode in ("none", "selective"):
        for forward, backward in run(sends, 2, {**settings, "recompute.mode": mode}):
            assert forward == backward == [reached] * 2
