"""What ranks exchange on the host, and that they exchange nothing but a hash where all pass the same text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch.distributed as dist

from tests.workers import run
from torchllm.runtime.process import gather_texts
from torchllm.tools.launch.records import gather_records
from torchllm.tools.launch.torch_records import flight_records


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@contextmanager
def collectives_begun() -> Iterator[list[str]]:
    """Give the names of the collectives that this rank has begun inside the context, when it ends."""
    latest = max((record.number for record in flight_records()), default=-1)
    names: list[str] = []
    yield names
    names += [record.name for record in flight_records() if record.number > latest]


def _texts(by_rank: list[str | None]) -> tuple[list[str | None], list[str]]:
    with collectives_begun() as collectives:
        texts = gather_texts(by_rank[dist.get_rank()], world())
    return texts, collectives


def test_equal_texts_are_one_reduction_and_others_reach_all_ranks() -> None:
    for text in (None, "a text of any length" * 1000):
        for texts, collectives in run(_texts, 3, [text] * 3):
            assert texts == [text] * 3
            assert collectives == ["gloo:all_reduce"]
    for by_rank in ([None, "an error", None], ["a", "a", "b"], ["None", None, None], ["", "", None]):
        for texts, collectives in run(_texts, 3, by_rank):
            assert texts == by_rank
            assert len(collectives) > 1


def _records() -> Any:
    record = np.array(
        [(dist.get_rank(), [0.5, np.nan], b"host")], dtype=[("rank", "i8"), ("x", "f8", 2), ("name", "S8")]
    )
    return gather_records(record, world())


def test_records_of_any_fields_are_gathered_by_rank() -> None:
    for gathered in run(_records, 3):
        assert gathered.shape == (3, 1)
        assert gathered["rank"][:, 0].tolist() == [0, 1, 2]
        assert np.array_equal(gathered["x"][2, 0], [0.5, np.nan], equal_nan=True)
        assert gathered["name"][1, 0] == b"host"


def _collectives_for_a_table(rows: int) -> list[str]:
    with collectives_begun() as collectives:
        table = gather_records(np.full((rows, 2), float(dist.get_rank())), world())
    assert table.shape == (2, rows, 2)
    assert table[1].min() == 1.0
    return collectives


def test_a_table_is_one_gather() -> None:
    for collectives in run(_collectives_for_a_table, 2, 5):
        assert len(collectives) == 1
