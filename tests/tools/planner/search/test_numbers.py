"""Numbers of GPUs and batch sizes that train more tokens per second than the wanted ones."""

from dataclasses import replace

from torchllm.config import Training
from torchllm.tools.planner.search.advice import advise
from torchllm.tools.planner.search.layouts import Job
from torchllm.tools.planner.search.numbers import (
    better_batches,
    fastest_number,
    fewer_gpus,
    tokens_per_second,
    wasted_gpus,
)
from torchllm.tools.planner.search.question import read_hardware, read_model
from torchllm.tools.planner.search.search import search

TRAINING = Training(sequence_length=2048, global_batch_size=62)
FIXED = {"recompute": "none", "schedule": "1F1B", "cp": 1}
JOB = Job(read_model("llama3_1b").config.model, TRAINING, read_hardware("dgx_h100"), 20, fixed=FIXED)


def test_numbers_to_try_are_whole_nodes_or_parts_of_one() -> None:
    assert fewer_gpus(100, 8) == [96, 88, 80, 72, 64, 56]
    assert fewer_gpus(7, 8) == [6, 5, 4]
    assert fewer_gpus(1, 8) == []
    assert len(fewer_gpus(16_384, 8)) == 16  # not the 1,024 nodes above the half


def test_batches_to_try_share_a_larger_divisor() -> None:
    assert better_batches(512, 100) == [500, 525]
    assert better_batches(512, 64) == []


def test_a_number_that_divides_nothing_is_said() -> None:
    first = advise(JOB, search(JOB)).first
    fewer, batch = wasted_gpus(JOB, first)
    assert fewer.startswith("Fewer GPUs train faster: 16 make ")
    assert batch.startswith("A batch that divides better: 60 sequences make ")
    best = fastest_number(JOB)
    assert best.gpus == 16
    assert tokens_per_second(best, search(best, 1).best[0]) > tokens_per_second(JOB, first)
    whole = replace(JOB, gpus=16, training=replace(TRAINING, global_batch_size=64))
    assert list(wasted_gpus(whole, advise(whole, search(whole)).first)) == []
