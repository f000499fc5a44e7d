"""How costs besides the step grow with ranks, tokens, shards, parameters: `python -m tests.growth` prints tables.

Time on a shared machine says little about 16,384 ranks, so each row is a count: bytes, requests, calls, operations,
lines of Python (`counts.py`). Stand-ins replace the machine: a fake process group, made-up reports and
manifests, threads as ranks. A row's exponent is the power of the size that fits its counts best: 1 is
proportional, 2 is the square. Where a count is not taken at the largest size, that power extends it, and the row says
so.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from recipes.benchmark.tools import TableRow
from tests.growth import counts


class Count(NamedTuple):
    """One row of a table: a count and its limit."""

    work: str
    unit: str
    measure: Callable[[int], float]
    """returns the count at a size; its docstring says what it counts"""
    small: tuple[int, int]
    """two sizes that a test can count in seconds"""
    limit: float
    """largest exponent that the test allows"""
    sizes: Sequence[int] = ()
    """sizes of the count; empty: the table's"""


class CountTable(NamedTuple):
    """Counts that grow with one and the same thing."""

    by: str
    sizes: Sequence[int]
    """that are shown"""
    rows: Sequence[Count]


def count_row(count: Count, shown: Sequence[int]) -> TableRow:
    """Return a table's row: the counts at the sizes `shown`, and their exponent."""
    taken = {size: count.measure(size) for size in count.sizes or shown}
    exponent = fitted_exponent(taken)
    largest = max(taken)
    row: TableRow = {"work": count.work, "unit": count.unit}
    for size in shown:
        row[f"{size:,}"] = taken.get(size, taken[largest] * (size / largest) ** exponent)
    row["exponent"] = round(exponent, 2)
    row["how"] = "counted" if set(shown) <= taken.keys() else f"counted to {largest:,}"
    return row


def fitted_exponent(taken: Mapping[int, float]) -> float:
    """Return e of the power size ** e that fits the counts best, by least squares of the logarithms."""
    points = [(math.log(size), math.log(max(count, 1.0))) for size, count in taken.items()]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


