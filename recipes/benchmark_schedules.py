"""benchmark.py schedules: steps of torch's pipeline schedules on stages that sleep, against simulator and theory.

Every rank of the job is a pipeline rank. A sleeping stage needs no core, so 8 ranks on 2 cores wait for each other as
8 GPUs would; what is measured beyond the sleep is torch's schedule, autograd and gloo. A rank's work on one micro batch
is the same under every schedule: with v stages a rank each sleeps 1/v as long. Forward and the two gradients take the
same time, as the zero-bubble papers assume.

A `bubble` is the ranks' idle time over their computing time; `gain` is how many times faster than 1F1B a step is.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from benchmark_tools import Row, Tables
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from torchllm.config import Parallel, PipelineSchedule
from torchllm.errors import UserError
from torchllm.planner.schedule import orders
from torchllm.planner.simulate import StageTimes, idle_in_theory, simulate
from torchllm.planner.split import stage_of_rank
from torchllm.runtime import Runtime

if TYPE_CHECKING:
    from benchmark import BenchmarkConfig

WIDTH = 64
"""elements that a stage sends for one micro batch: next to none"""

LEAST_ROUNDS = {"DualPipeV": 2}
"""micro batches that a schedule needs, in multiples of the ranks"""

ROUNDS_IN_THEORY = {"ZBVZeroBubble": 2}
"""the same for its closed form to hold"""


class Sleep(torch.autograd.Function):
    """x, some seconds later; and its gradient, some others later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, times: StageTimes) -> Tensor:
        """x (1, WIDTH), unchanged; through `parameter` the first stage has a gradient too."""
        ctx.seconds = times.input_gradient
        time.sleep(times.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of x, unchanged."""
        time.sleep(ctx.seconds)
        return gradient, None, None


class Sleeper(nn.Module):
    """A stage that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.times = StageTimes(0, 0, 0)
        self.parameter = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """x (1, WIDTH) to the same."""
        return Sleep.apply(x, self.parameter, self.times)

    def weight_gradient(self) -> Callable[[], None]:
        """What torch calls for a micro batch's gradient of weights, at once or later (`dw_builder`)."""
        return partial(time.sleep, self.times.weight_gradient)


class Case(NamedTuple):
    """A step of one schedule."""

    parallel: Parallel
    micro_batches: int
    stages: list[StageTimes]


def schedules(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """As many micro batches as ranks, and four times as many; equal stages, and unequal ones."""
    if runtime.world_size == 1:
        raise UserError("benchmark.py schedules: start it under torchrun with 4 or 8 ranks: each is a pipeline rank")
    torch.set_num_threads(1)
    return {
        f"{shape} stages": [row for rounds in (1, 4) for row in compare(config, runtime, rounds, shape == "equal")]
        for shape in ("equal", "unequal")
    }


def compare(config: "BenchmarkConfig", runtime: Runtime, rounds: int, equal: bool) -> list[Row]:
    """All schedules on the same work, 1F1B first: the others' gain is over its step."""
    found, base = list[Row](), (0.0, 0.0)
    for schedule in sorted(get_args(PipelineSchedule), key="1F1B".__ne__):
        if rounds < LEAST_ROUNDS.get(schedule, 1):
            continue
        parallel = Parallel(pp=runtime.world_size, schedule=schedule)
        case = Case(parallel, rounds * parallel.pp, stage_times(parallel, config.benchmark.sleep, equal))
        expected = simulate(orders(parallel, case.micro_batches), case.stages)
        step, work = best_step(case, runtime, config.benchmark.rounds), sum(expected.busy) / parallel.pp
        base = base if found else (step, expected.step)
        has_form = equal and rounds >= ROUNDS_IN_THEORY.get(schedule, 1)
        row: Row = {"schedule": schedule, "micro_batches": case.micro_batches, "step_s": step}
        row |= {"simulated_s": expected.step, "ratio": step / expected.step}
        row |= {"bubble": step / work - 1, "simulated_bubble": expected.bubble}
        row["bubble_in_theory"] = idle_in_theory(parallel, case.stages[0]) / work if has_form else None
        found.append({**row, "gain": base[0] / step, "simulated_gain": base[1] / expected.step})
    return found


def stage_times(parallel: Parallel, seconds: float, equal: bool) -> list[StageTimes]:
    """Times of all stages, `seconds` for the forwards of a rank.

    Unequal: every other stage a quarter longer, the last half as long again.
    """
    factors = [1.0 if equal else 1.0 + stage % 2 / 4 for stage in range(parallel.stages)]
    factors[-1] = 1.0 if equal else 1.5
    return [StageTimes(*[seconds / parallel.stages_per_rank * factor] * 3) for factor in factors]


def best_step(case: Case, runtime: Runtime, times: int) -> float:
    """Seconds until the last rank has ended, the least of `times` steps after one that only connects the ranks."""
    parallel, group = case.parallel, runtime.host_group
    held, last = stage_of_rank(parallel, runtime.rank), parallel.stages - 1
    sleepers, example = [Sleeper() for _ in held], torch.zeros(1, WIDTH, requires_grad=True)
    stages: list[Any] = [
        PipelineStage(
            sleeper,
            stage,
            parallel.stages,
            torch.device("cpu"),
            input_args=(example,),
            output_args=(example,),
            group=group,
            dw_builder=sleeper.weight_gradient,
        )
        for stage, sleeper in zip(held, sleepers, strict=True)
    ]
    kind = get_schedule_class(parallel.schedule)
    given = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    schedule = kind(given, case.micro_batches, loss_fn=total, scale_grads=False)
    inputs = [torch.zeros(case.micro_batches, WIDTH)] * (0 in held)
    target = torch.zeros(case.micro_batches) if last in held else None

    def step() -> float:
        runtime.barrier()
        start = time.perf_counter()
        schedule.step(*inputs, target=target, return_outputs=False)
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        return float(seconds)

    step()
    for stage, sleeper in zip(held, sleepers, strict=True):
        sleeper.times = case.stages[stage]
    return min(step() for _ in range(times))


def total(output: Tensor, target: Tensor) -> Tensor:
    """A loss."""
    return output.sum() + target.sum()
