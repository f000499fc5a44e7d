"""The counts of `growth.py`: each function counts the cost of one thing at one size; its docstring says how."""

import io
import pickle
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.data.many_shards import write_description
from tests.growth.checkpoint_index import index_of, parts_of_job, pieces_read, shapes_of_run, synthetic_ranks
from tests.growth.counting import host_bytes, lines_run, peak_bytes
from tests.growth.host_groups import SetupCost, setup_cost
from tests.operations import Operations
from torchllm.checkpoint.history import folders_to_delete
from torchllm.checkpoint.plan import region_numbers
from torchllm.checkpoint.read_plan import ReadPlan, plan_reads
from torchllm.checkpoint.tensors import BYTES_AT_A_TIME
from torchllm.config import Data, Model, Optimizer, Parallel, Source, Training
from torchllm.data.corpus import Corpus, Window
from torchllm.data.held_out import first_epoch
from torchllm.data.loader import DataRanks, build_loader
from torchllm.data.order import DataOrder
from torchllm.data.packing import pack_windows
from torchllm.metrics.cut_lines import cut_position
from torchllm.models.attention import ScaledDotProductAttention
from torchllm.models.attention_cores import EagerAttention
from torchllm.models.block_mask import document_block_mask
from torchllm.optim.fused import ShardedAdamW
from torchllm.optim.grad_norm import clip, grad_norm
from torchllm.optim.optimizer import apply_if_finite
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.heartbeat import Timeout
from torchllm.runtime.process import gather_texts
from torchllm.tools.dry_run.trace import fake_ranks
from torchllm.tools.launch.hang_report import RankDump, describe_hang, read_dump, write_slices
from torchllm.tools.launch.torch_records import FlightRecord
from torchllm.tools.mesh_axes import axis_of_group
from torchllm.tools.prepare.build import shard_size_mib
from torchllm.tools.prepare.corpus_writer import ShardTableWriter, SplitRecord
from torchllm.tools.prepare.open_source import open_raw_source
from torchllm.tools.prepare.plan import CorpusPlan
from torchllm.tools.prepare.source_files import SourceFile
from torchllm.tools.watch.breakdown import PARTS
from torchllm.tools.watch.slow_rank import Reports, find_slow_rank, rank_report

CPU = torch.device("cpu")


def attention_peak(core: Any, tokens: int) -> int:
    """Count the peak bytes of mask, attention and gradients: 2 heads, 1 key-value head, width 16, documents of 700."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, 16, generator=generator, requires_grad=True) for heads in (2, 1, 1))
    documents = (torch.arange(tokens) // 700).unsqueeze(0)
    return peak_bytes(lambda: core(q, k, v, core.mask(documents)).sum().backward())


def sdpa_peak(tokens: int) -> int:
    """Count what `attention_peak` counts with model.attention = "sdpa"."""
    return attention_peak(ScaledDotProductAttention(Model()), tokens)


def eager_peak(tokens: int) -> int:
    """Count what `attention_peak` counts with model.attention = "eager", the tests' reference, which is S x S."""
    return attention_peak(EagerAttention(Model()), tokens)


def flex_mask_peak(tokens: int) -> int:
    """Count the peak bytes of making FlexAttention's block mask of documents of 700 tokens."""
    documents = (torch.arange(tokens) // 700).unsqueeze(0)
    return peak_bytes(lambda: document_block_mask(documents))


def norm_operations(parameters: int) -> int:
    """Count the operations of the gradient norm and of clipping, each a kernel or a few on a GPU."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(parameters))
    for parameter in model.parameters():
        parameter.grad = torch.ones(2)
    with Operations() as operations:
        clip([model], grad_norm([model], CPU), 1.0)
    return len(operations.all)


def first_adamw_lines(parameters: int) -> int:
    """Count the lines of Python of AdamW's first step over parameters that FSDP and tensor parallelism shard."""
    with fake_ranks(0, 64):
        mesh = init_device_mesh("cpu", (8, 8))
        model = nn.ParameterList()
        for _ in range(parameters):
            sharded = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0), Shard(1)], run_check=False)
            parameter = nn.Parameter(sharded)
            parameter.grad = torch.ones_like(parameter)
            model.append(parameter)
        optimizer = ShardedAdamW([{"params": list(model)}], Optimizer())
        finite = torch.ones((), dtype=torch.bool)
        return lines_run(lambda: apply_if_finite(optimizer, 1e-3, finite))