BY_RANKS = [
    Count("mesh", "lines of Python on a rank", counts.mesh_lines, (256, 1024), 1.0),
    Count("mesh", "groups that a rank holds", counts.mesh_groups, (64, 256), 0.0),
    Count("gloo groups", "sockets of a rank", counts.gloo_sockets, (4, 16), 0.1, (8, 16, 32, 64)),
    Count("gloo groups", "store requests of a rank", counts.store_requests, (4, 16), 0.0, (8, 16, 32, 64)),
    Count("gloo groups", "store bytes of a rank", counts.store_bytes, (4, 16), 0.1, (8, 16, 32, 64)),
    Count("slow rank", "lines of Python on a rank", counts.slow_rank_lines, (64, 256), 0.0),
    Count("slow rank", "bytes that a rank gathers", counts.slow_rank_bytes, (64, 256), 1.0),
    Count("hang", "bytes that all ranks publish", counts.hang_bytes, (64, 256), 1.05),
    Count("hang", "lines of Python on one rank", counts.hang_lines, (64, 256), 1.0),
    Count("plan of a save, 70B", "lines of Python on a rank", counts.index_lines, (64, 256), 1.0),
    Count("plan of a save, 70B", "bytes that a rank gathers", counts.gathered_at_first_save, (64, 256), 1.0),
    Count("index of a checkpoint, 70B", "bytes", counts.index_bytes, (64, 256), 1.0),
    Count("resume, 70B", "pieces that a rank reads", counts.pieces_read_to_resume, (64, 256), 0.0),
    Count("resume of 64 ranks, 70B", "bytes that all read", counts.bytes_read_on_more_ranks, (64, 256), 0.0),
    Count("resume of 64 ranks, 70B", "lines of Python on a rank", counts.plan_of_resume_lines, (64, 256), 1.0),
    Count("resume on 64 ranks, 70B", "bytes that all read", counts.bytes_read_on_fewer_ranks, (64, 256), 0.0),
    Count("evaluate 70B on 8 processes", "bytes that all read", counts.evaluation_read_bytes, (64, 256), 0.0),
    Count("exchange of equal texts", "lines of Python on a rank", counts.equal_texts_lines, (64, 256), 0.0),
]
BY_TOKENS = [
    Count("attention in documents, sdpa", "peak bytes", counts.sdpa_peak, (1024, 4096), 1.3, (2048, 4096, 8192)),
    Count("attention in documents, eager", "peak bytes", counts.eager_peak, (256, 1024), 2.0, (1024, 2048)),
    Count("a step of 16 sequences from a worker", "bytes", counts.packed_bytes, (2048, 8192), 1.0),
    Count("block mask, flex", "peak bytes", counts.flex_mask_peak, (2**17, 2**19), 0.1),
]
BY_RANKS_OF_A_SEQUENCE = [
    Count("a sequence of 1M tokens to its cp ranks", "bytes from workers", counts.bytes_of_sequence_ranks, (2, 8), 0.0),
]
BY_SOURCES = [
    Count("order of a mixture", "lines of Python", counts.mixture_lines, (20, 80), 1.0),
    Count("sequences of an evaluation", "lines of Python", counts.evaluation_lines, (20, 80), 1.0),
]
BY_RECORDS = [Count("resume metrics.jsonl", "lines of Python", counts.resume_metrics_lines, (1000, 10_000), 0.1)]
BY_PARAMETERS = [
    Count("gradient norm and clipping", "operations", counts.norm_operations, (16, 64), 0.0),
    Count("first step of AdamW on a mesh", "lines of Python", counts.first_adamw_lines, (16, 64), 1.0),
]
BY_SHARDS = [
    Count("open a corpus", "peak bytes of a process", counts.corpus_bytes, (1000, 4000), 1.0),
    Count("open a corpus", "lines of Python", counts.corpus_lines, (100, 1000), 0.0),
]
BY_FILES = [
    Count("key of a plan, for all shards", "lines of Python", counts.plan_key_lines, (100, 400), 1.0),
    Count(
        "open a prepared source",
        "lines of Python on a node's other ranks",
        counts.raw_source_lines,
        (10, 100),
        0.0,
        (100, 1000),
    ),
    Count("job of one shard", "bytes sent to a process", counts.shard_job_bytes, (100, 1000), 0.1),
]
BY_SEQUENCES = [Count("place of a sequence", "lines of Python", counts.locate_lines, (10**6, 10**12), 0.1)]
BY_CHECKPOINTS = [
    Count("retention, 3 kept", "folders that are looked into", counts.retention_folders, (10, 100), 0.0),
]
TABLES = [
    CountTable("ranks", (64, 1024, 16384), BY_RANKS),
    CountTable("tokens of a sequence", (2048, 8192, 131_072), BY_TOKENS),
    CountTable("ranks that share a sequence", (2, 4, 16), BY_RANKS_OF_A_SEQUENCE),
    # Llama 3 8B has 291 tensors, 405B has 1,137
    CountTable("parameters (tensors)", (64, 291, 1137), BY_PARAMETERS),
    # 60,000 shards are 15T tokens in shards of 1 GiB of text
    CountTable("shards of a corpus", (1000, 20_000, 60_000), BY_SHARDS),
    CountTable("files of a source", (1000, 10_000, 100_000), BY_FILES),
    CountTable("sequences of a corpus", (10**6, 10**9, 10**12), BY_SEQUENCES),
    CountTable("sources of a mixture", (20, 200, 2000), BY_SOURCES),
    CountTable("records of metrics.jsonl", (1000, 100_000, 1_000_000), BY_RECORDS),
    CountTable("checkpoints in a folder", (10, 100, 1000), BY_CHECKPOINTS),
]
