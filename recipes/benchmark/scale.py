"""benchmark scale: how the costs beside the step itself grow with ranks, tokens, shards, parameters.

Time on a shared machine says little about 16,384 ranks, so each row is a count: bytes, requests, calls, operations,
lines of Python. What has no machine here stands for it: a fake process group, synthetic reports and manifests, sparse
files, threads as ranks. A row's exponent e is that of the power of the size that fits its counts best: 1 is
proportional, 2 is the square. Where a count is not taken at the largest size, that power extends it, and the row says
so.
"""

import math
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from torchllm.checkpoint.plan import region_numbers
from torchllm.config import Parallel
from torchllm.config.errors import UserError
from torchllm.data.corpus import Corpus
from torchllm.data.corpus_header import (
    FORMAT,
    CorpusHeader,
    ShardTableWriter,
    SplitRecord,
    corpus_fingerprint,
    write_header,
)
from torchllm.data.order import DataOrder
from torchllm.models.attention import EagerAttention, ScaledDotProductAttention
from torchllm.models.block_mask import document_block_mask
from torchllm.optim.grad_norm import clip, grad_norm
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.process import Runtime
from torchllm.runtime.torch_compat import allocations

from .checkpoint_index import count_pieces, index_of, shapes_of_run, synthetic_ranks
from .tools import TableRow, Tables

if TYPE_CHECKING:
    from .settings import BenchmarkConfig

CPU = torch.device("cpu")
RANKS = (64, 1024, 16384)
TOKENS = (2048, 8192, 131_072)
PARAMETERS = (64, 291, 1137)
"""tensors of a model: 291 are those of Llama 3 8B, 1,137 those of 405B"""
SEQUENCES = (10**6, 10**9, 10**12)
SHARDS = (1000, 20_000, 60_000)
"""of a corpus: 60,000 are 15T tokens in shards of 1 GiB of text"""


class Count(NamedTuple):
    """What is counted for one row of a table."""

    what: str
    unit: str
    measure: Callable[[int], float]
    """returns the count at a size; its docstring says what is counted"""
    sizes: Sequence[int]
    """at which it is taken"""
    small: tuple[int, int]
    """two sizes at which a test takes it in seconds"""
    limit: float
    """largest exponent that the test allows"""


