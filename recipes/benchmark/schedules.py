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
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from torchllm.config import Parallel, PipelineSchedule
from torchllm.config.errors import UserError
from torchllm.planner.simulate import StageTimes, idle_in_theory, simulate
from torchllm.runtime.process import Runtime
from torchllm.spec.schedules import orders
from torchllm.spec.stages import stage_of_rank

from .tools import TableRow, Tables, take_turns

if TYPE_CHECKING:
    from .settings import BenchmarkConfig

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


class ScheduleCase(NamedTuple):
    """A step of one schedule."""

    schedule: PipelineSchedule
    ranks: int
    rounds: int
    equal: bool
    seconds: float

    @property
    def parallel(self) -> Parallel:
        """Every rank is a pipeline rank."""
        return Parallel(pp=self.ranks, schedule=self.schedule)

    @property
    def stages(self) -> list[StageTimes]:
        """Times of all stages. Unequal: every other one takes a quarter longer, the last half as long again."""
        factors = [1.0 if self.equal else 1.0 + stage % 2 / 4 for stage in range(self.parallel.stages)]
        factors[-1] = 1.0 if self.equal else 1.5
        return [StageTimes(*[self.seconds / self.parallel.stages_per_rank * factor] * 3) for factor in factors]

    def theory(self, work: float) -> float | None:
        """The papers' bubble, if they have one; `work`: seconds that a rank computes."""
        has_form = self.equal and self.rounds >= ROUNDS_IN_THEORY.get(self.schedule, 1)
        return idle_in_theory(self.parallel, self.stages[0]) / work if has_form else None


def schedules(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """As many micro batches as ranks, and four times as many; equal stages, and unequal ones; all cases in turns."""
    if runtime.world_size == 1:
        raise UserError("benchmark.py schedules: start it under torchrun with 4 or 8 ranks: each is a pipeline rank")
    torch.set_num_threads(1)
    cases = [
        ScheduleCase(schedule, runtime.world_size, rounds, equal, config.benchmark.sleep)
        for equal in (True, False)
        for rounds in (1, 4)
        for schedule in sorted(get_args(PipelineSchedule), key="1F1B".__ne__)  # first: the others are compared with it
        if rounds >= LEAST_ROUNDS.get(schedule, 1)
    ]
    times = take_turns([stepper(case, runtime) for case in cases], config.benchmark.rounds)
    base: dict[tuple[bool, int], tuple[float, float]] = {}
    rows: dict[bool, list[TableRow]] = {True: [], False: []}
    for case, seconds in zip(cases, times, strict=True):
        micro_batches = case.rounds * case.ranks
        expected = simulate(orders(case.parallel, micro_batches), case.stages)
        step, work = min(seconds), sum(expected.busy) / case.ranks
        first, simulated = base.setdefault((case.equal, case.rounds), (step, expected.step))
        row: TableRow = {"schedule": case.schedule, "micro_batches": micro_batches, "step_s": step}
        row |= {"simulated_s": expected.step, "ratio": step / expected.step}
        row |= {"bubble": step / work - 1, "simulated_bubble": expected.bubble, "bubble_in_theory": case.theory(work)}
        rows[case.equal].append({**row, "gain": first / step, "simulated_gain": simulated / expected.step})
    return {"equal stages": rows[True], "unequal stages": rows[False]}


def stepper(case: ScheduleCase, runtime: Runtime) -> Callable[[], float]:
    """Takes one step and returns the seconds until the last rank has ended. A first step has connected the ranks."""
    parallel, group, micro_batches = case.parallel, runtime.host_group, case.rounds * case.ranks
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
    schedule = kind(given, micro_batches, loss_fn=total, scale_grads=False)
    inputs = [torch.zeros(micro_batches, WIDTH)] * (0 in held)
    target = torch.zeros(micro_batches) if last in held else None

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
    return step


def total(output: Tensor, target: Tensor) -> Tensor:
    """A loss."""
    return output.sum() + target.sum()
