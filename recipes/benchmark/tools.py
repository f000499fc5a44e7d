"""Tools of the benchmarks: the loop one would write by hand, clocks, tables."""

import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

from torchllm.config import Config
from torchllm.data.batch import Batch
from torchllm.facts.flops import flops_per_token, parameter_count, recomputed_flops
from torchllm.models.decoder import Decoder, build_model
from torchllm.models.head import IGNORED
from torchllm.parallel.compile import apply_compile
from torchllm.parallel.fsdp import begin_micro_batch, effective_zero_stage
from torchllm.parallel.initialize import initialize
from torchllm.parallel.mesh import Mesh
from torchllm.parallel.recompute import apply_recompute
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.process import Runtime

Measured = TypeVar("Measured")
"""result of one side of a comparison"""
Work = Callable[[], object]
TableRow = dict[str, str | int | float | None]
Tables = dict[str, list[TableRow]]
"""title -> rows; a key of a row names its unit"""


class WarmLoop(NamedTuple):
    """A loop after its first steps."""

    work: Work
    """takes one step"""
    peak_gib: float | None
    """most GPU memory that its tensors took; None on a CPU"""


class WeightCopy(NamedTuple):
    """A parameter in 16 bits, and the float32 weight that it is copied from."""

    computed: Tensor
    weight: Tensor


def bare_loop(config: Config, runtime: Runtime, mesh: Mesh, batches: Sequence[Batch]) -> Work:
    """Return a step as one would write it by hand: the same model and kernels, torch's clipping and fused AdamW.

    It has no checks. On one rank it is a plain module; in bfloat16 the float32 weights are copied once per step, and
    gradients are summed in float32. On several it is FSDP2 around each block and the whole, sharded and reduced as
    parallel.zero_stage says.
    """
    training = config.training
    alone = runtime.world_size == 1
    model = bare_model(config, runtime, mesh)
    copies = weight_copies(model, compute_dtype(training, runtime.device)) if alone else []
    weights = [copy.weight for copy in copies] or list(model.parameters())
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        weights,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )

    def work() -> None:
        tokens = torch.stack([(batch.labels != IGNORED).sum() for batch in batches]).sum()
        if not alone:
            dist.all_reduce(tokens)
        for copy in copies:
            copy.computed.data.copy_(copy.weight)
        for index, batch in enumerate(batches):
            begin_micro_batch([model], effective_zero_stage(config.parallel), last=index == len(batches) - 1)
            loss = model(batch.tokens, batch.positions, batch.document_ids, batch.labels, batch.document_limit)
            (loss * (runtime.world_size / tokens)).backward()  # FSDP takes the mean over the ranks
            add_gradients(copies)
        if training.max_grad_norm:
            clip_grad_norm_(weights, training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return work


def bare_model(config: Config, runtime: Runtime, mesh: Mesh) -> Decoder:
    """Return the initialized model, with FSDP2 around it on several ranks."""
    with torch.device("meta"):
        model = build_model(
            config.model, config.training.loss_chunk, config.training.z_loss, config.training.weights_dtype
        )
    apply_recompute(model, config.recompute, config.model.layers)
    apply_compile(model, config.compile)
    if runtime.world_size > 1:
        dtype = compute_dtype(config.training, runtime.device)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        per_use = effective_zero_stage(config.parallel) == 3
        for block in model.layers.values():
            fully_shard(block, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=per_use)
        fully_shard(model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)
    initialize([model], config.model, runtime.device, config.run.seed)
    return model


def weight_copies(model: Decoder, dtype: torch.dtype) -> list[WeightCopy]:
    """Turn the model's parameters into copies of type `dtype`; return them with their float32 weights."""
    if dtype == torch.float32:
        return []
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    computed = model.to(dtype).parameters()
    return [WeightCopy(*pair) for pair in zip(computed, weights, strict=True)]


def add_gradients(copies: Sequence[WeightCopy]) -> None:
    """Add the copies' gradients to their weights' gradients, in float32."""
    for computed, weight in copies:
        assert computed.grad is not None
        if weight.grad is None:
            weight.grad = computed.grad.float()
        else:
            weight.grad.add_(computed.grad)
        computed.grad = None


def seconds_of(work: Work, times: int, device: torch.device) -> list[float]:
    """Return the seconds of each of `times` runs of `work`.

    On a GPU they are measured between events, so that the host runs ahead as in training.
    """
    if device.type == "cuda":
        return _seconds_between_events(work, times, device)
    seconds = []
    start = time.perf_counter()
    for _ in range(times):
        work()
        stop = time.perf_counter()
        seconds.append(stop - start)
        start = stop
    return seconds


def _seconds_between_events(work: Work, times: int, device: torch.device) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(stop) / 1e3 for start, stop in pairwise(events)]