def scale(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Take every count. One process; raises UserError under torchrun."""
    if runtime.world_size > 1:
        raise UserError("benchmark scale: needs one process; it makes the other ranks up")
    with without_process_group():
        return {
            "by ranks": [count_row(count, RANKS) for count in BY_RANKS],
            "by tokens of a sequence": [count_row(count, TOKENS) for count in BY_TOKENS],
            "by parameters (tensors)": [count_row(count, PARAMETERS) for count in BY_PARAMETERS],
            "by shards of a corpus": [count_row(count, SHARDS) for count in BY_SHARDS],
            "by sequences of a corpus": [count_row(count, SEQUENCES) for count in BY_SEQUENCES],
        }


@contextmanager
def without_process_group() -> Iterator[None]:
    """Leave the job of this one process within the block, so that there can be groups of made-up ranks."""
    dist.destroy_process_group()
    try:
        yield
    finally:
        dist.init_process_group("fake", rank=0, world_size=1)  # for the runtime to leave


def count_row(count: Count, shown: Sequence[int]) -> TableRow:
    """Return a table's row: the counts at the sizes `shown`, and their exponent."""
    counts = {size: count.measure(size) for size in count.sizes}
    exponent = fitted_exponent(counts)
    largest = max(counts)
    row: TableRow = {"what": count.what, "unit": count.unit}
    for size in shown:
        row[f"{size:,}"] = counts.get(size, counts[largest] * (size / largest) ** exponent)
    row["exponent"] = round(exponent, 2)
    row["how"] = "counted" if set(shown) <= counts.keys() else f"counted to {largest:,}"
    return row


def fitted_exponent(counts: Mapping[int, float]) -> float:
    """Return e of the power size ** e that fits the counts best, by least squares of the logarithms."""
    points = [(math.log(size), math.log(max(count, 1.0))) for size, count in counts.items()]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of Python `work` executes, those of libraries too."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(tracing)
    return lines


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that `work` holds in tensors and workspaces of the CPU at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held = peak = 0
    for size in allocations(profiler):
        held += size
        peak = max(peak, held)
    return peak


def host_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that `work` holds in objects of Python and numpy at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def attention_peak(core: Any, tokens: int) -> int:
    """Count the peak bytes of mask, attention and gradients: 2 heads, 1 key-value head, width 16, documents of 700."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, 16, generator=generator, requires_grad=True) for heads in (2, 1, 1))
    documents = (torch.arange(tokens) // 700).unsqueeze(0)
    return peak_bytes(lambda: core(q, k, v, core.mask(documents)).sum().backward())


def sdpa_attention_peak(tokens: int) -> int:
    """Count what `attention_peak` counts with model.attention = "sdpa"."""
    return attention_peak(ScaledDotProductAttention(), tokens)


def eager_attention_peak(tokens: int) -> int:
    """Count what `attention_peak` counts with model.attention = "eager", the tests' reference, which is S x S."""
    return attention_peak(EagerAttention(), tokens)


def flex_mask_peak(tokens: int) -> int:
    """Count the peak bytes of making FlexAttention's block mask of documents of 700 tokens."""
    documents = (torch.arange(tokens) // 700).unsqueeze(0)
    return peak_bytes(lambda: document_block_mask(documents))


class OperationCounter(TorchDispatchMode):
    """Counts the operations of torch that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def norm_operations(parameters: int) -> int:
    """Count the operations of the gradient norm and of clipping, each a kernel or a few on a GPU."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(parameters))
    for parameter in model.parameters():
        parameter.grad = torch.ones(2)
    with OperationCounter() as counter:
        clip([model], grad_norm([model], CPU), 1.0)
    return counter.operations


def mesh_lines(ranks: int) -> int:
    """Count the lines of Python that build the mesh on one rank: pp 4, HSDP over 2 replicas, tp 8."""
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        parallel = Parallel(pp=4, dp_replicate=2, dp_shard=ranks // 64, tp=8)
        return lines_run(lambda: build_mesh(parallel, CPU))
    finally:
        dist.destroy_process_group()


def mesh_groups(ranks: int) -> int:
    """Count the process groups that one rank holds with that mesh."""
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        parallel = Parallel(pp=4, dp_replicate=2, dp_shard=ranks // 64, tp=8)
        return len(build_mesh(parallel, CPU).axis_of_group)
    finally:
        dist.destroy_process_group()


def index_bytes(ranks: int) -> int:
    """Count the bytes of the index of a checkpoint of 70B, which the first rank of each node reads to resume."""
    return len(index_of(synthetic_ranks(shapes_of_run(), ranks)).serialize())


def index_lines(ranks: int) -> int:
    """Count the lines of Python that make the index of 70B, once per layout of a run."""
    said = synthetic_ranks(shapes_of_run(), ranks)
    return lines_run(lambda: index_of(said))


def pieces_read(ranks: int) -> int:
    """Count the pieces of tensors that a rank reads when 70B resumes on as many ranks."""
    said = synthetic_ranks(shapes_of_run(), ranks)
    return count_pieces(index_of(said), said.inventory, said.regions[0])


def gathered_at_first_save(ranks: int) -> int:
    """Count the bytes that every rank gathers of all at the first save of 70B; later ones exchange a flag."""
    said = synthetic_ranks(shapes_of_run(), ranks)
    return sum(region_numbers(regions).nbytes for regions in said.regions)


def locate_lines(sequences: int) -> int:
    """Count the lines of Python that find the last sequence of an epoch of `sequences`: what a resume does."""
    order = DataOrder(0, [sequences], [1.0])
    return lines_run(lambda: order.locate(sequences - 1))


def write_shard_table(folder: Path, shards: int) -> None:
    """Write the description of a corpus of so many shards, without the shards."""
    record = SplitRecord(tokens=2**28, documents=2**18, sha256="00" * 32, sums=[0])
    empty = SplitRecord(tokens=0, documents=0, sha256="", sums=[])
    table = ShardTableWriter()
    for _ in range(shards):
        table.add({"train": record, "validation": empty})
    sums = table.write(folder)
    header = CorpusHeader(
        format=FORMAT,
        key="",
        plan={},
        dtype="<u4",
        tokenizer="made up",
        documents=shards * record.documents,
        tokens=shards * record.tokens,
        text_bytes=shards * 2**30,
        max_token=0,
        skipped={},
        shards=shards,
        fingerprint=corpus_fingerprint("<u4", "made up", sums.table),
        table_sha256=sums.table,
        sums_sha256=sums.sums,
    )
    write_header(folder, header)


def corpus_bytes(shards: int) -> int:
    """Count the most memory that opening a corpus takes in a process."""
    with tempfile.TemporaryDirectory() as folder:
        write_shard_table(Path(folder), shards)
        return host_bytes(lambda: Corpus(folder))


def corpus_lines(shards: int) -> int:
    """Count the lines of Python that open a corpus."""
    with tempfile.TemporaryDirectory() as folder:
        write_shard_table(Path(folder), shards)
        return lines_run(lambda: Corpus(folder))


BY_RANKS = [
    Count("mesh", "lines of Python on a rank", mesh_lines, RANKS, small=(256, 1024), limit=1.0),
    Count("mesh", "groups that a rank holds", mesh_groups, RANKS, small=(64, 256), limit=0.0),
    Count("plan of a save, 70B", "lines of Python on a rank", index_lines, RANKS, small=(64, 256), limit=1.0),
    Count(
        "plan of a save, 70B", "bytes that a rank gathers", gathered_at_first_save, RANKS, small=(64, 256), limit=1.0
    ),
    Count("index of a checkpoint, 70B", "bytes", index_bytes, RANKS, small=(64, 256), limit=1.0),
    Count("resume, 70B", "pieces that a rank reads", pieces_read, RANKS, small=(64, 256), limit=0.0),
]
BY_TOKENS = [
    Count(
        "attention with documents, sdpa",
        "peak bytes",
        sdpa_attention_peak,
        (2048, 4096, 8192),
        small=(1024, 4096),
        limit=1.3,
    ),
    Count(
        "attention with documents, eager (the tests' reference)",
        "peak bytes",
        eager_attention_peak,
        (1024, 2048),
        small=(256, 1024),
        limit=2.0,
    ),
    Count("block mask, flex", "peak bytes", flex_mask_peak, TOKENS, small=(2**17, 2**19), limit=0.1),
]
BY_PARAMETERS = [
    Count("gradient norm and clipping", "operations", norm_operations, PARAMETERS, small=(16, 64), limit=0.0)
]
BY_SHARDS = [
    Count("open a corpus", "peak bytes of a process", corpus_bytes, SHARDS, small=(1000, 4000), limit=1.0),
    Count("open a corpus", "lines of Python", corpus_lines, SHARDS, small=(100, 1000), limit=0.0),
]
BY_SEQUENCES = [
    Count("place of a sequence", "lines of Python", locate_lines, SEQUENCES, small=(10**6, 10**12), limit=0.1)
]
