"""What benchmark.py measures with: our step, the loop one would write by hand, clocks, tables."""

import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

from torchllm.config import Config
from torchllm.data.batch import Batch
from torchllm.models.decoder import build_model
from torchllm.models.head import IGNORED
from torchllm.parallel.compile import apply_compile
from torchllm.parallel.fsdp import begin_micro_batch, effective_zero_stage
from torchllm.parallel.initialize import initialize
from torchllm.parallel.mesh import Mesh
from torchllm.parallel.recompute import apply_recompute
from torchllm.runtime.process import Runtime, compute_dtype
from torchllm.spec.flops import flops_per_token, parameter_count, recomputed_flops_per_token

Work = Callable[[], object]
TableRow = dict[str, str | int | float | None]
Tables = dict[str, list[TableRow]]
"""rows of a table by what the table tells; a key names its unit"""


def bare_loop(config: Config, runtime: Runtime, mesh: Mesh, batches: Sequence[Batch]) -> Work:
    """A step as one would write it by hand: the same model and kernels, torch's clipping and fused AdamW, no checks.

    One rank: a plain module; in bfloat16 a copy of the float32 weights, made once a step, whose gradients are summed
    in float32. Several: FSDP2 around each block and the whole, sharded and reduced as parallel.zero_stage says.
    """
    device, training, alone = runtime.device, config.training, runtime.world_size == 1
    dtype = compute_dtype(training, device)
    with torch.device("meta"):
        model = build_model(config.model, training.loss_chunk)
    apply_recompute(model, config.recompute, config.model.layers)
    apply_compile(model, config.compile)
    if not alone:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        per_use = effective_zero_stage(config.parallel) == 3
        for block in model.layers.values():
            fully_shard(block, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=per_use)
        fully_shard(model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)
    initialize([model], config.model, device, config.run.seed)
    weights: list[Tensor] = list(model.parameters())
    copies: list[tuple[Tensor, Tensor]] = []
    if alone and dtype != torch.float32:
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        copies = list(zip(model.to(dtype).parameters(), weights, strict=True))
    rate, betas = config.optimizer.learning_rate, (config.optimizer.beta1, config.optimizer.beta2)
    optimizer = torch.optim.AdamW(
        weights, rate, betas, config.optimizer.epsilon, config.optimizer.weight_decay, fused=True
    )

    def work() -> None:
        tokens = torch.stack([(batch.labels != IGNORED).sum() for batch in batches]).sum()
        if not alone:
            dist.all_reduce(tokens)
        for copy, weight in copies:
            copy.data.copy_(weight)
        for index, batch in enumerate(batches):
            begin_micro_batch([model], effective_zero_stage(config.parallel), last=index == len(batches) - 1)
            loss = model(batch.tokens, batch.positions, batch.document_ids, batch.labels)
            (loss * (runtime.world_size / tokens)).backward()  # FSDP takes the mean over the ranks
            for copy, weight in copies:
                assert copy.grad is not None
                weight.grad = copy.grad.float() if weight.grad is None else weight.grad.add_(copy.grad)
                copy.grad = None
        if training.max_grad_norm:
            clip_grad_norm_(weights, training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return work


def seconds_of(work: Work, times: int, device: torch.device) -> list[float]:
    """Seconds of each of `times` runs of `work`; on a GPU between events: the host runs ahead as in training."""
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize(device)
        return [events[index].elapsed_time(events[index + 1]) / 1e3 for index in range(times)]
    stamps = [time.perf_counter()]
    for _ in range(times):
        work()
        stamps.append(time.perf_counter())
    return [stamps[index + 1] - stamps[index] for index in range(times)]


def warmed_up(build: Callable[[], Work], steps: int, device: torch.device) -> tuple[Work, float | None]:
    """A loop after its first steps, and the most GPU memory it took, in GiB in live tensors; None on a CPU."""
    if device.type != "cuda":
        seconds_of(work := build(), steps, device)
        return work, None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    seconds_of(work := build(), steps, device)
    return work, (torch.cuda.max_memory_allocated(device) - before) / 2**30


def take_turns(sides: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """What each side returned in each round. Every other round goes backwards, so that none is always first."""
    found: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds):
        for index in range(len(sides))[:: -1 if turn % 2 else 1]:
            found[index].append(sides[index]())
    return found


@contextmanager
def scratch(runtime: Runtime) -> Iterator[Path]:
    """An empty folder for all ranks, in the run folder; deleted when the block ends."""
    folder = runtime.folder / "scratch"

    def delete() -> None:
        runtime.barrier()
        if runtime.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        runtime.barrier()

    delete()
    yield folder
    delete()


def ratio_row(what: str, over: Sequence[float], under: Sequence[float]) -> TableRow:
    """The ratio of two sides' medians, and the least and the largest ratio of one round."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    return {"what": what, "ratio": median(over) / median(under), "least": min(each), "largest": max(each)}


def speed(config: Config, seconds: float, peak: float | None) -> TableRow:
    """A step time and what follows from it; `peak` of all devices."""
    training, length = config.training, config.training.sequence_length
    rate, model_flops = training.global_batch_size * length / seconds, flops_per_token(config.model, length)
    executed = model_flops + recomputed_flops_per_token(config.model, config.recompute, length, training.loss_chunk)
    row: TableRow = {"step_ms": seconds * 1e3, "tokens_per_second": rate}
    return {**row, "mfu": peak and rate * model_flops / peak, "hfu": peak and rate * executed / peak}


def environment(config: Config, runtime: Runtime) -> TableRow:
    """What the figures depend on besides the code."""
    on_gpu, training = runtime.device.type == "cuda", config.training
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(runtime.device) if on_gpu else f"CPU {platform.machine()}",
        "ranks": runtime.world_size,
        "threads_a_rank": torch.get_num_threads(),
        "dtype": str(compute_dtype(training, runtime.device)).removeprefix("torch."),
        "parameters": parameter_count(config.model),
        "sequence_length": training.sequence_length,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": training.global_batch_size,
    }


def markdown_table(rows: list[TableRow]) -> str:
    """A table."""
    cells = [list(rows[0]), ["---"] * len(rows[0]), *([format_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def format_cell(value: str | int | float | None) -> str:
    """A cell: four digits of a fraction, whole numbers in full."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else value


def print_tables(name: str, facts: TableRow, tables: Tables) -> None:
    """A line of facts, then every table."""
    print(f"{name}: " + ", ".join(f"{key} {format_cell(value)}" for key, value in facts.items()))
    for title, rows in tables.items():
        print(f"\n{title}\n\n{markdown_table(rows)}")
