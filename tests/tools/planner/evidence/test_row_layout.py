"""The layout and the batch of a row: nothing that changes the prediction is read silently."""

from typing import NamedTuple

import pytest

from tests.tools.planner.evidence.test_score import ROW
from torchllm.config import Model, Parallel, Training
from torchllm.tools.planner.evidence.cells import Cells
from torchllm.tools.planner.evidence.row_layout import even_split, parallel_of, training_of
from torchllm.tools.planner.evidence.stacks import STACKS

DENSE = Model(layers=16)
SPARSE = Model(layers=16, experts=8)


class Read(NamedTuple):
    """What a row says of its layout and batch, and what was assumed."""

    parallel: Parallel
    training: Training
    assumed: list[str]


def read(model: Model = DENSE, **cells: str) -> Read:
    """Read the usual row with these cells."""
    row = Cells(ROW | cells, [])
    parallel = parallel_of(row, model, STACKS["torchllm"])
    training = training_of(row, parallel)
    return Read(parallel, training, row.assumed)


def assert_refused(reason: str, model: Model = DENSE, **cells: str) -> None:
    """Check that the usual row with these cells is refused for this reason."""
    with pytest.raises(ValueError, match=reason):
        read(model, **cells)


def test_a_batch_that_is_missing_or_does_not_divide_is_said() -> None:
    assert_refused("micro_batch is missing", micro_batch="")
    assert_refused("does not divide by micro batch 0", micro_batch="0")
    uneven = "global_batch_seqs 30 does not divide by micro batch 4 x dp 8"
    assert_refused(uneven, global_batch_seqs="30", micro_batch="4")
    assert_refused("global_batch_seqs and grad_accum are missing", global_batch_seqs="", step_time_s="1")


def test_degrees_that_are_missing_or_do_not_make_the_gpus_are_said() -> None:
    assert_refused("tp is missing", dp="", tp="")
    assert_refused("pp is missing", dp="", pp="")
    assert_refused("12 GPUs are not pp 1 x dp 8 x cp 1 x tp 8", gpus="12", dp="8", tp="8", step_time_s="1")
    assert_refused("2 GPUs are fewer than pp 1 x cp 1 x tp 4", gpus="2", dp="", tp="4")


def test_a_schedule_that_is_unknown_or_lacks_micro_batches_is_said() -> None:
    assert_refused("schedule 'backwards' is unknown", schedule="backwards", pp="2", dp="4")
    too_few = "1F1B on 8 pipeline ranks needs at least 8 micro batches; a step has 1"
    assert_refused(too_few, pp="8", dp="1", schedule="1F1B", global_batch_seqs="1")


def test_a_micro_batch_is_what_the_batch_leaves() -> None:
    training = read(micro_batch="", global_batch_seqs="64", grad_accum="4").training
    assert training.micro_batch_size == 2
    assert training.global_batch_size == 64


def test_a_row_without_a_time_needs_no_number_of_micro_batches() -> None:
    training = read(global_batch_seqs="", dp="2", pp="4", schedule="1F1B").training
    assert training.global_batch_size == 2 * 4
    assert read(global_batch_seqs="", grad_accum="3").training.global_batch_size == 8 * 3


def test_a_note_says_over_how_many_gpus_is_sharded() -> None:
    parallel = read(note="states sharded over 4 GPUs (hybrid)").parallel
    assert parallel.dp_replicate == 2
    assert parallel.dp_shard == 4


def test_experts_sharded_in_another_way_are_refused() -> None:
    assert_refused("etp 2 with ep 2 and tp 2", SPARSE, dp="4", tp="2", ep="2", etp="2")
    assert_refused("etp 1 with ep 1 and tp 2", SPARSE, dp="4", tp="2", ep="1", etp="1")
    assert_refused("ep 16 does not divide 8 ranks", SPARSE, dp="4", tp="2", ep="16")


def test_blocks_are_split_as_megatron_does() -> None:
    assert even_split(8, 4) == (2, 2, 2, 2)
    assert even_split(10, 4) == (2, 3, 3, 2)
    assert even_split(22, 8) == (2, 3, 3, 3, 3, 3, 3, 2)
    one_block_each = (1,) * 22
    assert even_split(22, 24) == (0, *one_block_each, 0)
    assert even_split(9, 4) == ()  # nor do they divide with a block less on both ends