def mesh_lines(ranks: int) -> int:
    """Count the lines of Python that build the mesh on one rank: pp 4, HSDP over 2 replicas, tp 8."""
    with fake_ranks(0, ranks):
        parallel = Parallel(pp=4, dp_replicate=2, dp_shard=ranks // 64, tp=8)
        return lines_run(lambda: build_mesh(parallel, CPU))


def mesh_groups(ranks: int) -> int:
    """Count the process groups that one rank holds with that mesh."""
    with fake_ranks(0, ranks):
        parallel = Parallel(pp=4, dp_replicate=2, dp_shard=ranks // 64, tp=8)
        return len(axis_of_group(build_mesh(parallel, CPU)))


@cache
def setup_of_groups(ranks: int) -> SetupCost:
    """Return the cost of setting up gloo groups of `ranks` ranks, which are threads here; cached for all counts."""
    return setup_cost(ranks)


def store_requests(ranks: int) -> int:
    """Count the requests of one rank to the store that set up and use both gloo groups of a run."""
    return setup_of_groups(ranks).requests


def store_bytes(ranks: int) -> int:
    """Count the bytes of those requests and their answers."""
    return setup_of_groups(ranks).bytes


def gloo_sockets(ranks: int) -> float:
    """Count the sockets that a rank holds for both gloo groups after an all-reduce and an all-gather in each."""
    return setup_of_groups(ranks).sockets


def profiled_reports(ranks: int) -> Reports:
    """Return the reports of ranks about a profiled step; reports of 16 pipeline stages are peers, the last is slow."""
    reports = []
    for rank in range(ranks):
        seconds = dict.fromkeys(PARTS, 0.1 if rank < ranks - 1 else 0.2)
        reports.append(rank_report(seconds, rank % 16, f"node{rank // 8}", 0.01, 1.0, 0.01))
    return np.concatenate(reports)


def slow_rank_lines(ranks: int) -> int:
    """Count the lines of Python that find the slow rank of a profiled step."""
    reports = profiled_reports(ranks)
    assert find_slow_rank(reports) is not None  # the first call also imports parts of numpy
    return lines_run(lambda: find_slow_rank(reports))


def slow_rank_bytes(ranks: int) -> int:
    """Count the bytes that every rank gathers of all about a profiled step."""
    return profiled_reports(ranks).nbytes


@cache
def slices_of(ranks: range) -> str:
    """Return the ranks of a group as a dump has them; made once per group, for here one process makes all dumps."""
    return write_slices(ranks)


def hang_dump(rank: int, ranks: int) -> RankDump:
    """Return the dump of a rank of tp 8 x dp while all wait for rank 1 in its data-parallel group."""
    lane = rank % 8
    groups = {
        "world": range(ranks),
        f"replicas{lane}": range(lane, ranks, 8),
        f"node{rank // 8}": range(rank - lane, rank - lane + 8),
    }
    records = []
    for group in groups:
        for number in (1, 2, 3):
            hangs = number == 3 and group == "replicas1"
            if rank != 1 or not hangs:
                records.append(FlightRecord(number, group, "nccl:all_reduce", number, number, not hangs, "step.py:69"))
    stack = ["/lib/python3/torch/nn/modules/module.py:1 in _call"] * 20
    ranks_of_groups = {name: slices_of(members) for name, members in groups.items()}
    return RankDump(rank, f"node{rank // 8}", 10, stack, rank != 1, ranks_of_groups, records)


def hang_bytes(ranks: int) -> int:
    """Count the bytes that all ranks publish in the store when a job hangs."""
    return sum(len(hang_dump(rank, ranks).json()) for rank in range(ranks))


def hang_lines(ranks: int) -> int:
    """Count the lines of Python that one rank runs to read all dumps and name the rank that hangs."""
    texts = [hang_dump(rank, ranks).json() for rank in range(ranks)]

    def describe() -> str:
        dumps = [read_dump(text) for text in texts]
        return describe_hang(dumps, ranks, "node{}".format, Timeout(30.0, "run.timeout"), Path("hang"))

    assert "rank 1 (node1) has not entered" in describe()
    return lines_run(describe)


def index_bytes(ranks: int) -> int:
    """Count the bytes of the index of a checkpoint of 70B, which the first rank of each node reads to resume."""
    return len(index_of(synthetic_ranks(shapes_of_run(), ranks)).serialize())


def index_lines(ranks: int) -> int:
    """Count the lines of Python that make the index of 70B, once per layout of a run."""
    parts = synthetic_ranks(shapes_of_run(), ranks)
    return lines_run(lambda: index_of(parts))


def resume_plan(shapes: Mapping[str, tuple[int, ...]], writers: int, readers: int) -> ReadPlan:
    """Return the reads of the first of `readers` ranks that load tensors of FSDP on `writers` ranks."""
    index = index_of(synthetic_ranks(shapes, writers))
    return plan_reads(index, parts_of_job(synthetic_ranks(shapes, readers)), 0, BYTES_AT_A_TIME)


def pieces_read_to_resume(ranks: int) -> int:
    """Count the pieces of tensors that a rank reads when 70B resumes on the same number of ranks."""
    return len(pieces_read(resume_plan(shapes_of_run(), ranks, ranks)))


def bytes_read_on_more_ranks(ranks: int) -> int:
    """Count the bytes of tensors that all ranks read when 70B, written by 64 ranks, resumes on `ranks`."""
    return int(resume_plan(shapes_of_run(), 64, ranks).read_bytes.sum())


def bytes_read_on_fewer_ranks(ranks: int) -> int:
    """Count the bytes of tensors that all ranks read when 70B, written by `ranks` ranks, resumes on 64."""
    return int(resume_plan(shapes_of_run(), ranks, 64).read_bytes.sum())


def plan_of_resume_lines(ranks: int) -> int:
    """Count the lines of Python that plan the reads of a rank when 70B, written by 64 ranks, resumes on `ranks`."""
    shapes = shapes_of_run()
    index, job = index_of(synthetic_ranks(shapes, 64)), parts_of_job(synthetic_ranks(shapes, ranks))
    return lines_run(lambda: plan_reads(index, job, 0, BYTES_AT_A_TIME))


def evaluation_read_bytes(ranks: int) -> int:
    """Count the bytes of a checkpoint of 70B, written by `ranks` ranks, that 8 processes read to evaluate it."""
    shapes = {key: shape for key, shape in shapes_of_run().items() if key.startswith("model.")}
    return int(resume_plan(shapes, ranks, 8).read_bytes.sum())


def gathered_at_first_save(ranks: int) -> int:
    """Count the bytes that every rank gathers of all at the first save of 70B; later ones exchange a flag."""
    parts = synthetic_ranks(shapes_of_run(), ranks)
    return sum(region_numbers(regions).nbytes for regions in parts.regions)


def equal_texts_lines(ranks: int) -> int:
    """Count the lines of Python of one exchange of texts at start, the same on all ranks unless something is wrong."""
    with fake_ranks(0, ranks):
        group = dist.group.WORLD
        assert group is not None
        return lines_run(lambda: gather_texts("1 corpus", group))


def raw_source_lines(files: int) -> int:
    """Count the lines of Python that open a prepared raw source on a rank that is not the first of its node."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(files):
            Path(folder, f"{number}.txt").write_text(f"document {number}")
        data = Data(cache=f"{folder}/cache", tokenizer="bytes", sources=(Source(kind="text", path=f"{folder}/*.txt"),))
        training = Training(sequence_length=8)
        answers_of_first: list[str | None] = []

        def exchange_of_first(text: str | None) -> list[str | None]:
            answers_of_first.append(text)
            return [text]

        def exchange_of_second(text: str | None) -> list[str | None]:
            return [answers_of_first.pop(0), text]

        build_loader(data, training, Model(vocab=258), 0, DataRanks(gather_texts=exchange_of_first))
        second = DataRanks(prepares=False, gather_texts=exchange_of_second)
        return lines_run(lambda: build_loader(data, training, Model(vocab=258), 0, second))


def locate_lines(sequences: int) -> int:
    """Count the lines of Python that find the last sequence of an epoch of `sequences`, as a resume does."""
    order = DataOrder(0, [sequences], [1.0])
    return lines_run(lambda: order.locate(sequences - 1))


def mixture_order(sources: int) -> DataOrder:
    """Return the order of a run over sources of 1,000 sequences and seven different weights."""
    return DataOrder(0, *mixture_of(sources))


def mixture_of(sources: int) -> tuple[list[int], list[float]]:
    """Return sizes and weights of the sources."""
    return [1000] * sources, [1.0 + source % 7 for source in range(sources)]


def mixture_lines(sources: int) -> int:
    """Count the lines of Python that make the order of a run over `sources` sources."""
    return lines_run(lambda: mixture_order(sources))


def evaluation_lines(sources: int) -> int:
    """Count the lines of Python that choose 256 sequences of an evaluation over `sources` sources."""
    order = mixture_order(sources)
    return lines_run(lambda: first_epoch(order, *mixture_of(sources), 256))


def packed_bytes(tokens: int) -> int:
    """Count the bytes that a worker sends for a step of 16 sequences, in documents of 700 tokens."""
    begins = np.arange(0, tokens, 700)
    window = Window(np.zeros(tokens + 1, dtype=np.uint32), begins)
    return pack_windows([window] * 16, document_mask=True).nbytes


def bytes_of_sequence_ranks(ranks: int) -> int:
    """Count the bytes that the ranks of one sequence of 1,048,576 tokens get from their workers, together."""
    piece = Window(np.zeros(2**20 // (2 * ranks) + 1, dtype=np.uint32), np.zeros(0, dtype=np.int64))
    return ranks * pack_windows([piece] * 2, document_mask=True).nbytes


def resume_metrics_lines(records: int) -> int:
    """Count the lines of Python that find the last record of a metrics.jsonl with `records` records."""
    text = "".join(f'{{"step": {step}, "loss": 2.0}}\n' for step in range(1, records + 1))
    return lines_run(lambda: cut_position(NamedBytes(text.encode()), records))


class NamedBytes(io.BytesIO):
    """A file in memory."""

    name = "metrics.jsonl"


def write_shard_table(folder: Path, shards: int) -> None:
    """Write the description of a corpus of `shards` shards, without the shards."""
    record = SplitRecord(tokens=2**28, documents=2**18, sha256="00" * 32, sums="00" * 16)
    empty = SplitRecord(tokens=0, documents=0, sha256="", sums="")
    table = ShardTableWriter()
    for _ in range(shards):
        table.add({"train": record, "validation": empty})
    sizes = {"documents": shards * record.documents, "tokens": shards * record.tokens, "text_bytes": shards * 2**30}
    write_description(folder, table, "<u4", "made up", shards=shards, **sizes)


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


def plan_of_files(files: int) -> CorpusPlan:
    """Return the plan of a corpus of `files` files of 64 MiB that need not exist."""
    made_up = [SourceFile(f"/text/{number:06d}.txt", 64 * 2**20, number) for number in range(files)]
    return CorpusPlan(
        source=Source(kind="text", path="/text/*.txt"),
        files=made_up,
        tokenizer="made up",
        vocab=2**17,
        validation_fraction=0.001,
        on_bad_record="error",
        shard_mib=0.0,
    )


def plan_key_lines(files: int) -> int:
    """Count the lines of Python that give every shard of a source the key of its plan."""
    plan = plan_of_files(files)
    source = open_raw_source(plan.source, plan.files)
    shards = int(source.mib / shard_size_mib(source.mib, plan.shard_mib))

    def keys() -> None:
        for _ in range(shards):
            assert plan.key

    return lines_run(keys)


def shard_job_bytes(files: int) -> int:
    """Count the bytes that tell a process which shard of a source to write, of the last one."""
    plan = plan_of_files(files)
    source = open_raw_source(plan.source, plan.files)
    return len(pickle.dumps(source.cut_shards(files)[-1]))


def retention_folders(checkpoints: int) -> int:
    """Count the checkpoints that a save looks into if 3 of them are kept."""
    looked_into = []

    def is_whole(folder: Path) -> bool:
        looked_into.append(folder)
        return True

    folders = [Path(f"step-{number:08d}") for number in reversed(range(checkpoints))]
    assert len(folders_to_delete(folders, 3, is_whole)) == checkpoints - 3
    return len(looked_into)
