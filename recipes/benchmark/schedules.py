"""benchmark schedules: steps of torch's pipeline schedules on stages that sleep, against simulator and theory.

Every rank of the job is a pipeline rank. A sleeping stage needs no core, so 8 ranks on 2 cores wait for each other as
8 GPUs would; the time beyond the sleep is spent in torch's schedule, autograd and gloo. A rank's work on one micro
batch is the same under every schedule: with v stages per rank each sleeps 1/v as long. Forward and the two gradients
take the same time, as Qi et al. 2023 (arXiv 2401.10241) assume.

A `bubble` is the ranks' idle time over their computing time; `gain` is how many times faster than 1F1B a step is.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from torchllm.config import Parallel, PipelineSchedule
from torchllm.config.errors import UserError
from torchllm.facts.stages import stage_of_rank
from torchllm.runtime.process import Runtime
from torchllm.runtime.torch_pipeline import ConnectedStage
from torchllm.tools.planner.schedules import orders
from torchllm.tools.planner.simulate import Simulated, StageTimes, idle_in_theory, simulate

from .tools import TableRow, Tables, take_turns

if TYPE_CHECKING:
    from .settings import BenchmarkConfig

WIDTH = 64
"""elements that a stage sends for one micro batch: next to none"""

BASE_SCHEDULE: PipelineSchedule = "1F1B"
"""the others are compared with it"""

LEAST_ROUNDS = {"DualPipeV": 2}
"""micro batches that a schedule needs, in multiples of the ranks"""

ROUNDS_IN_THEORY = {"ZBVZeroBubble": 2}
"""the same for its closed form to hold"""


class Sleep(torch.autograd.Function):
    """Returns x after some seconds, and in the backward its gradient after some others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, times: StageTimes) -> Tensor:
        """Return x (1, WIDTH) unchanged. `parameter` gives the first stage a gradient too."""
        ctx.seconds = times.input_gradient
        time.sleep(times.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x unchanged."""
        time.sleep(ctx.seconds)
        return gradient, None, None


class Sleeper(nn.Module):
    """A stage that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.times = StageTimes(0, 0, 0)
        self.parameter = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return x (1, WIDTH) unchanged."""
        return Sleep.apply(x, self.parameter, self.times)

    def weight_gradient(self) -> Callable[[], None]:
        """Return the function for a micro batch's gradient of weights, called at once or later (`dw_builder`)."""
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
    def micro_batches(self) -> int:
        """Micro batches of the step."""
        return self.rounds * self.ranks

    @property
    def stages(self) -> list[StageTimes]:
        """Times of all stages. Unequal: every other one takes a quarter longer, the last half as long again."""
        count = self.parallel.stages
        factors = [1.0] * count
        if not self.equal:
            factors[1::2] = [1.25] * (count // 2)
            factors[-1] = 1.5
        times = []
        for factor in factors:
            seconds = self.seconds / self.parallel.stages_per_rank * factor
            times.append(StageTimes(forward=seconds, input_gradient=seconds, weight_gradient=seconds))
        return times

    def theory(self, work: float) -> float | None:
        """Return the bubble by the literature's closed form, if it has one; `work`: seconds that a rank computes."""
        if not self.equal or self.rounds < ROUNDS_IN_THEORY.get(self.schedule, 1):
            return None
        return idle_in_theory(self.parallel, self.stages[0]) / work


class ScheduleTime(NamedTuple):
    """A step as it was measured, and as it is simulated."""

    seconds: float
    """the fastest of all rounds"""
    simulated: Simulated


def schedules(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Time all cases in turns: one micro batch per rank, and four; equal and unequal stages."""
    if runtime.world_size == 1:
        raise UserError("benchmark schedules: start it under torchrun with 4 or 8 ranks: each is a pipeline rank")
    torch.set_num_threads(1)
    cases = list(all_cases(runtime.world_size, config.benchmark.sleep))
    times = take_turns([stepper(case, runtime) for case in cases], config.benchmark.rounds)
    tables: Tables = {"equal stages": [], "unequal stages": []}
    base: ScheduleTime | None = None
    for case, seconds in zip(cases, times, strict=True):
        time_of_case = ScheduleTime(min(seconds), simulate(orders(case.parallel, case.micro_batches), case.stages))
        if base is None or case.schedule == BASE_SCHEDULE:
            base = time_of_case
        tables["equal stages" if case.equal else "unequal stages"].append(case_row(case, time_of_case, base))
    return tables


def all_cases(ranks: int, seconds: float) -> Iterator[ScheduleCase]:
    """Yield every schedule for each kind of stages and number of micro batches, the one to compare with first."""
    compared = [name for name in get_args(PipelineSchedule) if name != BASE_SCHEDULE]
    for equal in (True, False):
        for rounds in (1, 4):
            for schedule in (BASE_SCHEDULE, *compared):
                if rounds >= LEAST_ROUNDS.get(schedule, 1):
                    yield ScheduleCase(schedule, ranks, rounds, equal, seconds)


def case_row(case: ScheduleCase, time_of_case: ScheduleTime, base: ScheduleTime) -> TableRow:
    """Return the table's row of one case; `base`: the same with 1F1B."""
    seconds, simulated = time_of_case
    work = sum(simulated.busy) / case.ranks
    return {
        "schedule": case.schedule,
        "micro_batches": case.micro_batches,
        "step_s": seconds,
        "simulated_s": simulated.step,
        "ratio": seconds / simulated.step,
        "bubble": seconds / work - 1,
        "simulated_bubble": simulated.bubble,
        "bubble_in_theory": case.theory(work),
        "gain": base.seconds / seconds,
        "simulated_gain": base.simulated.step / simulated.step,
    }


def stepper(case: ScheduleCase, runtime: Runtime) -> Callable[[], float]:
    """Return a function that takes one step and returns the seconds until the last rank has ended it.

    A step is taken here already, without sleep: it connects the ranks.
    """
    parallel = case.parallel
    group = runtime.host_group
    held = stage_of_rank(parallel, runtime.rank)
    sleepers = [Sleeper() for _ in held]
    stages = []
    for number, sleeper in zip(held, sleepers, strict=True):
        stages.append(pipeline_stage(sleeper, number, parallel.stages, runtime))
    schedule_class = get_schedule_class(parallel.schedule)
    owned: Any = stages[0] if issubclass(schedule_class, PipelineScheduleSingle) else stages
    schedule = schedule_class(owned, case.micro_batches, loss_fn=total, scale_grads=False)
    inputs = (torch.zeros(case.micro_batches, WIDTH),) if 0 in held else ()
    last_stage = parallel.stages - 1
    target = torch.zeros(case.micro_batches) if last_stage in held else None

    def step() -> float:
        runtime.barrier()
        start = time.perf_counter()
        schedule.step(*inputs, target=target, return_outputs=False)
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        return float(seconds)

    step()
    for number, sleeper in zip(held, sleepers, strict=True):
        sleeper.times = case.stages[number]
    return step


def pipeline_stage(sleeper: Sleeper, number: int, count: int, runtime: Runtime) -> ConnectedStage:
    """Return stage `number` of `count`, with static shapes: torch would run a forward to find them."""
    example = torch.zeros(1, WIDTH, requires_grad=True)
    return ConnectedStage(
        sleeper,
        number,
        count,
        torch.device("cpu"),
        input_args=(example,),
        output_args=(example,),
        group=runtime.host_group,
        dw_builder=sleeper.weight_gradient,
    )


def total(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss."""
    return output.sum() + target.sum()