def warmed_up(build: Callable[[], Work], steps: int, device: torch.device) -> WarmLoop:
    """Build a loop and take its first steps."""
    if device.type != "cuda":
        work = build()
        seconds_of(work, steps, device)
        return WarmLoop(work, None)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    work = build()
    seconds_of(work, steps, device)
    return WarmLoop(work, (torch.cuda.max_memory_allocated(device) - allocated) / 2**30)


def take_turns(sides: Sequence[Callable[[], Measured]], rounds: int) -> list[list[Measured]]:
    """Call every side once per round; return the results of each side.

    Every other round goes backwards, so that no side is always first.
    """
    results: list[list[Measured]] = [[] for _ in sides]
    for turn in range(rounds):
        order = list(range(len(sides)))
        if turn % 2:
            order.reverse()
        for index in order:
            results[index].append(sides[index]())
    return results


@contextmanager
def scratch(runtime: Runtime) -> Iterator[Path]:
    """Give all ranks an empty folder in the run folder; it is deleted when the block ends."""
    folder = runtime.folder / "scratch"

    def delete() -> None:
        runtime.barrier()
        if runtime.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        runtime.barrier()

    delete()
    yield folder
    delete()


def ratio_row(name: str, over: Sequence[float], under: Sequence[float]) -> TableRow:
    """Return the ratio of two sides' medians, and the least and the largest ratio of one round."""
    ratios = [numerator / denominator for numerator, denominator in zip(over, under, strict=True)]
    return {"what": name, "ratio": median(over) / median(under), "least": min(ratios), "largest": max(ratios)}


def speed(config: Config, seconds: float, peak: float | None) -> TableRow:
    """Return a step time and the figures derived from it. `peak`: FLOP/s of all devices, None if unknown."""
    training = config.training
    length = training.sequence_length
    tokens_per_second = training.global_batch_size * length / seconds
    model_flops = flops_per_token(config.model, length, trained=config.trained)
    recomputed = recomputed_flops(config, length)
    return {
        "step_ms": seconds * 1e3,
        "tokens_per_second": tokens_per_second,
        "mfu": None if peak is None else tokens_per_second * model_flops / peak,
        "hfu": None if peak is None else tokens_per_second * (model_flops + recomputed) / peak,
    }


def environment(config: Config, runtime: Runtime) -> TableRow:
    """Return the conditions of the figures, apart from the code."""
    training = config.training
    device = f"CPU {platform.machine()}"
    if runtime.device.type == "cuda":
        device = torch.cuda.get_device_name(runtime.device)
    return {
        "torch": torch.__version__,
        "device": device,
        "ranks": runtime.world_size,
        "threads_per_rank": torch.get_num_threads(),
        "dtype": str(compute_dtype(training, runtime.device)).removeprefix("torch."),
        "parameters": parameter_count(config.model),
        "sequence_length": training.sequence_length,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": training.global_batch_size,
    }


def format_table(rows: Sequence[TableRow]) -> str:
    """Return a Markdown table; the keys of the first row are its heading."""
    heading = list(rows[0])
    lines = [table_line(heading), table_line(["---"] * len(heading))]
    for row in rows:
        lines.append(table_line([format_cell(value) for value in row.values()]))
    return "\n".join(lines)


def table_line(cells: Sequence[str]) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def format_cell(value: str | int | float | None) -> str:
    """Return a cell: four digits of a fraction, whole numbers in full, "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def print_tables(name: str, facts: TableRow, tables: Tables) -> None:
    """Print a line of facts, then every table."""
    described = [f"{key} {format_cell(value)}" for key, value in facts.items()]
    print(f"{name}: {', '.join(described)}")
    for title, rows in tables.items():
        print(f"\n{title}\n\n{format_table(rows)}")
